"""Python values as JSON: a type that JSON lacks is an object whose key "$" names the type.

`snapshot/serialization.py` writes states in this form, and adds types of its own, such as tensors, whose bytes are
outside the JSON.
"""

import math
import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

KIND = "$"
ARRAY_KINDS = "biufcSUmM"  # NumPy's kinds of dtypes that hold no objects
Place = tuple[Any, ...]  # the keys and indices that lead to a value


class Encoder:
    """Encodes None, bool, int, float (bit for bit), str, lists, tuples and dicts. Subclasses encode other types."""

    def encode(self, value: Any, path: Place = ()) -> Any:
        """Return a value as JSON."""
        kind = type(value)
        if value is None or kind is int or kind is str or kind is bool:
            return value
        if kind is float:
            return value if math.isfinite(value) else {KIND: "float", "hex": struct.pack(">d", value).hex()}
        if kind is list:
            return [self.encode(item, (*path, index)) for index, item in enumerate(value)]
        if kind is tuple:
            return {KIND: "tuple", "items": self.encode([*value], path)}
        if kind is dict:
            return self.encode_dict(value, path)
        return self.encode_other(value, path)

    def encode_dict(self, value: dict[Any, Any], path: Place) -> Any:
        """Return a dict as JSON. Its subclass is lost."""
        if KIND not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        return {KIND: "dict", "items": self.encode_items(value, path)}

    def encode_items(self, value: Mapping[Any, Any], path: Place) -> list[Any]:
        """Return the keys and values of a dict as JSON."""
        return [[self.encode_key(key, path), self.encode(item, (*path, key))] for key, item in value.items()]

    def encode_key(self, key: Any, path: Place) -> Any:
        """Return a key as JSON."""
        return self.encode(key, path)

    def encode_other(self, value: Any, path: Place) -> Any:
        """Return a value of another type as JSON."""
        raise NotImplementedError


class Decoder:
    """Inverse of `Encoder`. Raises various errors for other JSON."""

    def decode(self, value: Any) -> Any:
        """Return the value that was encoded."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if KIND not in value:
            return {key: self.decode(item) for key, item in value.items()}
        match value[KIND]:
            case "tuple":
                return tuple(self.decode(value["items"]))
            case "dict":
                return self.decode_items(value["items"])
            case "float":
                return struct.unpack(">d", bytes.fromhex(value["hex"]))[0]
            case kind:
                return self.decode_other(kind, value)

    def decode_items(self, items: Iterable[Any]) -> dict[Any, Any]:
        """Return the dict with these keys and values."""
        return {self.decode(key): self.decode(item) for key, item in items}

    def decode_other(self, kind: Any, value: Mapping[str, Any]) -> Any:
        """Return the value of another type."""
        raise NotImplementedError


def decode_array(data: bytes | bytearray | memoryview, value: Mapping[str, Any]) -> NDArray[Any]:
    """Return the array with a "dtype" and a "shape", in the memory of `data`."""
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in ARRAY_KINDS:
        raise ValueError(f"an array of {dtype} is not what samestep writes")
    if not data and dtype.itemsize * math.prod(value["shape"]):
        raise ValueError("an array is shorter than its shape")
    # NumPy accepts no buffer of 0 bytes for strings of length 0.
    return np.ndarray(value["shape"], dtype, data) if data else np.zeros(value["shape"], dtype)


def name_dtype(dtype: "torch.dtype") -> str:
    """Return the name of a dtype in torch, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def find_dtype(name: str) -> "torch.dtype":
    """Return torch's dtype of this name. Raises ValueError or AttributeError if it is none."""
    import torch

    if not isinstance(dtype := getattr(torch, name), torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


def view_bytes(tensor: "torch.Tensor") -> memoryview:
    """Return a tensor's elements in row-major order as bytes. Copies only if host memory has no such bytes."""
    import torch

    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = host.as_strided((host.numel(),), (1,))  # reshape(-1) keeps unusual strides of tensors with 0 or 1 elements
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
