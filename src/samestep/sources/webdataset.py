"""Tar files in the layout of WebDataset: consecutive files with the same name, up to the extension, are one sample."""

import os
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.data.source import Shard
from samestep.errors import InvalidValue
from samestep.files import open_regular, replacing

MAX_OPEN = 64  # tars that a process holds open, with their indices in memory
INDEX = ".index.npz"
FORMAT = 1
KEY = "__key__"
MAX_BYTES_OF_NAME = 1000  # each name takes as much memory as the longest
MAX_INDEX_BYTES_PER_FILE = 8 * 4 + 2 * MAX_BYTES_OF_NAME
ARRAYS = {
    "keys": "S",
    "extensions": "S",
    "firsts": "i",
    "starts": "i",
    "sizes": "i",
    "kinds": "i",
}  # name -> dtype's kind

Index = dict[str, NDArray[Any]]


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
        samples = [self._read(shard, row) for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)]
        return samples if self._transform is None else [self._transform(sample) for sample in samples]

    def _read(self, shard: int, row: int) -> dict[str, Any]:
        file, index = self._open(shard)
        key = index["keys"][row].decode(errors="replace")
        if not _is_inside(key):
            raise InvalidValue(
                f"the index {self._index_files[shard]} has a sample {key}: remove it, and it is built again",
                code="SS310",
            )
        sample: dict[str, Any] = {KEY: key}
        for k in range(index["firsts"][row], index["firsts"][row + 1]):
            name = index["extensions"][index["kinds"][k]].decode(errors="replace")
            sample[name] = _read_bytes(file, int(index["starts"][k]), int(index["sizes"][k]))
        return sample

    def _open(self, shard: int) -> tuple[FileIO, Index]:
        """Return a tar and its index, from the cache if possible."""
        if shard in self._opened:
            self._opened.move_to_end(shard)
            return self._opened[shard]
        index = _read_index(self._index_files[shard], self.shards[shard].num_bytes)
        try:
            file = open(self._files[shard], "rb", buffering=0)  # noqa: SIM115  # it stays open
        except OSError as error:
            raise InvalidValue(
                f"the shard {self._files[shard]} cannot be read ({error.strerror}): restore it", code="SS310"
            ) from None
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
            what = "a directory" if file.is_dir() else "no regular file" if os.path.lexists(file) else "missing"
            raise InvalidValue(f"the shard {file} is {what}: restore it, or leave it out of the source", code="SS310")
    return found


def _is_inside(path: str) -> bool:
    """Return whether a path leads nowhere but into the directory that it is relative to.

    Example::

        >>> _is_inside("train/0001"), _is_inside("../0001"), _is_inside("/0001")
        (True, False, False)
    """
    return not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


def _read_bytes(file: FileIO, start: int, size: int) -> bytes:
    try:
        data = os.pread(file.fileno(), size, start)  # forked processes share the offset of `read`
    except OSError as error:
        raise InvalidValue(
            f"the shard {file.name} cannot be read ({error.strerror}): restore it", code="SS310"
        ) from None
    if len(data) < size:
        raise InvalidValue(f"the shard {file.name} is truncated at byte {start + len(data)}: restore it", code="SS310")
    return data


def _count_samples(tar: Path, at: Path) -> int:
    """Return the number of samples in a tar, from its index. Builds the index if it is missing or outdated."""
    status = tar.stat()
    mark = [FORMAT, status.st_size, status.st_mtime_ns]
    with suppress(Exception):  # it is missing or damaged; NumPy and zipfile raise errors of many kinds
        index = _load_index(at, status.st_size, ("mark", "firsts"))
        if index["mark"].tolist() == mark:
            return len(index["firsts"]) - 1
    index = _build_index(tar, status.st_size)
    try:
        with replacing(at, by_many=True) as partial, open(partial, "xb") as file:  # several ranks may write it
            np.savez(file, mark=np.array(mark), **index)  # type: ignore[arg-type]
    except OSError as error:
        raise InvalidValue(
            f"the index of {tar} cannot be written to {at} ({error.strerror}): set index_dir=", code="SS113"
        ) from None
    return len(index["firsts"]) - 1


