"""Messages between ranks: every bit arrives, and nothing that arrives is executed."""

import math
import pickle
import random
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samestep.errors import Error
from samestep.world.wire import decode, encode, seal, unseal

ODD_NAN = struct.unpack(">d", bytes.fromhex("fff8000000001234"))[0]


def bits(value: Any) -> Any:
    """Return a value with its types and all bits of its numbers and tensors."""
    if isinstance(value, list | tuple):
        return type(value), [bits(each) for each in value]
    if isinstance(value, dict):
        return dict, [(bits(key), bits(each)) for key, each in value.items()]
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return type(value), value


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 2**80, 0.1, -0.0, 5e-324, 1e308, math.inf, -math.inf, math.nan, ODD_NAN, "", "ü\ud800\0",
        b"", b"\0\xff", [], (), {}, [1, (2, [b"x", (b"y",)]), b"z"], {"a": {1: 2, None: (b"",)}}, {"$": "tuple"},
        {("a", 1): 2.5}, torch.arange(6).reshape(2, 3).T, torch.tensor(2.5, dtype=torch.bfloat16), torch.zeros(0, 3),
        torch.tensor([True]), torch.tensor([1 + 2j]), torch.tensor([math.nan, 1]), np.arange(5.0)[::2], np.array("abc"),
        random.getstate(), np.random.get_state(), torch.get_rng_state(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_every_bit_arrives(value: Any) -> None:
    assert bits(decode(encode(value))) == bits(value)
    assert bits(unseal(seal(value, b"key"), b"key")) == bits(value)


class Word(str):
    """A subclass of str, whose type would be lost."""


@pytest.mark.parametrize(
    "value",
    [object(), {1}, Path("x"), np.array([object()]), torch.nn.Parameter(torch.zeros(1))],
    ids=lambda value: type(value).__name__,
)
def test_nothing_else_is_sent_unless_it_is_sealed(value: Any) -> None:
    with pytest.raises(TypeError):
        encode([value])
    sealed = decode(encode(seal([value], b"key")))
    assert type(unseal(sealed, b"key")[0]) is type(value)


def test_what_is_nearly_plain_is_sent_as_plain() -> None:
    """samestep's own messages contain such values: a mean may be a NumPy number, a shape a torch.Size. What is sealed
    keeps its types.
    """
    value = [np.float64(0.1), np.int64(3), np.bool_(True), Word("x"), torch.Size([2]), OrderedDict(a=np.float32(0.5))]
    assert bits(decode(encode(value))) == bits([0.1, 3, True, "x", (2,), {"a": 0.5}])
    assert [*map(type, unseal(seal(value, b"key"), b"key"))] == [*map(type, value)]


def test_endless_nesting_is_an_error() -> None:
    nest: list[Any] = []
    for _ in range(100_000):
        nest = [nest]
    with pytest.raises(TypeError, match="nested too deeply"):
        encode(nest)


def frame(text: bytes, blobs: bytes = b"") -> bytes:
    return len(text).to_bytes(8) + text + blobs


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x80\x04", pickle.dumps(print), frame(b"[" * 200_000), frame(b"{"), frame(b'{"$": "pickle"}'),
        frame(b'{"$": "tensor", "size": 8, "dtype": "load", "shape": []}', b"x" * 8),
        frame(b'{"$": "tensor", "size": 8, "dtype": "int64", "shape": [1000000000]}', b"x" * 8),
        frame(b'{"$": "array", "size": 8, "dtype": "O", "shape": [1]}', b"x" * 8),
        frame(b'{"$": "array", "size": -1, "dtype": "<f8", "shape": [1]}', b"x" * 9),
        frame(b'{"$": "dict", "items": [[[], 1]]}'), frame(b'{"$": "float", "hex": "00"}'),
        (1 << 63).to_bytes(8) + b"1",
    ],
)  # fmt: skip
def test_hostile_bytes(data: bytes) -> None:
    with pytest.raises(Error, match="no message of samestep") as caught:
        print(decode(data))
    assert caught.value.code == "SS513"


class Runs:
    """Executes code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("import builtins; builtins.ran_by_pickle = True",)


@pytest.mark.parametrize("key", [b"", b"another key"])
def test_a_pickle_without_the_key_is_not_read(key: bytes) -> None:
    with pytest.raises(Error, match="does not have the key of this launch"):
        unseal(decode(encode(seal(Runs(), key))), b"key")
    with pytest.raises(Error, match="does not have the key of this launch"):
        unseal(pickle.dumps(Runs()), b"key")
    assert not hasattr(__import__("builtins"), "ran_by_pickle")
