"""MosaicML's MDS shards, version 2, as `streaming.MDSWriter` writes them: `index.json` and uncompressed shards.

A shard consists of the number of its samples and `number + 1` offsets, all uint32, followed by the samples. A sample
consists of the sizes of its columns of variable size, as uint32, followed by the columns.
"""

import io
import json
import re
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from samestep.data.source import Shard
from samestep.decoding import Count, decode
from samestep.errors import InvalidValue
from samestep.files import read_bytes
from samestep.sources.shard_files import Kept, SampleFiles, check_is_file, is_inside

CACHED_SHARDS = 64  # shards whose offsets are kept
SCALARS = (
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)
# The numbers of dtypes in a column "ndarray", and of the dtypes of its shape.
VALUES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
SHAPES = ("uint8", "uint16", "uint32", "uint64")
Decoder = Callable[[bytes], Any]


class _RawData(Struct):
    basename: str
    bytes: Count

    def __post_init__(self) -> None:
        if not is_inside(self.basename):
            raise ValueError(f"{self.basename} is outside the directory")


class _ShardEntry(Struct):
    samples: Count
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[Count | None]
    raw_data: _RawData
    format: Any = None
    version: Any = None
    compression: Any = None


class _Index(Struct):
    """`index.json`, as far as it is read."""

    shards: list[_ShardEntry]


class MDS(SampleFiles):
    """A directory of MDS shards, as a source of dicts.

    Encodings: bytes, str, int, (u)int8 to 64, float16 to 64, str_int, str_float, json, ndarray, jpeg and png (as Pillow
    images). Others, such as pickles, are refused by name.

    Args:
        directory: directory with `index.json`.
        transform: function of a sample, such as one that makes tensors of its columns.

    Raises:
        InvalidValue: the index cannot be read, or a shard is missing, has a wrong size or an unsupported encoding.

    Example::

        >>> import json, numpy, pathlib
        >>> from samestep.sources import MDS
        >>> shard = numpy.array([2, 16, 24, 32], "<u4").tobytes() + numpy.array([7, 8], "<i8").tobytes()
        >>> about = {"format": "mds", "version": 2, "samples": 2, "column_names": ["label"], "column_sizes": [8]}
        >>> about |= {"column_encodings": ["int"], "raw_data": {"basename": "0.mds", "bytes": len(shard)}}
        >>> _ = pathlib.Path("0.mds").write_bytes(shard)
        >>> _ = pathlib.Path("index.json").write_text(json.dumps({"shards": [about]}))
        >>> MDS(".")[1]
        {'label': 8}
    """

    def __init__(self, directory: str | Path, transform: Callable[[dict[str, Any]], Any] | None = None) -> None:
        root = Path(directory)
        try:
            index = decode(read_bytes((root / "index.json").resolve()), _Index)
            entries = [entry for entry in index.shards if entry.samples]
            self._columns = [
                [*zip(entry.column_names, entry.column_encodings, entry.column_sizes, strict=True)] for entry in entries
            ]
        except OSError as error:
            raise InvalidValue(
                f"{root} is no directory of MDS shards ({error.strerror}: index.json)", code="SS311"
            ) from None
        except ValueError as error:
            raise InvalidValue(
                f"{root / 'index.json'} is no index of MDS shards ({error}): restore it", code="SS310"
            ) from None
        self._files = [root / entry.raw_data.basename for entry in entries]
        self._num_bytes = [entry.raw_data.bytes for entry in entries]
        self._counts = [entry.samples for entry in entries]
        for entry, file, num_bytes in zip(entries, self._files, self._num_bytes, strict=True):
            _check_shard(entry, file, num_bytes)
        for name, encoding, _ in {column for columns in self._columns for column in columns}:
            if _find_decoder(encoding) is None:
                raise InvalidValue(
                    f"column {name} of {root} has the encoding {encoding}, which is not supported", code="SS311"
                )
        rows = zip(self._files, self._counts, self._num_bytes, strict=True)
        super().__init__([Shard(file.name, *sizes) for file, *sizes in rows], self._files, transform)
        self._read_offsets = Kept(self._read_offsets_of, CACHED_SHARDS)

    def _read_offsets_of(self, shard: int) -> NDArray[np.uint32]:
        count = self._counts[shard]
        num_bytes = self._num_bytes[shard]
        header = np.frombuffer(self._blobs.read(shard, 0, 4 * (count + 2)), "<u4")
        if header[0] != count or header[-1] > num_bytes or (np.diff(header[1:].astype(np.int64)) < 0).any():
            raise InvalidValue(
                f"the shard {self._files[shard]} is damaged: its offsets are not of {count} samples", code="SS310"
            )
        return header[1:]

    def _read(self, shard: int, row: int) -> dict[str, Any]:
        start, stop = map(int, self._read_offsets(shard)[row : row + 2])
        data = self._blobs.read(shard, start, stop - start)
        columns = self._columns[shard]
        num_sizes = sum(not size for _, _, size in columns)
        sample = {}
        at = 4 * num_sizes
        where = "its sizes"
        try:
            sizes = iter(np.frombuffer(data, "<u4", num_sizes).tolist())
            for name, encoding, fixed in columns:
                where = f"column {name}"
                size = fixed or next(sizes)
                decode = _find_decoder(encoding)
                assert decode is not None
                sample[name] = decode(data[at : at + size])
                at = at + size
        except Exception as error:  # of any kind, as the decoders are of other libraries
            what = f"{where}: {type(error).__name__}: {error}"
            raise InvalidValue(
                f"sample {row} of shard {self._files[shard]} is damaged ({what}): restore it", code="SS310"
            ) from None
        return sample


