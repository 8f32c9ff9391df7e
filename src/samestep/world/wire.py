"""Encodes the values that ranks exchange: JSON, followed by the bytes of tensors and arrays. Only `seal` uses pickle.

A message is 8 bytes of length, the JSON, and the raw bytes that the JSON refers to. A type that JSON lacks is an object
whose key "$" names the type.
"""

import hmac
import json
import math
import pickle
import struct
from typing import Any

import numpy as np
import torch

from samestep.errors import Error

KIND = "$"
HEADER_BYTES = 8
MAC_BYTES = 32
PLAIN = (int, float, str, list, tuple, dict)


def encode(value: Any) -> bytes:
    """Encode None, bool, int, float (bit for bit), str, bytes, lists, tuples, dicts, host tensors and arrays.

    NumPy numbers and subclasses of these types are converted to Python's. Raises TypeError for other types.
    """
    blobs: list[bytes] = []
    try:
        text = json.dumps(_write(value, blobs)).encode()
    except RecursionError:
        raise TypeError("it is nested too deeply") from None
    return b"".join((len(text).to_bytes(HEADER_BYTES), text, *blobs))


def decode(data: bytes | memoryview) -> Any:
    """Decode the bytes that `encode` returned. Raises Error for other bytes."""
    try:
        size = int.from_bytes(data[:HEADER_BYTES])
        text = bytes(data[HEADER_BYTES : HEADER_BYTES + size])
        blobs = memoryview(data)[HEADER_BYTES + size :]
        if len(text) != size:
            raise ValueError("too short")
        return _read(json.loads(text), blobs, [0])  # noqa: TID251 messages of ranks
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError, struct.error):
        raise Error(
            "a rank has received bytes that are no message of samestep: look for another program on the ranks' ports"
        ) from None


def _write(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    kind = next((plain for plain in PLAIN if isinstance(value, plain)), type(value))
    if kind in (int, str) or (kind is float and math.isfinite(value)):
        return kind(value)
    if kind is list:
        return [_write(each, blobs) for each in value]
    if kind is tuple:
        return {KIND: "tuple", "items": [_write(each, blobs) for each in value]}
    if kind is dict:
        if all(type(key) is str for key in value) and KIND not in value:
            return {key: _write(each, blobs) for key, each in value.items()}
        return {KIND: "dict", "items": [[_write(key, blobs), _write(each, blobs)] for key, each in value.items()]}
    if kind is float:  # nan and inf
        return {KIND: "float", "bits": struct.pack(">d", value).hex()}
    if kind is bytes:
        blobs.append(value)
        return {KIND: "bytes", "size": len(value)}
    if kind is torch.Tensor and value.is_cpu and value.layout == torch.strided and not value.requires_grad:
        data = value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        blobs.append(data)
        dtype = str(value.dtype).removeprefix("torch.")
        return {KIND: "tensor", "size": len(data), "dtype": dtype, "shape": list(value.shape)}
    if kind is np.ndarray and value.dtype.kind in "biufcSU":
        blobs.append(value.tobytes())
        return {KIND: "array", "size": len(blobs[-1]), "dtype": value.dtype.str, "shape": list(value.shape)}
    raise TypeError(f"{kind.__module__}.{kind.__qualname__}")


def _read(value: Any, blobs: memoryview, at: list[int]) -> Any:
    if isinstance(value, list):
        return [_read(each, blobs, at) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(KIND)
    if kind is None:
        return {key: _read(each, blobs, at) for key, each in value.items()}
    if kind == "tuple":
        return tuple(_read(each, blobs, at) for each in value["items"])
    if kind == "dict":
        return {_read(key, blobs, at): _read(each, blobs, at) for key, each in value["items"]}
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(value["bits"]))[0]
    data = bytearray(blobs[at[0] : at[0] + value["size"]])
    at[0] += value["size"]
    if len(data) != value["size"]:
        raise ValueError("too short")
    if kind == "bytes":
        return bytes(data)
    if kind == "array":
        return np.frombuffer(data, np.dtype(value["dtype"])).reshape(value["shape"])
    dtype = getattr(torch, value["dtype"])
    if kind != "tensor" or not isinstance(dtype, torch.dtype):
        raise ValueError(kind)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])


def seal(value: Any, key: bytes) -> bytes:
    """Return the pickle of a value of a script, with an HMAC under `key`."""
    data = pickle.dumps(value)
    return _sign(data, key) + data


def unseal(sealed: bytes, key: bytes) -> Any:
    """Return the sealed value. Raises Error, and unpickles nothing, if it was sealed with another key."""
    mac = sealed[:MAC_BYTES]
    data = sealed[MAC_BYTES:]
    if not hmac.compare_digest(mac, _sign(data, key)):
        raise Error("an object came from a rank that does not have the key of this launch: it is not unpickled")
    return pickle.loads(data)


def _sign(data: bytes, key: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")
