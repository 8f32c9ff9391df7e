"""Sequences of tokens from a file that is mapped into memory."""

import os
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from samestep.data.source import Shard
from samestep.errors import InvalidValue

if TYPE_CHECKING:
    from torch import Tensor

Tokens = NDArray[np.integer[Any]]


class TokenWindows:
    """Sequences of `context` tokens and the token after them, as a data set. They overlap by one token.

    `read_batch` reads a micro-batch as one tensor, without an object per sample.

    Args:
        tokens: the tokens (n,), an array or a memory-mapped file.
        context: length of a sequence.
        start, stop: use `tokens[start:stop]`, which must have at least `context + 1` tokens.
        vocabulary_size: number of tokens; a larger one in the file is an error.
        every: use only one of this many consecutive sequences.

    Example::

        >>> import numpy
        >>> from samestep.sources import TokenWindows
        >>> windows = TokenWindows(numpy.arange(10), context=4, start=0, stop=10, vocabulary_size=10)
        >>> len(windows), windows[1]
        (2, array([4, 5, 6, 7, 8]))
    """

    def __init__(
        self, tokens: Tokens, context: int, start: int, stop: int, vocabulary_size: int, every: int = 1
    ) -> None:
        self._tokens = tokens
        self._arguments = (context, start, stop, vocabulary_size, every)
        self._windows = sliding_window_view(tokens[start:stop], context + 1)[:: context * every]
        self._vocabulary_size = vocabulary_size

    @property
    def shards(self) -> list[Shard]:
        """The file as a shard, for the record of a run; no shard for tokens in memory."""
        if (mapped := self._mapped) is None:
            return []
        return [Shard(Path(mapped.filename).name, len(self), os.path.getsize(mapped.filename))]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        window: NDArray[np.int64] = self.__getitems__([index])[0]
        return window

    def read_batch(self, indices: NDArray[np.int64]) -> "Tensor":
        """Return the windows as a tensor (len(indices), context + 1). See `samestep.Source`."""
        import torch

        return torch.from_numpy(self.__getitems__(indices))

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the windows (len(indices), context + 1).

        Raises:
            InvalidValue: a token is not in the vocabulary.
        """
        read = self._windows[indices]
        if read.max() >= self._vocabulary_size:
            raise InvalidValue(
                f"the token file holds token {read.max()}, and its vocabulary has {self._vocabulary_size}: give a "
                "larger vocabulary size, or restore the file",
                code="SS310",
            )
        return read.astype(np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path of a memory-mapped file instead of its content, for workers that are not forked."""
        if (mapped := self._mapped) is not None:
            return _map_windows, (mapped.filename, mapped.dtype, mapped.offset, mapped.shape, *self._arguments)
        return TokenWindows, (self._tokens, *self._arguments)

    @property
    def _mapped(self) -> Any:
        """The memory-mapped file, if the tokens are a whole file; else None."""
        owner: object = self._tokens.base
        return self._tokens if isinstance(self._tokens, np.memmap) and isinstance(owner, mmap) else None


def _map_windows(file: str, dtype: Any, offset: int, shape: tuple[int], *arguments: int) -> TokenWindows:
    return TokenWindows(np.memmap(file, dtype, "r", offset, shape), *arguments)


def open_tokens(
    file: str | Path, context: int, *, dtype: str = "uint16", vocabulary_size: int | None = None
) -> TokenWindows:
    """Open a file of tokens as a source of sequences.

    Args:
        file: as for `map_tokens`.
        context: length of a sequence; samples have one token more.
        dtype: dtype of a file without a header.
        vocabulary_size: number of tokens; a larger one in the file is an error. None: any.

    Raises:
        InvalidValue: the file is missing, damaged, or has too few tokens.

    Example::

        >>> import numpy
        >>> from samestep.sources import open_tokens
        >>> numpy.arange(10, dtype="uint16").tofile("train.bin")
        >>> windows = open_tokens("train.bin", context=4)
        >>> len(windows), windows[0]
        (2, array([0, 1, 2, 3, 4]))
    """
    path = Path(file)
    tokens = map_tokens(path, dtype)
    if context < 1 or len(tokens) <= context:
        raise InvalidValue(
            f"{path} has {len(tokens)} tokens, too few for a sequence of {context} and one more", code="SS303"
        )
    largest = np.iinfo(tokens.dtype).max + 1 if vocabulary_size is None else vocabulary_size
    return TokenWindows(tokens, context, 0, len(tokens), largest)


def map_tokens(path: Path, dtype: str) -> Tokens:
    """Map a file of tokens into memory. Raises InvalidValue if it is missing or damaged.

    Args:
        path: a one-dimensional `.npy` file; any other file is an array without a header, such as nanoGPT's `train.bin`.
        dtype: dtype of a file without a header.
    """
    try:
        is_array = path.suffix == ".npy"
        tokens = np.load(path, mmap_mode="r") if is_array else np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"it holds {tokens.shape} {tokens.dtype}, not a row of whole numbers")
    except Exception as error:  # NumPy raises OSError, ValueError, EOFError, OverflowError, SyntaxError and others
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InvalidValue(f"the token file {path} cannot be read ({why}): restore it", code="SS310") from None
    return tokens