def _check_shard(entry: _ShardEntry, file: Path, num_bytes: int) -> None:
    if entry.format != "mds" or entry.version != 2:
        what = f"format {entry.format}, version {entry.version}"
        raise InvalidValue(f"the shard {file} has {what}: samestep reads mds, version 2", code="SS311")
    packed = entry.compression
    check_is_file(file, f"decompress it ({packed})" if packed else "restore it, and index.json with it")
    if (found := file.stat().st_size) != num_bytes:
        raise InvalidValue(
            f"the shard {file} has {found} bytes, and index.json says {num_bytes}: restore it", code="SS310"
        )
    if 4 * (entry.samples + 2) > num_bytes:
        raise InvalidValue(
            f"the shard {file} is too short for {entry.samples} samples of index.json: restore both", code="SS310"
        )


@lru_cache(maxsize=256)
def _find_decoder(encoding: str) -> Decoder | None:
    kind, _, arguments = encoding.partition(":")
    if encoding in SCALARS:
        dtype = np.dtype(encoding).newbyteorder("<")
        return lambda data: np.frombuffer(data, dtype)[0]
    if kind == "ndarray":
        values, _, lengths = arguments.partition(":")
        if (values and values not in VALUES.values()) or (lengths and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", lengths)):
            return None
        return _build_array_decoder(values, lengths)
    plain: dict[str, Decoder] = {
        "bytes": bytes,
        "str": bytes.decode,
        "int": lambda data: int.from_bytes(data, "little", signed=True),
        "str_int": int,
        "str_float": float,
        "json": json.loads,
        "jpeg": partial(_open_image, "JPEG"),
        "png": partial(_open_image, "PNG"),
    }
    return plain.get(encoding)


def _build_array_decoder(dtype: str, lengths: str) -> Decoder:
    fixed = tuple(map(int, lengths.split(","))) if lengths else None

    def decode(data: bytes) -> NDArray[Any]:
        kind, at = (dtype, 0) if dtype else (VALUES[data[0]], 1)
        shape = fixed
        if shape is None:
            ndim = data[at] >> 2
            of_shape = np.dtype(SHAPES[data[at] & 3])
            shape = tuple(np.frombuffer(data, of_shape, ndim, at + 1).tolist())
            at += 1 + ndim * of_shape.itemsize
        return np.frombuffer(data, kind, offset=at).reshape(shape).copy()  # writable, as torch wants it

    return decode


def _open_image(kind: str, data: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(data), formats=(kind,))  # of any other format, Pillow might start a program
