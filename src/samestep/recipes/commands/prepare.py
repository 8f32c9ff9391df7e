"""`samestep prepare`: turns text into a token file for the recipe gpt."""

import os
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from samestep.command_line import PATH, Command
from samestep.console import escape
from samestep.errors import Error
from samestep.files import creating_directory
from samestep.recipes.corpora.text_tokenizer import BYTES, Tokenizer, read_tokenizer, train_bpe, train_characters
from samestep.recipes.corpora.token_file import DEFINITION, TOKENS, concatenate, list_standard_library
from samestep.tools.traced_script import exiting_on_sigterm

LEAST_BPE = 257  # a token per byte, and the end of a document
PIECE = 1 << 16  # characters that are encoded at a time, on all cores


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
@click.option(
    "--vocab-size", metavar="N", type=click.IntRange(LEAST_BPE), default=8192, help="tokens of bpe (default: 8192)"
)
def run_prepare(kind: str, files: Sequence[Path], out: Path, tokenizer: str, vocab_size: int) -> int:
    """Turns text into a token file, a directory that `samestep train gpt --data DIR` maps into memory.

    Each file is one document in UTF-8. Without files, the text is the source of Python's standard library.

      samestep prepare text book.txt --out tokens
      samestep prepare text *.txt --out tokens --tokenizer bpe --vocab-size 8000
    """
    if os.path.lexists(out):
        raise Error(f"{out} exists already: name another directory by --out, or remove it", code="SS113")
    with exiting_on_sigterm(), creating_directory(out) as directory:
        documents = [_read_pieces(file) for file in files or list_standard_library()]
        used = _build_tokenizer(tokenizer, vocab_size, [piece for pieces in documents for piece in pieces])
        tokens = concatenate([used.encode(pieces) for pieces in documents], used)
        if not len(tokens):
            raise Error("there is no text in the input: name files that are not empty", code="SS303")
        np.save(directory / TOKENS, tokens)
        if used.definition:
            (directory / DEFINITION).write_text(used.definition, "utf-8")
    print(escape(f"{out}: {len(tokens):,} tokens, {used}"))
    return 0


def _read_pieces(file: Path) -> list[str]:
    """Return the text of a file in pieces of whole lines."""
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            return ["".join(lines) for lines in iter(lambda: opened.readlines(PIECE), [])]
    except UnicodeDecodeError as error:
        raise Error(f"{file} is not UTF-8 ({error}): convert it, such as by iconv", code="SS701") from None
    except OSError as error:
        raise Error(f"{file} cannot be read ({error.strerror}): name text files", code="SS112") from None


def _build_tokenizer(kind: str, vocab_size: int, texts: Sequence[str]) -> Tokenizer:
    if kind == "bytes":
        return BYTES
    if kind == "chars":
        return train_characters(texts)
    return train_bpe(texts, vocab_size) if kind == "bpe" else read_tokenizer(Path(kind))
