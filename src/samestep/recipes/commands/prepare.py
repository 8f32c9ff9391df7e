"""`samestep prepare`: turns text into a token file for the recipe gpt."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click

from samestep.command_line import PATH, Command
from samestep.console import escape, say
from samestep.errors import Error, needing
from samestep.files import creating_directory
from samestep.recipes.corpora.text_tokenizer import (
    BYTES,
    MAX_TEXTS,
    Tokenizer,
    read_tokenizer,
    train_bpe,
    train_characters,
)
from samestep.recipes.corpora.token_file import list_standard_library, read_pieces, write_corpus
from samestep.sources.token_windows import Tokens
from samestep.tools.traced_script import exiting_on_sigterm
from samestep.units import format_bytes

REPORT_EVERY_S = 5.0
LEAST_BPE = 257  # a token per byte, and the end of a document

Documents = Callable[[], Iterator[Iterable[bytes]]]  # each call reads all documents again, each in pieces


@click.command("prepare", cls=Command)
@click.argument("kind", metavar="text", type=click.Choice(["text"]))
@click.argument("files", metavar="[FILE]...", nargs=-1, type=PATH)
@click.option("--out", type=PATH, metavar="DIR", required=True, help="directory to create")
@click.option(
    "--tokenizer",
    metavar="T",
    default="bytes",
    help="bytes (the default), chars or bpe (made of the text; need samestep[gpt]), or the tokenizer.json of a model",
)
@click.option("--vocab-size", metavar="N", type=int, help="vocabulary size of bpe (default: 8192)")
@click.option("--dataset", metavar="NAME", help="read this data set with datasets.load_dataset instead of files")
@click.option("--split", default="train", help="split of the data set (default: train)")
@click.option("--column", default="text", help="column of the data set with the text (default: text)")
def run_prepare(
    kind: str,
    files: Sequence[Path],
    out: Path,
    tokenizer: str,
    vocab_size: int | None,
    dataset: str | None,
    split: str,
    column: str,
) -> int:
    """Turns text into a token file, a directory that `samestep train gpt --data DIR` maps into memory.

    Each file, or each row of a data set, is one document in UTF-8. Without files, the text is the source of Python's
    standard library.

      samestep prepare text book.txt --out tokens
      samestep prepare text *.txt --out tokens --tokenizer bpe --vocab-size 8000
      samestep prepare text --dataset roneneldan/TinyStories --out tokens
    """
    if os.path.lexists(out):
        raise Error(f"{out} exists already: name another directory by --out, or remove it", code="SS113")
    if vocab_size is not None and tokenizer != "bpe":
        raise Error(
            f"--vocab-size is for --tokenizer bpe, and the tokenizer is {tokenizer}: leave it out", code="SS104"
        )
    if tokenizer == "bpe" and (vocab_size or LEAST_BPE) < LEAST_BPE:
        raise Error(f"--vocab-size is {vocab_size}: give at least {LEAST_BPE}, for all bytes and the end", code="SS101")
    if dataset is not None and files:
        raise Error("--dataset and files were both given: leave out one of them", code="SS104")
    documents = _find_documents(files) if dataset is None else _open_dataset(dataset, split, column)
    with exiting_on_sigterm(), creating_directory(out) as directory:
        used = _build_tokenizer(tokenizer, vocab_size, documents)
        described = write_corpus(directory, used, _encode(documents, used, ReadingProgress("tokenized")))
        if described["num_tokens"] == 0:
            raise Error("there is no text in the input: name files that are not empty", code="SS303")
    written = f"{described['num_tokens']:,} tokens of {used}, {described['num_documents']:,} documents"
    print(escape(f"{out}: {written}"))
    return 0


# --- input ------------------------------------------------------------------------------------------------------------


def _find_documents(files: Sequence[Path]) -> Documents:
    """Return a function that reads files, by default Python's source. Raises Error if they cannot be read."""
    files = files or list_standard_library()
    for file in files:
        if file.is_dir():
            raise Error(f"{file} is a directory: name files, such as {file}/*.txt", code="SS112")
        if not file.is_file():
            raise Error(f"there is no file {file}: name text files", code="SS112")
        if not os.access(file, os.R_OK):
            raise Error(f"{file} cannot be read: change its permissions, or leave it out", code="SS112")
    return lambda: (_check_text(file, read_pieces(file)) for file in files)


def _check_text(file: Path, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces. Raises Error for one that is not UTF-8."""
    num_bytes = 0
    for piece in pieces:
        try:
            piece.decode()
        except UnicodeDecodeError as error:
            at = num_bytes + error.start
            raise Error(
                f"{file} is not UTF-8 at byte {at:,} ({error.reason}): convert it, such as by iconv -f latin1 -t utf-8",
                code="SS701",
            ) from None
        num_bytes += len(piece)
        yield piece


def _open_dataset(name: str, split: str, column: str) -> Documents:
    """Load a data set of the library `datasets`: a name on the Hub, or a directory of data files."""
    with needing("--dataset needs the library datasets", "datasets"):
        import datasets
    try:
        rows: Any = datasets.load_dataset(name, split=split)
    except Exception as error:  # of many kinds
        why = " ".join(str(error).split())
        raise Error(
            f"the data set {name} cannot be loaded ({why}): check --dataset and --split", code="SS701"
        ) from None
    texts = [name for name, feature in rows.features.items() if getattr(feature, "dtype", "") == "string"]
    if column not in texts:
        raise Error(
            f"the data set {name} has no column {column} of text: name one of {', '.join(texts)} by --column",
            code="SS701",
        )
    return lambda: (
        [(text or "").encode(errors="replace")]
        for batch in rows.select_columns([column]).iter(1000)
        for text in batch[column]
    )


# --- output -----------------------------------------------------------------------------------------------------------


def _build_tokenizer(kind: str, vocab_size: int | None, documents: Documents) -> Tokenizer:
    if kind == "bytes":
        return BYTES
    if kind not in ("bpe", "chars"):
        return read_tokenizer(Path(kind))
    progress = ReadingProgress("read for the vocabulary")
    pieces = progress.count(piece for document in documents() for piece in document)
    return train_characters(pieces) if kind == "chars" else train_bpe(pieces, vocab_size or 8192)


def _encode(documents: Documents, tokenizer: Tokenizer, progress: "ReadingProgress") -> Iterator[Iterator[Tokens]]:
    return (_encode_document(document, tokenizer, progress) for document in documents())


def _encode_document(document: Iterable[bytes], tokenizer: Tokenizer, progress: "ReadingProgress") -> Iterator[Tokens]:
    pieces = progress.count(document)
    while texts := list(islice(pieces, MAX_TEXTS)):
        yield from tokenizer.encode(texts)


class ReadingProgress:
    """Prints how many bytes were read, every few seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._num_bytes = 0
        self._said_s = time.monotonic()

    def count(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the pieces, and count their bytes."""
        for piece in pieces:
            self._num_bytes += len(piece)
            if (now_s := time.monotonic()) - self._said_s >= REPORT_EVERY_S:
                self._said_s = now_s
                say(f"{format_bytes(self._num_bytes)} {self._what}")
            yield piece
