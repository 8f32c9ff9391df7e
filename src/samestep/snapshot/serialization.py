"""Serialization of a run's state to JSON and tensors, without pickle.

The structure is JSON; types that JSON lacks are objects with the key "$", which names the type. Tensors are in files of
the safetensors format (https://github.com/huggingface/safetensors), for other programs: samestep finds them by the
manifest. It writes the format itself: that library needs all tensors in host memory at once, refuses two views of the
same memory, and reports a full disk with an exception that is not an `OSError`.
"""

import json
import math
import os
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import count
from json.encoder import encode_basestring_ascii as quote
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.decoding import MAX_DEPTH, Json
from samestep.errors import InvalidType
from samestep.files import open_regular
from samestep.hashing import hash_bytes, view_bytes
from samestep.processes import at_rest
from samestep.snapshot.manifest import METADATA, Extent, Extents
from samestep.torch_internals import get_local, is_sharded

KIND = "$"
_LARGE_BYTES = 1 << 18  # of a tensor, whose hash takes longer than to let the disk begin
_ARRAY_KINDS = "biufcSUmM"  # NumPy's kinds of dtypes that hold no objects
_Path = tuple[Any, ...]

# torch's names of dtypes -> those of safetensors.
_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
MAX_LEVELS = MAX_DEPTH // 3 - 1  # of nested values: a level is at most 3 levels of JSON, which has to be readable


def encode(state: Any, is_mine: Callable[[Tensor], bool] | None = None) -> tuple[Any, dict[str, Tensor]]:
    """Return the structure of a state as JSON, and its tensors by the names used there. Copies nothing.

    Tensors that share memory, shape and strides, such as tied weights, get one name.

    Args:
        is_mine: whether this rank stores a tensor, of a state that the ranks divide. Of a sharded tensor
            (`torch_internals.is_sharded`), a rank stores its rows. A tensor that only other ranks hold is one on the
            meta device here.

    Raises:
        InvalidType: the state contains anything other than tensors, NumPy arrays, numbers, strings, lists, tuples
            and dicts, or is nested deeper than `MAX_LEVELS`.
    """
    encoder = _Encoder(is_mine)
    return encoder.encode(state), encoder.tensors


def list_tensors(structure: Any) -> dict[str, int]:
    """Return the names of the tensors in an encoded state, with their sizes in bytes."""
    sizes = {}
    values = [structure]
    for value in values:  # which grows
        if isinstance(value, dict) and value.get(KIND) == "tensor":
            sizes[value["name"]] = math.prod(value["shape"]) * _find_dtype(value["dtype"]).itemsize
        elif isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
    return sizes


def digest(state: Any) -> str:
    """Return the sha256 of a state's content. It does not depend on devices, strides and the order of dicts.

    Copies at most one tensor at a time, and only if it is on a device or not contiguous.

    Raises:
        InvalidType: as in `encode`.
    """
    structure, tensors = encode(state)
    return digest_of(structure, {name: hash_bytes(view_bytes(tensor)) for name, tensor in tensors.items()})


def digest_of(structure: Any, hashes: Mapping[str, str]) -> str:
    """Return the `digest` of an encoded state, from the sha256 of each tensor's bytes."""
    return hash_bytes(json.dumps(_canonical(structure, hashes), sort_keys=True, separators=(",", ":")).encode())


