"""Serialization of a run's state to JSON and tensors, without pickle.

The structure is JSON; types that JSON lacks are objects with the key "$", which names the type. Tensors are in files of
the safetensors format (https://github.com/huggingface/safetensors). It is implemented here because that library needs
all tensors in host memory at once, refuses two views of the same memory, reads lazily from files that may have been
removed by then, and reports a full disk with an exception that is not an `OSError`.
"""

import base64
import json
import math
import os
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from samestep.data.content import view_bytes
from samestep.decoding import Count, convert, parse_json
from samestep.errors import InvalidType
from samestep.files import MOST_BYTES, open_regular
from samestep.hashing import hash_bytes
from samestep.snapshot.manifest import Pieces
from samestep.world.forking import at_rest, at_work

if TYPE_CHECKING:
    from torch import Tensor

KIND = "$"

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
_NAMES = {code: name for name, code in _CODES.items()}
_ARRAY_KINDS = "biufcSUmM"
_AS_REAL = ("complex32", "complex128")  # safetensors lacks them: stored as pairs of reals


class _Entry(Struct):
    dtype: str
    shape: Annotated[list[Count], Meta(max_length=64)]
    data_offsets: tuple[Count, Count]

    def __post_init__(self) -> None:
        if self.dtype not in _NAMES:
            raise ValueError(f"there is no dtype {self.dtype}")


def encode(state: Any) -> tuple[Any, dict[str, "Tensor"]]:
    """Return the structure of a state as JSON, and its tensors by the names used there. Copies nothing.

    Tensors that share memory, shape and strides, such as tied weights, get one name.

    Raises:
        InvalidType: the state contains anything other than tensors, NumPy arrays, numbers, strings, bytes, lists,
            tuples, dicts and sets.
    """
    encoder = _Encoder()
    return encoder.encode(state, ()), encoder.tensors


def decode(structure: Any, tensors: Mapping[str, "Tensor"]) -> Any:
    """Return the state from the result of `encode`. Tensors with the same name become one tensor."""
    import torch

    made: dict[str, Tensor] = {}
    arrays = set[str]()

    def visit(value: Any) -> Any:
        if isinstance(value, list):
            return [visit(item) for item in value]
        if not isinstance(value, dict):
            return value
        if KIND not in value:
            return {key: visit(item) for key, item in value.items()}
        match value[KIND]:
            case "tuple":
                return tuple(visit(value["items"]))
            case "set":
                return set(visit(value["items"]))
            case "dict":
                return visit_items(value)
            case "counter":
                return Counter(visit_items(value))
            case "state_dict":
                state_dict = OrderedDict(visit_items(value))
                state_dict._metadata = OrderedDict(visit(value["versions"]))  # type: ignore[attr-defined]  # noqa: SLF001
                return state_dict
            case "tensor":
                name = value["name"]
                if name not in made:
                    made[name] = _restore_tensor(tensors[name], value)
                return made[name]
            case "array":
                if value["name"] in arrays:  # each would be a copy
                    raise ValueError(f"{value['name']} is in the state twice")
                arrays.add(value["name"])
                return _restore_array(tensors[value["name"]].numpy().tobytes(), value).copy()
            case "scalar":
                return _restore_array(bytes.fromhex(value["hex"]), value)[()]
            case "float":
                return struct.unpack(">d", bytes.fromhex(value["hex"]))[0]
            case "complex":
                return complex(*struct.unpack(">dd", bytes.fromhex(value["hex"])))
            case "bytes":
                return base64.b64decode(value["base64"])
            case "dtype" if isinstance(dtype := getattr(torch, value["name"]), torch.dtype):
                return dtype
        raise ValueError(f"samestep does not write {value}")

    def visit_items(value: Any) -> dict[Any, Any]:
        return {visit(key): visit(item) for key, item in value["items"]}

    return visit(structure)


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
    text = json.dumps(_canonical(structure, hashes), sort_keys=True, separators=(",", ":"))
    return hash_bytes(text.encode())


