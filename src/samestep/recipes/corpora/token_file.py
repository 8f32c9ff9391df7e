"""Token files: text as one array of token numbers, which training maps into memory.

A directory holds `tokens.npy` (one dimension, uint16 or uint32), `tokens.json` (see `Description`) and, for BPE,
`tokenizer.json`. `samestep prepare text` writes it.
"""

import json
import math
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from samestep.decoding import Count, decode
from samestep.errors import Error, InvalidValue
from samestep.files import open_regular, read_bytes, replace_file
from samestep.hashing import hash_pieces
from samestep.recipes.corpora.text_tokenizer import BYTES, Tokenizer
from samestep.sources.token_windows import Tokens, TokenWindows

TOKENS = "tokens.npy"
DESCRIPTION = "tokens.json"
DEFINITION = "tokenizer.json"
FORMAT = 1
HASHED_BYTES = 64 << 20  # the checksum of larger files is not compared at each start
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Description(Struct, frozen=True):
    """The content of `tokens.json`.

    Attributes:
        end: the token that ends a document; None: there is none.
        sha256: of `tokens.npy`.
    """

    format: Count
    tokenizer: str
    vocabulary_size: Count
    end: Count | None
    num_tokens: Count
    num_documents: Count
    sha256: str


@dataclass(frozen=True)
class TokenCorpus:
    """The concatenated tokens (num_tokens,) of documents, and the tokenizer that made them.

    Attributes:
        name: origin of the text.
        num_documents: number of documents.
    """

    name: str
    tokens: Tokens
    tokenizer: Tokenizer
    num_documents: int


def split(corpus: TokenCorpus, context: int, fraction: float, most: int) -> tuple[TokenWindows, TokenWindows]:
    """Return the windows for training, and up to `most` windows of the tail, which is held out for validation.

    Args:
        fraction: the tail's share of the tokens; it has at least one window.

    Raises:
        InvalidValue: there are too few tokens.
    """
    num_tokens = len(corpus.tokens)
    size = corpus.tokenizer.vocabulary_size
    cut = min(int(num_tokens * (1 - fraction)), num_tokens - context - 1)
    if cut < context + 1:
        raise InvalidValue(
            f"{corpus.name} has {num_tokens} tokens, and sequences of {context} need at least {2 * context + 2}, one "
            "to train on and one held out: give more text, or a smaller --context",
            code="SS303",
        )
    every = math.ceil((num_tokens - cut - 1) // context / most)
    return (
        TokenWindows(corpus.tokens, context, 0, cut, size),
        TokenWindows(corpus.tokens, context, cut, num_tokens, size, every),
    )


def list_standard_library() -> list[Path]:
    """Return the source files of Python's standard library, without its tests, sorted by their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in LEFT_OUT]
        found += [Path(directory, file) for file in files if file.endswith(".py")]
    if not found:
        raise Error(
            f"there is no source of Python's standard library in {root}: name a token file by --data", code="SS701"
        )
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def read_standard_library() -> TokenCorpus:
    """Read the source of Python's standard library as bytes. Raises Error if there is none."""
    texts = [text for path in list_standard_library() if (text := path.read_bytes())]
    end = np.array([BYTES.end], np.uint16)
    parts = [part for text in texts for part in (np.frombuffer(text, np.uint8), end)]
    return TokenCorpus("the standard library's source", np.concatenate(parts, dtype=np.uint16), BYTES, len(texts))


def open_corpus(directory: Path) -> TokenCorpus:
    """Open a token file.

    Raises:
        InvalidValue: the file is missing, truncated, damaged or of another version.
    """
    again = "prepare it again with samestep prepare text"
    try:
        described, tokenizer = _read_description(directory)
        tokens = np.load(directory / TOKENS, mmap_mode="r")
        if tokens.shape != (described.num_tokens,) or tokens.dtype.kind != "u":
            raise ValueError(f"{TOKENS} holds {tokens.shape} {tokens.dtype}, not {described.num_tokens} tokens")
        if tokens.nbytes <= HASHED_BYTES and hash_file(directory / TOKENS) != described.sha256:
            raise ValueError(f"the checksum of {TOKENS} is wrong")
    except NotADirectoryError:
        what = "is a file: name the directory that samestep prepare text has written"
        raise InvalidValue(
            f"{directory} {what}, or make one of a text with samestep prepare text", code="SS701"
        ) from None
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise InvalidValue(
            f"{directory} is no token file, it has no {name}: make one with samestep prepare text", code="SS701"
        ) from None
    except Exception as error:  # NumPy raises OSError, ValueError, EOFError, OverflowError, SyntaxError and others
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidValue(f"the token file {directory} cannot be read ({why}): {again}", code="SS310") from None
    return TokenCorpus(str(directory), tokens, tokenizer, described.num_documents)


def name_tokenizer(directory: Path) -> str:
    """Return the name of a token file's tokenizer; "" if the file cannot be read (`open_corpus` says why)."""
    try:
        return str(_read_description(directory)[1])
    except (OSError, ValueError):
        return ""


def _read_description(directory: Path) -> tuple[Description, Tokenizer]:
    described = decode(read_bytes(directory / DESCRIPTION), Description)
    if described.format != FORMAT:
        raise ValueError(f"it has format {described.format}, and this samestep reads {FORMAT}")
    definition = b"" if described.tokenizer == "bytes" else read_bytes(directory / DEFINITION)
    return described, Tokenizer(described.tokenizer, described.vocabulary_size, described.end, definition)


def write_corpus(directory: Path, tokenizer: Tokenizer, documents: Iterable[Iterable[Tokens]]) -> dict[str, Any]:
    """Write a token file into an existing empty directory. Documents without tokens are left out.

    Args:
        documents: for each document, its tokens in pieces.

    Returns:
        The description that was written.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.uint32)
    num_tokens = num_documents = 0
    with open(directory / TOKENS, "xb", opener=open_regular) as file:
        _write_header(file, dtype, 0)
        for pieces in documents:
            before = num_tokens
            for piece in pieces:
                file.write(piece.astype(dtype).tobytes())
                num_tokens += len(piece)
            if num_tokens > before:
                num_documents += 1
                if tokenizer.end is not None:
                    file.write(np.array([tokenizer.end], dtype).tobytes())
                    num_tokens += 1
        file.seek(0)
        _write_header(file, dtype, num_tokens)  # NumPy leaves room in a header for a longer shape
        file.flush()
        os.fsync(file.fileno())
    described = {
        "format": FORMAT,
        "tokenizer": tokenizer.kind,
        "vocabulary_size": tokenizer.vocabulary_size,
        "end": tokenizer.end,
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "sha256": hash_file(directory / TOKENS),
    }
    if tokenizer.definition:
        replace_file(directory / DEFINITION, tokenizer.definition)
    replace_file(directory / DESCRIPTION, json.dumps(described, indent=1).encode() + b"\n")
    return described


def _write_header(file: Any, dtype: np.dtype[Any], num_tokens: int) -> None:
    described = {"descr": dtype.str, "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, described)


def hash_file(file: Path) -> str:
    """Return the SHA-256 of a file, as sha256sum prints it."""
    with open(file, "rb") as opened:
        return hash_pieces(iter(lambda: opened.read(1 << 20), b""))


def read_pieces(file: Path, piece_bytes: int = 1 << 16) -> Iterator[bytes]:
    """Yield the content of a file in pieces of whole lines, so that no character of UTF-8 is divided."""
    with open(file, "rb") as opened:
        while lines := opened.readlines(piece_bytes):
            yield b"".join(lines)
