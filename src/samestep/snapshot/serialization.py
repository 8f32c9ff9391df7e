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
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from samestep.decoding import MAX_DEPTH
from samestep.errors import InvalidType
from samestep.files import open_regular
from samestep.hashing import hash_bytes
from samestep.snapshot.manifest import METADATA, Piece, Pieces
from samestep.tagged import ARRAY_KINDS, KIND, Decoder, Encoder, Place, decode_array, find_dtype, name_dtype, view_bytes
from samestep.world.forking import at_rest, at_work

if TYPE_CHECKING:
    from torch import Tensor

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


def encode(state: Any, is_mine: "Callable[[Tensor], bool] | None" = None) -> tuple[Any, dict[str, "Tensor"]]:
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
    """Return the names of the tensors and arrays in an encoded state, with their sizes in bytes."""
    if isinstance(structure, list):
        return {name: size for item in structure for name, size in list_tensors(item).items()}
    if not isinstance(structure, dict):
        return {}
    if structure.get(KIND) not in ("array", "tensor"):
        return list_tensors([*structure.values()])
    find = np.dtype if structure[KIND] == "array" else find_dtype
    return {structure["name"]: math.prod(structure["shape"]) * find(structure["dtype"]).itemsize}


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


def lay_out_tensors(
    tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """Return the header of a safetensors file, and the names in the order of their bytes. Reads no values.

    Raises:
        KeyError: the format lacks a tensor's dtype.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        start = end
        end = end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _CODES[name_dtype(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, [name for name, _ in ordered]


def write_tensors(file: BinaryIO, tensors: Mapping[str, "Tensor"]) -> Pieces:
    """Write a safetensors file, one tensor after the other, the widest dtypes first so that all are aligned.

    Returns when the file is on the disk. Another thread hashes meanwhile, which takes as long as writing and syncing.
    Each thread copies at most one tensor at a time, and only if it is on a device or not contiguous.
    """
    header, names = lay_out_tensors(tensors)
    pieces = [Piece(METADATA, len(header), hash_bytes(header))]
    file.write(header)

    def hash_all() -> None:
        for name in names:
            with at_work():
                data = view_bytes(tensors[name])
            pieces.append(Piece(name, len(data), hash_bytes(data)))

    # Not concurrent.futures, which starts no thread after the main thread has ended.
    hashing = Thread(target=hash_all, name="samestep hashing")
    hashing.start()
    try:
        for name in names:
            data = view_bytes(tensors[name])
            with at_rest():
                file.write(data)
        with at_rest():
            file.flush()
            os.fsync(file.fileno())
    finally:
        with at_rest():  # a fork may wait for this thread, and the other one for the fork
            hashing.join()
    return pieces


class _Extent(NamedTuple):
    """A tensor, or some of its rows, in a file from the byte `start` on."""

    path: Path
    start: int
    num_bytes: int


class SavedState(Decoder):
    """The state in a snapshot, of which a reader takes the tensors that it needs.

    A tensor that is in several files has its first rows in the first of them, and so on.

    Args:
        structure: from `encode`.
        directory: the directory of the files.
        files: the pieces of the files with tensors, in the order of the ranks.

    Attributes:
        contents: the state. Its tensors are placeholders on the meta device.

    Raises:
        OSError, EOFError: a file cannot be read.
        ValueError, and others: the structure does not fit the files.
    """

    def __init__(self, structure: Any, directory: Path, files: Mapping[str, Pieces]) -> None:
        self._structure = structure
        self._extents: dict[str, list[_Extent]] = {}
        for file, pieces in files.items():
            start = 0
            for name, num_bytes, _ in pieces:
                self._extents.setdefault(name, []).append(_Extent(directory / file, start, num_bytes))
                start += num_bytes
        self._sizes = list_tensors(structure)
        for name, size in self._sizes.items():
            if sum(extent.num_bytes for extent in self._extents[name]) != size:
                raise ValueError(f"{name} does not have {size} bytes")
        self._outlines: dict[str, Tensor] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        self.contents: dict[str, Any] = self.decode(structure)
        self._names = {id(tensor): name for name, tensor in self._outlines.items()}

    def digest(self) -> str:
        """Return the `digest` of the state. Reads every byte, a tensor at a time."""
        return digest_of(self._structure, {name: hash_bytes(self._read(name)) for name in self._sizes})

    def read_rows(self, outline: "Tensor", first: int, num_rows: int) -> "Tensor":
        """Read some rows of a tensor, given by its placeholder. Raises OSError, EOFError or ValueError."""
        import torch

        tensor = torch.empty([num_rows, *outline.shape[1:]], dtype=outline.dtype)
        row_bytes = tensor[:1].numel() * tensor.element_size()
        self._read_into(view_bytes(tensor), self._names[id(outline)], first * row_bytes)
        return tensor

    def fill(self, value: Any) -> Any:
        """Return a part of the contents with its tensors, in host memory. Errors as for `read_rows`.

        Tensors that were one in the state are one again.
        """
        return self._fill(value, {})

    def _fill(self, value: Any, made: dict[int, "Tensor"]) -> Any:
        if isinstance(value, Mapping) and not isinstance(value, Counter):
            filled = type(value)((key, self._fill(item, made)) for key, item in value.items())  # type: ignore[call-arg]
            if (versions := getattr(value, "_metadata", None)) is not None:
                filled._metadata = versions  # type: ignore[attr-defined]  # noqa: SLF001
            return filled
        if type(value) in (list, tuple):
            return type(value)(self._fill(item, made) for item in value)
        if id(value) not in self._names:
            return value
        if id(value) not in made:
            made[id(value)] = self._read_tensor(value)
        return made[id(value)]

    def _read_tensor(self, outline: "Tensor") -> "Tensor":
        import torch

        tensor = torch.empty(outline.shape, dtype=outline.dtype)
        self._read_into(view_bytes(tensor), self._names[id(outline)])
        if tensor.stride() == outline.stride():
            return tensor
        return torch.empty_strided(outline.shape, outline.stride(), dtype=outline.dtype).copy_(tensor)

    def _read(self, name: str) -> memoryview:
        """Return all bytes of a tensor or an array."""
        data = memoryview(bytearray(self._sizes[name]))
        self._read_into(data, name)
        return data

    def _read_into(self, data: memoryview, name: str, skip: int = 0) -> None:
        """Fill `data` with the bytes of a tensor after the first `skip`. Reads no other bytes."""
        for path, start, num_bytes in self._extents[name]:
            own = data[: max(num_bytes - skip, 0)]
            data = data[len(own) :]
            if own:
                _read_file(path, start + skip, own)
            skip = max(skip - num_bytes, 0)
        if data:
            raise ValueError(f"{name} lacks {len(data)} bytes")

    def _outline(self, value: Mapping[str, Any]) -> "Tensor":
        """Return the placeholder of a tensor."""
        import torch

        dtype = find_dtype(value["dtype"])
        outline = torch.empty(value["shape"], dtype=dtype, device="meta")
        if "strides" in value:
            outline = torch.empty_strided(value["shape"], value["strides"], dtype=dtype, device="meta")
        if outline.nbytes != self._sizes[value["name"]] or not is_dense(outline):
            raise ValueError(f"samestep does not write {value}")
        return outline

    def decode_other(self, kind: Any, value: Mapping[str, Any]) -> Any:
        match kind:
            case "counter":
                return Counter(self.decode_items(value["items"]))
            case "state_dict":
                state_dict = OrderedDict(self.decode_items(value["items"]))
                state_dict._metadata = OrderedDict(self.decode(value["versions"]))  # type: ignore[attr-defined]  # noqa: SLF001
                return state_dict
            case "tensor":
                if value["name"] not in self._outlines:
                    self._outlines[value["name"]] = self._outline(value)
                return self._outlines[value["name"]]
            case "array":
                if value["name"] not in self._arrays:
                    self._arrays[value["name"]] = decode_array(self._read(value["name"]), value)
                return self._arrays[value["name"]]
            case "scalar":
                return decode_array(bytes.fromhex(value["hex"]), value)[()]
        raise ValueError(f"samestep does not write {value}")


def _read_file(path: Path, start: int, data: memoryview) -> None:
    """Fill `data` with the bytes of a file from the byte `start` on. Raises OSError or EOFError."""
    with open(path, "rb", opener=open_regular) as file:
        file.seek(start)
        if file.readinto(data) != len(data):
            raise EOFError(f"{path} is too short")


class _Encoder(Encoder):
    def __init__(self, is_mine: "Callable[[Tensor], bool] | None" = None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._is_mine = is_mine
        self._names: dict[tuple[Any, ...], str] = {}
        self._taken: set[str] = {METADATA}

    def encode(self, value: Any, path: Place = ()) -> Any:
        if len(path) > MAX_LEVELS:
            raise _refusal(path[:3], f"a value that contains itself, or is nested deeper than {MAX_LEVELS} levels")
        return super().encode(value, path)

    def encode_other(self, value: Any, path: Place) -> Any:
        import torch

        from samestep.torch_internals import is_sharded

        kind = type(value)
        if kind in (torch.Tensor, torch.nn.Parameter):
            return self._encode_tensor(value, path)
        # Only the objects have one on every rank.
        if self._is_mine is not None and is_sharded(value) and path[:1] == ("objects",):
            return self._encode_shard(value, path)
        if kind is torch.Size:
            return self.encode(tuple(value), path)
        if isinstance(value, dict):
            # The versions of the modules in a state_dict, which load_state_dict reads.
            if (versions := getattr(value, "_metadata", None)) is not None:
                versions = self.encode(dict(versions), (*path, "_metadata"))
                return {KIND: "state_dict", "items": self.encode_items(value, path), "versions": versions}
            if isinstance(value, Counter):
                return {KIND: "counter", "items": self.encode_items(value, path)}
            return self.encode_dict(value, path)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._encode_array(value, path)
        raise _refusal(path, f"a {kind.__qualname__}")

    def encode_key(self, key: Any, path: Place) -> Any:
        if type(key) is tuple:
            return {KIND: "tuple", "items": [self.encode_key(item, path) for item in key]}
        if key is not None and type(key) not in (bool, int, float, str):
            raise _refusal(path, f"a dict with a {type(key).__qualname__} as key")
        return self.encode(key, path)

    def _encode_tensor(self, tensor: "Tensor", path: Place) -> Any:
        import torch

        whole, tensor = tensor, tensor.detach()
        dtype = name_dtype(tensor.dtype)
        if tensor.is_meta and self._is_mine is not None:  # other ranks store it
            return self._describe(tensor, path, (id(whole),), None)
        if tensor.layout != torch.strided or tensor.is_meta or dtype not in _CODES:
            raise _refusal(path, f"a tensor of {tensor.layout} layout and {tensor.dtype} on {tensor.device}")
        memory = tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        key = *memory, tensor.is_conj(), tensor.is_neg(), dtype, tuple(tensor.shape), tensor.stride()
        return self._describe(tensor, path, key, tensor if self._stores(whole) else None)

    def _encode_shard(self, tensor: "Tensor", path: Place) -> Any:
        """Encode a sharded tensor: the structure has its whole shape, and the rank stores its rows."""
        import torch

        from samestep.torch_internals import get_local

        local = get_local(tensor).detach()
        key = local.untyped_storage().data_ptr(), local.storage_offset(), tuple(tensor.shape), name_dtype(tensor.dtype)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        is_stored = self._stores(tensor) and (local.numel() > 0 or tensor.numel() == 0)
        return self._describe(whole, path, key, local if is_stored else None)

    def _describe(self, tensor: "Tensor", path: Place, key: tuple[Any, ...], stored: "Tensor | None") -> Any:
        """Return a tensor as JSON. `key`: the same for tensors that get one name; `stored`: what this rank stores."""
        import torch

        dtype = name_dtype(tensor.dtype)
        shape = list(tensor.shape)
        strides = tensor.stride()
        if key not in self._names:
            self._names[key] = self._add(stored, path)
        encoded = {KIND: "tensor", "name": self._names[key], "dtype": dtype, "shape": shape}
        if strides != torch.empty(shape, device="meta").stride() and is_dense(tensor):
            encoded["strides"] = list(strides)  # the next update has the same bits in the same layout only
        return encoded

    def _encode_array(self, array: "NDArray[Any] | np.generic", path: Place) -> Any:
        import torch

        if array.dtype.kind not in ARRAY_KINDS:
            raise _refusal(path, f"a numpy value of dtype {array.dtype}")
        encoded = {"dtype": array.dtype.str, "shape": list(array.shape)}
        if isinstance(array, np.generic):
            return {KIND: "scalar", "hex": array.tobytes().hex(), **encoded}
        data = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
        return {KIND: "array", "name": self._add(data if self._stores(data) else None, path), **encoded}

    def _stores(self, tensor: "Tensor") -> bool:
        return self._is_mine is None or self._is_mine(tensor)

    def _add(self, tensor: "Tensor | None", path: Place) -> str:
        name = wanted = "/".join(map(str, path))
        count = 1
        while name in self._taken:
            name = f"{wanted}~{count}"
            count = count + 1
        self._taken.add(name)
        if tensor is not None:
            self.tensors[name] = tensor
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


def _refusal(path: Place, what: str) -> InvalidType:
    if path[:1] == ("objects",):
        path = path[1:]
    where = "".join(f".{part}" if isinstance(part, str) else f"[{part!r}]" for part in path).lstrip(".")
    return InvalidType(
        f"{where or 'the state'} is {what}, which a snapshot cannot hold: leave it out of the state_dict, or make it "
        "of tensors, numpy arrays, numbers, strings, lists, tuples and dicts",
        code="SS414",
    )
