"""Encodes the values that ranks exchange: JSON, followed by the bytes of tensors and arrays. Only `seal` uses pickle.

A message is 8 bytes of length, the JSON of `tagged.py`, and the raw bytes that it refers to.
"""

import hmac
import json
import pickle
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from samestep.errors import Error
from samestep.tagged import ARRAY_KINDS, KIND, Decoder, Encoder, Place, decode_array, find_dtype, name_dtype, view_bytes

HEADER_BYTES = 8
MAC_BYTES = 32
PLAIN: tuple[Any, ...] = (bool, int, float, str, bytes, list, tuple, dict)


def encode(value: Any) -> bytes:
    """Encode None, bool, int, float (bit for bit), str, bytes, lists, tuples, dicts, host tensors and arrays.

    NumPy numbers and subclasses of these types are converted to Python's. Raises TypeError for other types.
    """
    writer = _Writer()
    try:
        text = json.dumps(writer.encode(value)).encode()
    except RecursionError:
        raise TypeError("it is nested too deeply") from None
    return b"".join((len(text).to_bytes(HEADER_BYTES), text, *writer.blobs))


def decode(data: bytes | memoryview) -> Any:
    """Decode the bytes that `encode` returned. Raises Error for other bytes."""
    try:
        size = int.from_bytes(data[:HEADER_BYTES])
        text = bytes(data[HEADER_BYTES : HEADER_BYTES + size])
        if len(text) != size:
            raise ValueError("too short")
        reader = _Reader(memoryview(data)[HEADER_BYTES + size :])
        return reader.decode(json.loads(text))  # noqa: TID251 messages of ranks
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError, struct.error):
        raise Error(
            "a rank has received bytes that are no message of samestep: look for another program on the ranks' ports",
            code="SS513",
        ) from None


class _Writer(Encoder):
    def __init__(self) -> None:
        self.blobs: list[bytes | memoryview] = []

    def encode_other(self, value: Any, path: Place) -> Any:
        kind = type(value)
        if kind is bytes:
            return self._add("bytes", value)
        if kind is torch.Tensor and value.is_cpu and value.layout == torch.strided and not value.requires_grad:
            return self._add("tensor", view_bytes(value), dtype=name_dtype(value.dtype), shape=list(value.shape))
        if kind is np.ndarray and value.dtype.kind in ARRAY_KINDS:
            return self._add("array", value.tobytes(), dtype=value.dtype.str, shape=list(value.shape))
        plain = value.item() if isinstance(value, np.generic) else value
        for parent in PLAIN:
            if isinstance(plain, parent):
                return self.encode(parent(plain), path)
        raise TypeError(f"{kind.__module__}.{kind.__qualname__}")

    def _add(self, kind: str, blob: bytes | memoryview, **fields: Any) -> Any:
        self.blobs.append(blob)
        return {KIND: kind, "size": len(blob), **fields}


class _Reader(Decoder):
    def __init__(self, blobs: memoryview) -> None:
        self._blobs = blobs

    def decode_other(self, kind: Any, value: Mapping[str, Any]) -> Any:
        data = bytearray(self._blobs[: value["size"]])
        self._blobs = self._blobs[value["size"] :]
        if len(data) != value["size"]:
            raise ValueError("too short")
        match kind:
            case "bytes":
                return bytes(data)
            case "array":
                return decode_array(data, value)
            case "tensor":
                dtype = find_dtype(value["dtype"])
                flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
                return flat.reshape(value["shape"])
        raise ValueError(kind)


def seal(value: Any, key: bytes) -> bytes:
    """Return the pickle of a value of a script, with an HMAC under `key`."""
    data = pickle.dumps(value)
    return _sign(data, key) + data


def unseal(sealed: bytes, key: bytes) -> Any:
    """Return the sealed value. Raises Error, and unpickles nothing, if it was sealed with another key."""
    mac = sealed[:MAC_BYTES]
    data = sealed[MAC_BYTES:]
    if not hmac.compare_digest(mac, _sign(data, key)):
        raise Error(
            "an object came from a rank that does not have the key of this launch: it is not unpickled", code="SS513"
        )
    return pickle.loads(data)


def _sign(data: bytes, key: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")