def lay_out_tensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """Return the header of a safetensors file, and the names in the order of their bytes. Reads no values.

    Raises:
        KeyError: the format lacks a tensor's dtype.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": _CODES[_name_dtype(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, [name for name, _ in ordered]


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> Extents:
    """Write a safetensors file, one tensor after the other, the widest dtypes first so that all are aligned.

    Returns when the file is on the disk, which writes a large tensor while that is hashed. Copies at most one tensor at
    a time, and only if it is on a device or not contiguous.
    """
    header, names = lay_out_tensors(tensors)
    extents = [Extent(METADATA, len(header), hash_bytes(header))]
    last = end = file.write(header)
    for name in names:
        data = view_bytes(tensors[name])
        is_large = len(data) >= _LARGE_BYTES
        with at_rest() if is_large else nullcontext():
            end += file.write(data)
            if is_large:  # the disk begins to write it, and the memory of the tensor before is used again
                os.posix_fadvise(file.fileno(), last, end - last, os.POSIX_FADV_DONTNEED)
                last = end - len(data)
            extents.append(Extent(name, len(data), hash_bytes(data)))
    with at_rest():
        file.flush()
        os.fsync(file.fileno())
    return extents


class SavedState:
    """The state in a snapshot, of which a reader takes the tensors that it needs.

    A tensor that is in several files has its first rows in the first of them, and so on.

    Args:
        structure: from `encode`.
        directory: the directory of the files.
        files: the extents of the files with tensors, in the order of the ranks.

    Attributes:
        contents: the state. Its tensors are placeholders on the meta device.

    Raises:
        OSError, EOFError: a file cannot be read.
        ValueError, and others: the structure does not fit the files.
    """

    def __init__(self, structure: Any, directory: Path, files: Mapping[str, Extents]) -> None:
        self._structure = structure
        self._extents: dict[str, list[tuple[Path, int, int]]] = {}  # tensor -> files, with the first byte and the size
        for file, extents in files.items():
            start = 0
            for name, num_bytes, _ in extents:
                self._extents.setdefault(name, []).append((directory / file, start, num_bytes))
                start += num_bytes
        self._outlines: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}  # by the id of the placeholder
        self.contents: dict[str, Any] = self._decode(structure)

    def digest(self) -> str:
        """Return the `digest` of the state. Reads every byte, a tensor at a time."""
        hashes = {name: hash_bytes(view_bytes(self._read(each, each.shape))) for name, each in self._outlines.items()}
        return digest_of(self._structure, hashes)

    def read_rows(self, outline: Tensor, first: int, num_rows: int) -> Tensor:
        """Read some rows of a tensor, given by its placeholder. Raises OSError, EOFError or ValueError."""
        shape = outline.shape[1:]
        return self._read(outline, [num_rows, *shape], first * math.prod(shape) * outline.element_size())

    def fill(self, value: Any) -> Any:
        """Return a part of the contents with its tensors, in host memory. Errors as for `read_rows`.

        Tensors that were one in the state are one again.
        """
        return self._fill(value, {})

    def _fill(self, value: Any, made: dict[int, Tensor]) -> Any:
        if isinstance(value, dict) and not isinstance(value, Counter):
            filled = type(value)((key, self._fill(item, made)) for key, item in value.items())
            if (versions := getattr(value, "_metadata", None)) is not None:
                filled._metadata = versions  # type: ignore[attr-defined]  # noqa: SLF001
            return filled
        if type(value) in (list, tuple):
            return type(value)(self._fill(item, made) for item in value)
        if id(value) not in self._names:
            return value
        if id(value) not in made:
            made[id(value)] = self._read_whole(value)
        return made[id(value)]

    def _read_whole(self, outline: Tensor) -> Tensor:
        tensor = self._read(outline, outline.shape)
        if tensor.stride() == outline.stride():
            return tensor
        return torch.empty_strided(outline.shape, outline.stride(), dtype=outline.dtype).copy_(tensor)

    def _read(self, outline: Tensor, shape: Sequence[int], skip: int = 0) -> Tensor:
        """Read the bytes of a tensor after the first `skip`, as many as the shape has. Reads no others."""
        tensor = torch.empty(shape, dtype=outline.dtype)
        data = view_bytes(tensor)
        for path, start, num_bytes in self._extents[self._names[id(outline)]]:
            own = data[: max(num_bytes - skip, 0)]
            data = data[len(own) :]
            if own:
                _read_file(path, start + skip, own)
            skip = max(skip - num_bytes, 0)
        if data:
            raise ValueError(f"a tensor lacks {len(data)} bytes")
        return tensor

    def _decode(self, value: Any) -> Any:
        """Inverse of `_Encoder.encode`."""
        if isinstance(value, list):
            return [self._decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if KIND not in value:
            return {key: self._decode(item) for key, item in value.items()}
        match value[KIND]:
            case "tuple":
                return tuple(self._decode(value["items"]))
            case "float":
                return struct.unpack(">d", bytes.fromhex(value["hex"]))[0]
            case "dict":
                return dict(self._decode(value["items"]))
            case "counter":
                return Counter(dict(self._decode(value["items"])))
            case "state_dict":
                state_dict = OrderedDict(self._decode(value["items"]))
                state_dict._metadata = OrderedDict(self._decode(value["versions"]))  # type: ignore[attr-defined]  # noqa: SLF001
                return state_dict
            case "tensor":
                return self._outline(value)
            case "array":
                return self._decode_array(value)
            case "scalar":
                return self._decode_array(value)[()]
        raise ValueError(f"samestep does not write {value}")

    def _outline(self, value: Json) -> Tensor:
        """Return the placeholder of a tensor."""
        name = value["name"]
        if name in self._outlines:
            return self._outlines[name]
        dtype = _find_dtype(value["dtype"])
        outline = torch.empty(value["shape"], dtype=dtype, device="meta")
        if "strides" in value:
            outline = torch.empty_strided(value["shape"], value["strides"], dtype=dtype, device="meta")
        num_bytes = sum(size for _, _, size in self._extents[name])
        if outline.nbytes != num_bytes or not is_dense(outline):
            raise ValueError(f"samestep does not write {value} in {num_bytes} bytes")
        self._names[id(outline)] = name
        self._outlines[name] = outline
        return outline

    def _decode_array(self, value: Json) -> NDArray[Any]:
        data = view_bytes(self.fill(self._decode(value["bytes"])))
        dtype = np.dtype(value["dtype"])
        if dtype.kind not in _ARRAY_KINDS or dtype.itemsize * math.prod(value["shape"]) > len(data):
            raise ValueError(f"samestep does not write {value}")
        # NumPy accepts no buffer of 0 bytes for strings of length 0.
        return np.ndarray(value["shape"], dtype, data) if data else np.zeros(value["shape"], dtype)


def _read_file(path: Path, start: int, data: memoryview) -> None:
    """Fill `data` with the bytes of a file from the byte `start` on. Raises OSError or EOFError."""
    with open(path, "rb", opener=open_regular) as file:
        file.seek(start)
        if file.readinto(data) != len(data):
            raise EOFError(f"{path} is too short")


class _Encoder:
    """Encodes the values of one state. Attributes: `tensors`, those that this rank stores, by name."""

    def __init__(self, is_mine: Callable[[Tensor], bool] | None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._is_mine = is_mine
        self._named: dict[tuple[Any, ...], tuple[str, Tensor]] = {}  # by memory, which no other tensor gets meanwhile
        self._taken: set[str] = {METADATA}

    def encode(self, value: Any, path: _Path = ()) -> Any:
        """Return a value as JSON. `path`: the keys and indices that lead to it."""
        kind = type(value)
        if len(path) > MAX_LEVELS:
            raise _too_deep(path)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:  # bit for bit
            return value if math.isfinite(value) else {KIND: "float", "hex": struct.pack(">d", value).hex()}
        if kind is list:
            return [self.encode(item, (*path, index)) for index, item in enumerate(value)]
        if kind in (tuple, torch.Size):
            return {KIND: "tuple", "items": self.encode([*value], path)}
        if isinstance(value, dict):
            return self._encode_dict(value, path)
        # Only the objects have a sharded tensor on every rank.
        is_shard = self._is_mine is not None and is_sharded(value) and path[:1] == ("objects",)
        if is_shard or kind in (torch.Tensor, torch.nn.Parameter):
            return self._encode_tensor(value, path)
        if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in _ARRAY_KINDS:
            data = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
            return {
                KIND: "array" if kind is np.ndarray else "scalar",
                "dtype": value.dtype.str,
                "shape": list(value.shape),
                "bytes": self._encode_tensor(data, path),
            }
        raise _refusal(path, f"a {kind.__qualname__}" + (f" of {value.dtype}" if hasattr(value, "dtype") else ""))

    def _encode_dict(self, value: dict[Any, Any], path: _Path) -> Any:
        """Return a dict as JSON. Subclasses are lost, except for Counter and the versions in a model's state_dict."""
        versions = getattr(value, "_metadata", None)  # of the modules; load_state_dict reads them
        is_counter = isinstance(value, Counter)
        if versions is None and not is_counter and KIND not in value and {*map(type, value)} <= {str}:
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        level = len(path) + 1
        items = [[self._encode_key(key, path, level), self.encode(item, (*path, key))] for key, item in value.items()]
        if versions is not None:
            versions = self.encode(dict(versions), (*path, "_metadata"))
            return {KIND: "state_dict", "items": items, "versions": versions}
        return {KIND: "counter" if is_counter else "dict", "items": items}

    def _encode_key(self, key: Any, path: _Path, level: int) -> Any:
        """Return a key as JSON. `path`: that of the dict. `level`: how deep the key is nested."""
        if level > MAX_LEVELS:
            raise _too_deep(path)
        if type(key) is tuple:
            return {KIND: "tuple", "items": [self._encode_key(item, path, level + 1) for item in key]}
        if key is not None and type(key) not in (bool, int, float, str):
            raise _refusal(path, f"a dict with a {type(key).__qualname__} as key")
        return self.encode(key, path)

    def _encode_tensor(self, tensor: Tensor, path: _Path) -> Any:
        """Return a tensor as JSON. Of a sharded tensor, the JSON has the whole shape, and the rank stores its rows."""
        local = get_local(tensor)
        dtype = _name_dtype(tensor.dtype)
        is_elsewhere = tensor.is_meta and self._is_mine is not None
        if not is_elsewhere and (tensor.layout != torch.strided or tensor.is_meta or dtype not in _CODES):
            raise _refusal(path, f"a tensor of {tensor.layout} layout and {tensor.dtype} on {tensor.device}")
        memory = id(tensor) if tensor.is_meta else local.data_ptr()
        strides = local.stride()
        key = tensor.device, memory, tensor.shape, strides, dtype, local.is_conj(), local.is_neg()
        if key not in self._named:
            name = self._find_name(path)
            self._named[key] = name, local
            is_empty = local.numel() == 0 < tensor.numel()  # a shard without rows
            if not is_elsewhere and not is_empty and (self._is_mine is None or self._is_mine(tensor)):
                self.tensors[name] = local
        encoded = {KIND: "tensor", "name": self._named[key][0], "dtype": dtype, "shape": list(tensor.shape)}
        is_whole = local.shape == tensor.shape
        is_usual = local.is_contiguous() and min(local.shape, default=2) > 1  # a dimension of 1 may have any stride
        if (
            is_whole
            and not is_usual
            and strides != torch.empty(local.shape, device="meta").stride()
            and is_dense(local)
        ):
            encoded["strides"] = list(strides)  # the next update has the same bits in the same layout only
        return encoded

    def _find_name(self, path: _Path) -> str:
        name = wanted = "/".join(map(str, path))
        numbers = count(1)
        while name in self._taken:
            name = f"{wanted}~{next(numbers)}"
        self._taken.add(name)
        return name


