"""Common parts of the sources: names of files, places of samples, and reads that are safe after a fork."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.data.source import Shard
from samestep.errors import InvalidValue

MAX_OPEN = 64  # files of one source in one process


def list_files(files: str | Path | Iterable[str | Path], suffix: str) -> list[Path]:
    """Return files in the given order; for a directory, its files sorted by name.

    Raises:
        InvalidValue: there are no files, or one is missing.
    """
    if isinstance(files, str | Path):
        given = Path(files)
        found = sorted(given.glob(f"*{suffix}")) if given.is_dir() else [given]
    else:
        found = [Path(file) for file in files]
    if not found:
        raise InvalidValue(
            f"there are no {suffix} files in {files}: name the files, or a directory that has some", code="SS311"
        )
    for file in found:
        check_is_file(file, "restore it, or leave it out of the source")
    return found


def check_is_file(file: Path, advice: str) -> None:
    """Raise InvalidValue if a shard is missing, or is not a file, but a directory or a FIFO, for example."""
    if not file.is_file():
        what = "no regular file" if os.path.lexists(file) else "missing"
        if file.is_dir():
            what = "a directory"
        raise InvalidValue(f"the shard {file} is {what}: {advice}", code="SS310")


def is_inside(path: str) -> bool:
    """Return whether a path leads nowhere but into the directory that it is relative to.

    Example::

        >>> is_inside("train/0001"), is_inside("../0001"), is_inside("/0001")
        (True, False, False)
    """
    return not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


def name_files(files: Sequence[Path]) -> list[str]:
    """Return the paths relative to the common directory of all files, so that the data may be moved."""
    root = os.path.commonpath([file.parent for file in files])
    return [os.path.relpath(file, root) for file in files]


class Places:
    """Finds samples in shards. `counts`: samples per shard."""

    def __init__(self, counts: Iterable[int]) -> None:
        self._stops = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self._stops[-1])

    def find(self, indices: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard of each sample, and its number in the shard. Raises IndexError beyond the last sample."""
        asked = np.asarray(indices, dtype=np.int64)
        if asked.size and not (asked.min() >= 0 and asked.max() < len(self)):
            raise IndexError(f"samples {asked.min()} to {asked.max()} of {len(self)}")
        shards = np.searchsorted(self._stops, asked, side="right") - 1
        return shards, asked - self._stops[shards]


class Kept:
    """A function whose last `most` results are kept. They are not pickled."""

    def __init__(self, function: Callable[[int], Any], most: int) -> None:
        self._function = function
        self._most = most
        self._results: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_results": OrderedDict()}

    def __call__(self, number: int) -> Any:
        if number in self._results:
            self._results.move_to_end(number)
        else:
            while len(self._results) >= self._most:
                self._results.popitem(last=False)
            self._results[number] = self._function(number)
        return self._results[number]


class SampleFiles:
    """A source whose samples are read one by one. Subclasses define `_read(shard, row)`.

    Attributes:
        shards: the shards, for the order and the record of a run.
        shard_files: the file of each shard.
    """

    def __init__(self, shards: list[Shard], files: Sequence[Path], transform: Callable[[Any], Any] | None) -> None:
        self.shards = shards
        self.shard_files = files
        self._transform = transform
        self._places = Places(shard.num_samples for shard in shards)
        self._blobs = Blobs(files)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        shards, rows = self._places.find(indices)
        samples = [self._read(shard, row) for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)]
        return samples if self._transform is None else [self._transform(sample) for sample in samples]

    def _read(self, shard: int, row: int) -> dict[str, Any]:
        raise NotImplementedError


class Blobs:
    """Reads ranges of bytes. Files are opened at the first read, and again in a process that unpickles this object."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._open = Kept(self._open_file, MAX_OPEN)

    def _open_file(self, file: int) -> Any:
        return open(self._files[file], "rb", buffering=0)

    def read(self, file: int, start: int, size: int) -> bytes:
        """Return `size` bytes of a file from byte `start`. Raises InvalidValue if it has fewer, or cannot be read."""
        try:
            # pread does not use the file's offset, which forked processes share
            data = os.pread(self._open(file).fileno(), size, start)
        except OSError as error:
            raise InvalidValue(
                f"the shard {self._files[file]} cannot be read ({error.strerror}): restore it", code="SS310"
            ) from None
        if len(data) < size:
            raise InvalidValue(
                f"the shard {self._files[file]} is truncated at byte {start + len(data)}: restore it", code="SS310"
            )
        return data
