"""Sources of common formats, read from local or mounted disks by random access. See docs/streaming.md.

`TokenWindows` are sequences of tokens from a file that is mapped into memory. A `WebDataset` has tar files, in which
consecutive files with the same name, up to the extension, are one sample.
"""

import os
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from io import FileIO
from mmap import mmap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from samestep.data.source import Shard
from samestep.decoding import Count
from samestep.errors import InvalidValue
from samestep.files import open_regular, read_bytes, replacing

__all__ = ["TokenWindows", "WebDataset", "open_tokens"]

Tokens = NDArray[np.integer[Any]]

MAX_OPEN = 16  # tars that a process holds open, with their indices in memory
INDEX = ".index.json"
FORMAT = 1
KEY = "__key__"
MAX_MARK_BYTES = 100
MAX_INDEX_SIZE = 8  # relative to the tar, which has all names of the index, too

# An index has two lines of JSON: a mark (`FORMAT`, the tar's size and time, the number of samples), and the samples:
# the key of each and, by extension, where its files begin in the tar and how long they are.
Index = list[tuple[str, dict[str, tuple[Count, Count]]]]


# --- tokens -----------------------------------------------------------------------------------------------------------


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
        return self.__getitems__([index])[0]  # type: ignore[no-any-return]

    def read_batch(self, indices: NDArray[np.int64]) -> Tensor:
        """Return the windows as a tensor (len(indices), context + 1). See `samestep.Source`."""
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


# --- tars -------------------------------------------------------------------------------------------------------------


class WebDataset:
    """Uncompressed tar files, as a source of dicts: "__key__" and, by extension, the files' bytes.

    The index of each tar, a file beside it, is built when the tar is first used, and again when the tar has changed.
    With several ranks, each would build the indices, so call `run.once(WebDataset, ...)` for large data.

    Args:
        files: the tars in their order, or a directory of `*.tar`.
        transform: function of a sample, such as a decoder.
        index_dir: directory for the indices, if the directory of the tars is read-only.

    Attributes:
        shards: the tars, for the order and the record of a run.

    Raises:
        InvalidValue: a tar is missing, truncated or compressed, or the index cannot be written.

    Example::

        >>> import pathlib, tarfile
        >>> from samestep.sources import WebDataset
        >>> for name in ("cat", "dog"):
        ...     _ = pathlib.Path(f"{name}.txt").write_text(f"a {name}")
        >>> with tarfile.open("pets.tar", "w") as tar:
        ...     tar.add("cat.txt"), tar.add("dog.txt")
        >>> pets = WebDataset("pets.tar", transform=lambda sample: sample["txt"].decode())
        >>> len(pets), pets[1]
        (2, 'a dog')
    """

    def __init__(
        self,
        files: str | Path | Iterable[str | Path],
        transform: Callable[[dict[str, Any]], Any] | None = None,
        *,
        index_dir: str | Path | None = None,
    ) -> None:
        self._files = _list_tars(files)
        root = os.path.commonpath([file.parent for file in self._files])
        names = [os.path.relpath(file, root) for file in self._files]  # the data may be moved
        self._index_files = [
            Path(index_dir, name.replace(os.sep, "--") + INDEX) if index_dir else file.with_name(file.name + INDEX)
            for file, name in zip(self._files, names, strict=True)
        ]
        self.shards = [
            Shard(name, _count_samples(file, at), file.stat().st_size)
            for name, file, at in zip(names, self._files, self._index_files, strict=True)
        ]
        self._transform = transform
        self._stops = np.cumsum([0, *(shard.num_samples for shard in self.shards)])
        self._opened: OrderedDict[int, tuple[FileIO, Index]] = OrderedDict()  # the one used last is at the end

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": OrderedDict()}

    def __len__(self) -> int:
        return int(self._stops[-1])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        asked = np.asarray(indices, dtype=np.int64)
        if asked.size and not (asked.min() >= 0 and asked.max() < len(self)):
            raise IndexError(f"samples {asked.min()} to {asked.max()} of {len(self)}")
        shards = np.searchsorted(self._stops, asked, side="right") - 1
        rows = asked - self._stops[shards]
        samples = [*map(self._read, shards.tolist(), rows.tolist())]
        return samples if self._transform is None else [self._transform(sample) for sample in samples]

    def _read(self, shard: int, row: int) -> dict[str, Any]:
        try:
            file, index = self._open(shard)
            key, ranges = index[row]
            num_bytes = self.shards[shard].num_bytes
            if not _is_inside(key) or any(start + size > num_bytes for start, size in ranges.values()):
                raise InvalidValue(
                    f"the index {self._index_files[shard]} has a sample {key}: remove it, and it is built again",
                    code="SS310",
                )
            return {**{name: _read_bytes(file, *each) for name, each in ranges.items()}, KEY: key}
        except OSError as error:
            raise InvalidValue(
                f"the shard {self._files[shard]} cannot be read ({error.strerror}): restore it", code="SS310"
            ) from None

    def _open(self, shard: int) -> tuple[FileIO, Index]:
        """Return a tar and its index, from the cache if possible."""
        if shard in self._opened:
            self._opened.move_to_end(shard)
            return self._opened[shard]
        index = _read_index(self._index_files[shard], self.shards[shard])
        file = open(self._files[shard], "rb", buffering=0)  # noqa: SIM115  # it stays open
        if len(self._opened) == MAX_OPEN:
            self._opened.popitem(last=False)
        self._opened[shard] = file, index
        return file, index