def _canonical(value: Any, hashes: Mapping[str, str]) -> Any:
    """Return the content of an encoded state: without names of tensors, strides, the order of dicts and versions."""
    if isinstance(value, list):
        return [_canonical(item, hashes) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(KIND, "dict")
    if kind in ("dict", "counter", "state_dict"):
        pairs = value["items"] if KIND in value else value.items()
        # Of a str, json.dumps returns the same after several calls in Python.
        items = [[quote(key) if type(key) is str else json.dumps(key), _canonical(item, hashes)] for key, item in pairs]
        return {KIND: "counter" if kind == "counter" else "dict", "items": sorted(items, key=itemgetter(0))}
    if kind == "tensor":
        return {KIND: kind, "dtype": value["dtype"], "shape": value["shape"], "sha256": hashes[value["name"]]}
    return {key: _canonical(item, hashes) for key, item in value.items()}


@cache  # a call in Python per tensor counts
def _name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype in torch, such as "float32"."""
    return str(dtype).removeprefix("torch.")


@cache
def _find_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of this name. Raises ValueError if it is none."""
    if not isinstance(dtype := getattr(torch, name, None), torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a block of memory, in some order of the dims."""
    dims = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(dims).is_contiguous()


def _too_deep(path: _Path) -> InvalidType:
    return _refusal(path[:3], f"a value that contains itself, or is nested deeper than {MAX_LEVELS} levels")


def _refusal(path: _Path, what: str) -> InvalidType:
    if path[:1] == ("objects",):
        path = path[1:]
    where = "".join(f".{part}" if isinstance(part, str) else f"[{part!r}]" for part in path).lstrip(".")
    return InvalidType(
        f"{where or 'the state'} is {what}, which a snapshot cannot hold: leave it out of the state_dict, or make it "
        "of tensors, numpy arrays, numbers, strings, lists, tuples and dicts",
        code="SS414",
    )
