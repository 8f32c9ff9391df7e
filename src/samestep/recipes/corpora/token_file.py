"""Token files: text as one array of token numbers, which training maps into memory.

A directory holds `tokens.npy` (one dimension, uint16 or uint32) and `tokenizer.json`, unless the tokens are bytes.
`samestep prepare text` writes it.
"""

import math
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from samestep.errors import InvalidValue
from samestep.recipes.corpora.text_tokenizer import BYTES, Tokenizer, read_tokenizer
from samestep.sources.token_windows import Tokens, TokenWindows

TOKENS = "tokens.npy"
DEFINITION = "tokenizer.json"
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class TokenCorpus:
    """The concatenated tokens (num_tokens,) of documents, and the tokenizer that made them. `name`: their origin."""

    name: str
    tokens: Tokens
    tokenizer: Tokenizer


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
            "to train on and one held out: give more text, a smaller --context, or a smaller --held-out",
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
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def read_standard_library() -> TokenCorpus:
    """Read the source of Python's standard library as bytes."""
    texts = [path.read_bytes() for path in list_standard_library()]
    tokens = concatenate([[np.frombuffer(text, np.uint8)] for text in texts], BYTES)
    return TokenCorpus("the standard library's source", tokens, BYTES)


def concatenate(documents: Sequence[Sequence[Tokens]], tokenizer: Tokenizer) -> Tokens:
    """Return the tokens of documents, each in pieces, with the token for the end after each that is not empty."""
    end = np.array([] if tokenizer.end is None else [tokenizer.end], np.uint32)
    parts = [part for pieces in documents if any(map(len, pieces)) for part in (*pieces, end)]
    dtype = np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.uint32
    return np.concatenate([end[:0], *parts], dtype=dtype, casting="unsafe")


def open_corpus(directory: Path) -> TokenCorpus:
    """Open a token file. Raises InvalidValue if it is missing, truncated or damaged."""
    try:
        tokens = np.load(directory / TOKENS, mmap_mode="r")
        if tokens.ndim != 1 or tokens.dtype.kind != "u":
            raise ValueError(f"{TOKENS} holds {tokens.shape} {tokens.dtype}, not a row of tokens")
    except (OSError, ValueError, EOFError) as error:
        raise InvalidValue(
            f"{directory} is no token file ({error}): make one with samestep prepare text, and name its directory",
            code="SS701",
        ) from None
    has_definition = os.path.exists(directory / DEFINITION)
    return TokenCorpus(str(directory), tokens, read_tokenizer(directory / DEFINITION) if has_definition else BYTES)
