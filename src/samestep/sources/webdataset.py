"""Tar files in the layout of WebDataset: consecutive files of one name, without their extensions, are one sample."""

import os
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.data.source import Shard
from samestep.errors import Error
from samestep.sources.shard_files import Blobs, Places, list_files, name_files

CACHED_SHARDS = 64  # whose indices are kept
INDEX = ".index.npz"
FORMAT = 1

Index = dict[str, NDArray[Any]]


class WebDataset:
    """Uncompressed tar files, as a source of dicts: "__key__" and, by extension, the files' bytes.

    An index of each tar is built when it is first used, and again when the tar has changed. It lies beside the tar.
    Several ranks would each build it, so call `run.once(WebDataset, ...)` for large data.

    Args:
        files: the tars in their order, or a directory of `*.tar`.
        transform: function of a sample, such as a decoder.
        index_dir: directory for the indices, if that of the tars is read-only.

    Raises:
        Error: a tar is missing, truncated or compressed, or the index cannot be written.
    """

    def __init__(
        self,
        files: str | Path | Iterable[str | Path],
        transform: Callable[[dict[str, Any]], Any] | None = None,
        *,
        index_dir: str | Path | None = None,
    ) -> None:
        self._files = list_files(files, ".tar")
        self._names, self._transform = name_files(self._files), transform
        self._index_files = [
            Path(index_dir, name.replace(os.sep, "--") + INDEX) if index_dir else file.with_name(file.name + INDEX)
            for file, name in zip(self._files, self._names, strict=True)
        ]
        self._counts = [
            _count_samples(file, at) for file, at in zip(self._files, self._index_files, strict=True)
        ]
        self._num_bytes = [file.stat().st_size for file in self._files]
        self._blobs, self._places = Blobs(self._files), Places(self._counts)
        self._begin()

    def _begin(self) -> None:
        self._read_index = lru_cache(maxsize=CACHED_SHARDS)(lambda shard: _read_index(self._index_files[shard]))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_read_index"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def shards(self) -> list[Shard]:
        """The tars, for the order and the record of a run."""
        return [Shard(*row) for row in zip(self._names, self._counts, self._num_bytes, strict=True)]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        samples = [self._read(int(shard), int(row)) for shard, row in zip(*self._places.find(indices), strict=True)]
        return samples if self._transform is None else [self._transform(sample) for sample in samples]

    def _read(self, shard: int, row: int) -> dict[str, Any]:
        index = self._read_index(shard)
        sample: dict[str, Any] = {"__key__": index["keys"][row].decode()}
        for k in range(index["firsts"][row], index["firsts"][row + 1]):
            name = index["extensions"][index["kinds"][k]].decode()
            sample[name] = self._blobs.read(shard, int(index["starts"][k]), int(index["sizes"][k]))
        return sample


def _count_samples(tar: Path, at: Path) -> int:
    """Return the number of samples in a tar, from its index. Builds the index if there is none of this tar."""
    status = tar.stat()
    mark = [FORMAT, status.st_size, status.st_mtime_ns]
    try:
        with np.load(at, allow_pickle=False) as index:
            if index["mark"].tolist() == mark:
                return len(index["firsts"]) - 1
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # missing or damaged
    index = _build_index(tar, status.st_size)
    try:
        with tempfile.NamedTemporaryFile(dir=at.parent, prefix=f".{at.name}", delete=False) as file:
            np.savez(file, mark=np.array(mark), **index)  # type: ignore[arg-type]
        os.replace(file.name, at)
    except OSError as error:
        raise Error(f"the index of {tar} cannot be written to {at} ({error.strerror}): give index_dir=") from None
    return len(index["firsts"]) - 1


def _read_index(at: Path) -> Index:
    try:
        with np.load(at, allow_pickle=False) as index:
            return dict(index)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise Error(f"the index {at} cannot be read ({error}): start again, which builds it again") from None


def _build_index(tar: Path, num_bytes: int) -> Index:
    """Return where the samples of a tar are.

    keys: per sample; firsts: its first file, and the number of files at the end. Per file: starts and sizes in bytes,
    kinds: the number of its extension in extensions.
    """
    keys: list[bytes] = []
    firsts, starts, sizes, kinds = list[int](), list[int](), list[int](), list[int]()
    extensions: dict[bytes, int] = {}
    try:
        with tarfile.open(tar, "r:") as opened:
            for member in opened:
                directory, _, file = member.name.rpartition("/")
                stem, dot, extension = file.partition(".")
                if not member.isreg() or not stem or not dot:
                    continue
                if member.offset_data + member.size > num_bytes:
                    raise tarfile.ReadError(f"{member.name} is cut off")
                key = f"{directory}/{stem}".removeprefix("/").encode()
                if not keys or keys[-1] != key:
                    keys.append(key)
                    firsts.append(len(starts))
                starts.append(member.offset_data)
                sizes.append(member.size)
                kinds.append(extensions.setdefault(extension.encode(), len(extensions)))
                opened.members = []  # type: ignore[attr-defined]  # tarfile keeps an object per file
    except (tarfile.TarError, OSError, UnicodeError) as error:
        raise Error(f"the shard {tar} is truncated, compressed or no tar file ({error}): restore it") from None
    return {
        "keys": np.array(keys, dtype="S"), "extensions": np.array([*extensions], dtype="S"),
        "firsts": np.array([*firsts, len(starts)]), "starts": np.array(starts, dtype=np.int64),
        "sizes": np.array(sizes, dtype=np.int64), "kinds": np.array(kinds, dtype=np.int64),
    }  # fmt: skip