def _load_index(at: Path, num_bytes: int, names: Sequence[str]) -> Index:
    """Read arrays of the index of a tar of `num_bytes`. Raises Exception."""
    with open(at, "rb", opener=open_regular) as file:
        with zipfile.ZipFile(file) as members:
            num_index_bytes = sum(member.file_size for member in members.infolist())
        if num_index_bytes > MAX_INDEX_BYTES_PER_FILE * (num_bytes // 512):
            raise ValueError("it is larger than that of any such tar")
        file.seek(0)
        with np.load(file, allow_pickle=False) as loaded:
            return {name: loaded[name] for name in names}


def _read_index(at: Path, num_bytes: int) -> Index:
    """Read the index of a tar of `num_bytes`. Raises InvalidValue if it is missing, damaged or not of such a tar."""
    try:
        index = _load_index(at, num_bytes, [*ARRAYS])
        firsts = index["firsts"]
        starts = index["starts"]
        sizes = index["sizes"]
        kinds = index["kinds"]
        is_sound = (
            all(array.ndim == 1 and array.dtype.kind == ARRAYS[name] for name, array in index.items())
            and len(firsts) == len(index["keys"]) + 1
            and len(starts) == len(sizes) == len(kinds) == firsts[-1]
            and firsts[0] == 0
            and (np.diff(firsts) > 0).all()
            and ((starts >= 0) & (sizes >= 0) & (sizes <= num_bytes) & (starts <= num_bytes - sizes)).all()
            and ((kinds >= 0) & (kinds < len(index["extensions"]))).all()
        )
        if not is_sound:
            raise ValueError("it is not of this tar")
    except Exception as error:  # NumPy and zipfile raise errors of many kinds
        raise InvalidValue(
            f"the index {at} cannot be read ({error}): remove it, and it is built again", code="SS310"
        ) from None
    return index


def _build_index(tar: Path, num_bytes: int) -> Index:
    """Return where the samples of a tar are.

    keys: per sample; firsts: its first file, and the number of files at the end. Per file: starts and sizes in bytes,
    kinds: the number of its extension in extensions.
    """
    keys: list[bytes] = []
    firsts = list[int]()
    starts = list[int]()
    sizes = list[int]()
    kinds = list[int]()
    extensions: dict[bytes, int] = {}
    try:
        with tarfile.open(tar, "r:") as opened:
            for member in opened:
                directory, _, file = member.name.rpartition("/")
                stem, dot, extension = file.partition(".")
                if not member.isreg() or not stem or not dot:
                    continue
                if member.size < 0 or member.offset_data + member.size > num_bytes:
                    raise tarfile.ReadError(f"{member.name} is cut off")
                if not _is_inside(directory.lstrip("/")) or len(os.fsencode(member.name)) > MAX_BYTES_OF_NAME:
                    raise tarfile.ReadError(f"{member.name[:100]} is no name of a sample")
                if extension == KEY:
                    raise tarfile.ReadError(f"{member.name} would replace the key of the sample")
                key = f"{directory}/{stem}".lstrip("/").encode()
                if not keys or keys[-1] != key:
                    keys.append(key)
                    firsts.append(len(starts))
                starts.append(member.offset_data)
                sizes.append(member.size)
                kinds.append(extensions.setdefault(extension.encode(), len(extensions)))
                opened.members = []  # type: ignore[attr-defined]  # tarfile keeps an object per file
    except Exception as error:  # of tarfile, and RecursionError, UnicodeError, ...
        raise InvalidValue(
            f"the shard {tar} is truncated, compressed or no tar file ({error}): restore it", code="SS310"
        ) from None
    return {
        "keys": np.array(keys, dtype="S"),
        "extensions": np.array([*extensions], dtype="S"),
        "firsts": np.array([*firsts, len(starts)]),
        "starts": np.array(starts, dtype=np.int64),
        "sizes": np.array(sizes, dtype=np.int64),
        "kinds": np.array(kinds, dtype=np.int64),
    }