def write_tensors(file: BinaryIO, tensors: Mapping[str, "Tensor"]) -> tuple[Pieces, dict[str, str]]:
    """Write a safetensors file, one tensor after the other, the widest dtypes first so that all are aligned.

    Returns when the file is on the disk. Another thread hashes meanwhile, which takes as long as writing and syncing.
    Each thread copies at most one tensor at a time, and only if it is on a device or not contiguous.

    Returns:
        The pieces of the file, and by name the sha256 of each tensor's bytes.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header = {}
    end = 0
    for name, tensor in ordered:
        start = end
        end = end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _CODES[_name_of(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = struct.pack("<Q", len(text)) + text
    file.write(text)
    hashes: dict[str, str] = {}

    def hash_all() -> None:
        for name, tensor in ordered:
            with at_work():
                data = view_bytes(tensor)
            hashes[name] = hash_bytes(data)

    # Not concurrent.futures, which starts no thread after the main thread has ended.
    hashing = Thread(target=hash_all, name="samestep hashing")
    hashing.start()
    try:
        for _, tensor in ordered:
            data = view_bytes(tensor)
            with at_rest():
                file.write(data)
        with at_rest():
            file.flush()
            os.fsync(file.fileno())
    finally:
        with at_rest():  # a fork may wait for this thread, and the other one for the fork
            hashing.join()
    lengths = [(name, tensor.numel() * tensor.element_size()) for name, tensor in ordered]
    return [(len(text), hash_bytes(text)), *((length, hashes[name]) for name, length in lengths)], hashes


def read_tensors(path: Path) -> dict[str, "Tensor"]:
    """Read the tensors of a safetensors file. Allocates no more memory than the file's size.

    Raises:
        OSError: the file cannot be read.
        ValueError, EOFError: the file is not a safetensors file.
    """
    import torch

    tensors = {}
    with open(path, "rb", opener=open_regular) as file:
        size = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if length > min(size - 8, MOST_BYTES):
            raise ValueError(f"{path.name} has a header of {length} bytes")
        header = convert(parse_json(file.read(length)), dict[str, Any])
        header.pop("__metadata__", None)
        left = size - 8 - length
        for name, entry in convert(header, dict[str, _Entry]).items():
            dtype = getattr(torch, _NAMES[entry.dtype])
            start, end = entry.data_offsets
            if end - start != math.prod(entry.shape) * dtype.itemsize:
                raise ValueError(f"{path.name} has a header that does not fit it")
            left -= end - start
            if left < 0 and end <= size - 8 - length:
                raise ValueError(f"{path.name} has entries that overlap")
            if end > size - 8 - length:
                raise EOFError(f"{path} ends within {name}")
            file.seek(8 + length + start)
            tensor = torch.empty(entry.shape, dtype=dtype)
            data = view_bytes(tensor)
            if file.readinto(data) != len(data):
                raise EOFError(f"{path} ends within {name}")
            tensors[name] = tensor
    return tensors


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        import torch

        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {KIND: "float", "hex": struct.pack(">d", value).hex()}
        if kind is list:
            return self._encode_all(value, path)
        if kind in (tuple, torch.Size):
            return {KIND: "tuple", "items": self._encode_all(value, path)}
        if isinstance(value, dict):
            return self._encode_dict(value, path)
        if kind is set:
            return {KIND: "set", "items": sorted((self._encode_key(item, path) for item in value), key=json.dumps)}
        if kind in (torch.Tensor, torch.nn.Parameter):
            return self._encode_tensor(value.detach(), path)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._encode_array(value, path)
        if kind is complex:
            return {KIND: "complex", "hex": struct.pack(">dd", value.real, value.imag).hex()}
        if kind is bytes:
            return {KIND: "bytes", "base64": base64.b64encode(value).decode()}
        if kind is torch.dtype:
            return {KIND: "dtype", "name": _name_of(value)}
        raise _refusal(path, f"a {kind.__qualname__}")

    def _encode_all(self, values: Iterable[Any], path: tuple[Any, ...]) -> list[Any]:
        return [self.encode(value, (*path, index)) for index, value in enumerate(values)]

    def _encode_dict(self, value: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        encoded = {key: self.encode(item, (*path, key)) for key, item in value.items()}
        # The versions of the modules in a state_dict, which load_state_dict reads.
        versions = getattr(value, "_metadata", None)
        plain = versions is None and not isinstance(value, Counter)
        if plain and KIND not in encoded and all(type(key) is str for key in encoded):
            return encoded
        items = [[self._encode_key(key, path), item] for key, item in encoded.items()]
        if versions is not None:
            return {KIND: "state_dict", "items": items, "versions": self.encode(dict(versions), (*path, "_metadata"))}
        return {KIND: "counter" if isinstance(value, Counter) else "dict", "items": items}

    def _encode_key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if type(key) is tuple:
            return {KIND: "tuple", "items": [self._encode_key(item, path) for item in key]}
        if key is not None and type(key) not in (bool, int, float, str, bytes):
            raise _refusal(path, f"a dict or set with a {type(key).__qualname__} as key")
        return self.encode(key, path)

    def _encode_tensor(self, tensor: "Tensor", path: tuple[Any, ...]) -> Any:
        import torch

        dtype = _name_of(tensor.dtype)
        if tensor.layout != torch.strided or tensor.is_meta or dtype not in (*_CODES, *_AS_REAL):
            raise _refusal(path, f"a tensor of {tensor.layout} layout and {tensor.dtype} on {tensor.device}")
        shape = list(tensor.shape)
        strides = tensor.stride()
        memory = tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        key = *memory, tensor.is_conj(), tensor.is_neg(), dtype, tuple(shape), strides
        if key not in self._names:
            stored = torch.view_as_real(tensor.resolve_conj()) if dtype in _AS_REAL else tensor
            self._names[key] = self._add(stored, path)
        encoded = {KIND: "tensor", "name": self._names[key], "dtype": dtype, "shape": shape}
        if strides != torch.empty(shape, device="meta").stride() and is_dense(tensor):
            encoded["strides"] = list(strides)  # the next update has the same bits in the same layout only
        return encoded

    def _encode_array(self, array: "NDArray[Any] | np.generic", path: tuple[Any, ...]) -> Any:
        import torch

        if array.dtype.kind not in _ARRAY_KINDS:
            raise _refusal(path, f"a numpy value of dtype {array.dtype}")
        encoded = {"dtype": array.dtype.str, "shape": list(array.shape)}
        if isinstance(array, np.generic):
            return {KIND: "scalar", "hex": array.tobytes().hex(), **encoded}
        data = np.frombuffer(array.tobytes(), np.uint8).copy()
        return {KIND: "array", "name": self._add(torch.from_numpy(data), path), **encoded}

    def _add(self, tensor: "Tensor", path: tuple[Any, ...]) -> str:
        name = wanted = "/".join(map(str, path))
        count = 1
        while name in self.tensors or name == "__metadata__":  # reserved by safetensors
            name = f"{wanted}~{count}"
            count = count + 1
        self.tensors[name] = tensor
        return name


def _restore_tensor(stored: "Tensor", value: Mapping[str, Any]) -> "Tensor":
    import torch

    tensor = torch.view_as_complex(stored) if value["dtype"] in _AS_REAL else stored
    if "strides" not in value:
        return tensor
    pairs = zip(value["shape"], value["strides"], strict=True)
    if tensor.numel() and 1 + sum((length - 1) * stride for length, stride in pairs) > tensor.numel():
        raise ValueError(f"a tensor with strides {value['strides']} is not what samestep writes")
    return torch.empty_strided(value["shape"], value["strides"], dtype=tensor.dtype).copy_(tensor)


def _restore_array(data: bytes, value: Mapping[str, Any]) -> "NDArray[Any]":
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"an array of {dtype} is not what samestep writes")
    if not data and dtype.itemsize * math.prod(value["shape"]):
        raise ValueError("an array is shorter than its shape")
    # NumPy accepts no buffer of 0 bytes for strings of length 0.
    return np.ndarray(value["shape"], dtype, data) if data else np.zeros(value["shape"], dtype)


def _canonical(value: Any, hashes: Mapping[str, str]) -> Any:
    """Return the content of an encoded state: without names of tensors, strides, the order of dicts and versions."""
    if isinstance(value, list):
        return [_canonical(item, hashes) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(KIND, "dict")
    if kind in ("dict", "counter", "state_dict"):
        pairs = value["items"] if KIND in value else value.items()
        items = [[json.dumps(key), _canonical(item, hashes)] for key, item in pairs]
        return {KIND: "counter" if kind == "counter" else "dict", "items": sorted(items, key=lambda pair: pair[0])}
    plain = {key: item for key, item in value.items() if key not in ("name", "items", "strides")}
    if kind in ("tensor", "array"):
        return plain | {"sha256": hashes[value["name"]]}
    return value if "items" not in value else plain | {"items": _canonical(value["items"], hashes)}


def is_dense(tensor: "Tensor") -> bool:
    """Return whether the elements fill a block of memory, in some order of the dims."""
    dims = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(dims).is_contiguous()


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _refusal(path: tuple[Any, ...], what: str) -> InvalidType:
    if path[:1] == ("objects",):
        path = path[1:]
    where = "".join(f".{part}" if isinstance(part, str) else f"[{part!r}]" for part in path).lstrip(".")
    return InvalidType(
        f"{where or 'the state'} is {what}, which a snapshot cannot hold: leave it out of the state_dict, or make it "
        "of tensors, numpy arrays, numbers, strings, bytes, lists, tuples, dicts and sets"
    )