def _list_tars(files: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return files in the given order; for a directory, its tars sorted by name."""
    if isinstance(files, str | Path):
        given = Path(files)
        found = sorted(given.glob("*.tar")) if given.is_dir() else [given]
    else:
        found = [Path(file) for file in files]
    if not found:
        raise InvalidValue(
            f"there are no .tar files in {files}: name the files, or a directory that has some", code="SS311"
        )
    for file in found:
        if not file.is_file():
            raise InvalidValue(
                f"the shard {file} is missing or no regular file: restore it, or leave it out of the source",
                code="SS310",
            )
    return found


def _is_inside(path: str) -> bool:
    """Return whether a path leads nowhere but into the directory that it is relative to.

    Example::

        >>> _is_inside("train/0001"), _is_inside("../0001"), _is_inside("/0001")
        (True, False, False)
    """
    return not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


def _read_bytes(file: FileIO, start: int, size: int) -> bytes:
    data = os.pread(file.fileno(), size, start)  # forked processes share the offset of `read`
    if len(data) < size:
        raise InvalidValue(f"the shard {file.name} is truncated at byte {start + len(data)}: restore it", code="SS310")
    return data


def _count_samples(tar: Path, at: Path) -> int:
    """Return the number of samples in a tar, from its index. Builds the index if it is missing or outdated."""
    status = tar.stat()
    mark = [FORMAT, status.st_size, status.st_mtime_ns]
    with suppress(OSError, msgspec.DecodeError), open(at, "rb", opener=open_regular) as file:
        *found, num_samples = msgspec.json.decode(file.readline(MAX_MARK_BYTES), type=list[Count])
        if found == mark:
            return num_samples
    index = _build_index(tar, status.st_size)
    try:
        with replacing(at, by_many=True) as partial, open(partial, "xb") as file:  # several ranks may write it
            file.write(msgspec.json.encode([*mark, len(index)]) + b"\n" + msgspec.json.encode(index))
    except OSError as error:
        raise InvalidValue(
            f"the index of {tar} cannot be written to {at} ({error.strerror}): set index_dir=", code="SS113"
        ) from None
    return len(index)


def _read_index(at: Path, shard: Shard) -> Index:
    """Read the index of a tar. Raises InvalidValue if it is missing, damaged or not of this tar."""
    try:
        _, _, text = read_bytes(at, MAX_INDEX_SIZE * shard.num_bytes).partition(b"\n")
        index: Index = msgspec.json.decode(text, type=Index)
        if len(index) != shard.num_samples:
            raise ValueError(f"it has {len(index)} samples, not {shard.num_samples}")
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise InvalidValue(
            f"the index {at} cannot be read ({error}): remove it, and it is built again", code="SS310"
        ) from None
    return index


def _build_index(tar: Path, num_bytes: int) -> Index:
    """Return where the samples of a tar are."""
    index: Index = []
    try:
        with tarfile.open(tar, "r:") as opened:
            for member in opened:
                directory, _, file = member.name.rpartition("/")
                stem, dot, extension = file.partition(".")
                if not member.isreg() or not stem or not dot:
                    continue
                if member.size < 0 or member.offset_data + member.size > num_bytes:
                    raise tarfile.ReadError(f"{member.name} is cut off")
                if not _is_inside(directory.lstrip("/")):
                    raise tarfile.ReadError(f"{member.name} is no name of a sample")
                member.name.encode()  # the index has no names that are not UTF-8
                if extension == KEY:
                    raise tarfile.ReadError(f"{member.name} would replace the key of the sample")
                key = f"{directory}/{stem}".lstrip("/")
                if not index or index[-1][0] != key:
                    index.append((key, {}))
                index[-1][1][extension] = member.offset_data, member.size
                opened.members = []  # type: ignore[attr-defined]  # tarfile keeps an object per file
    except Exception as error:  # of tarfile, and RecursionError, UnicodeError, ...
        raise InvalidValue(
            f"the shard {tar} is truncated, compressed or no tar file ({error}): restore it", code="SS310"
        ) from None
    return index
