"""A state is restored exactly, and its digest depends on its content only."""

import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from safetensors.torch import load_file
from states import assert_same, decode

from samestep.decoding import parse_json
from samestep.errors import InvalidType
from samestep.snapshot.serialization import (
    MAX_LEVELS,
    SavedState,
    digest,
    encode,
    write_tensors,
)

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def restore(state: Any, directory: Path) -> Any:
    """Encode a state to JSON and a tensor file, and decode it."""
    structure, tensors = encode(state)
    return decode(json.loads(json.dumps(structure, allow_nan=False)), tensors, directory)


@st.composite
def make_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any bits: dense, permuted, expanded, or views of larger ones."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    num_values = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (num_values + dtype.itemsize,), dtype=torch.uint8, generator=generator)
    offset = draw(st.sampled_from([0, dtype.itemsize]))
    tensor = raw[offset : offset + num_values].clone() if draw(st.booleans()) else raw[offset : offset + num_values]
    tensor = tensor.view(dtype).reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    if tensor.ndim and draw(st.booleans()):
        tensor = tensor[::2]
    if draw(st.booleans()):
        tensor = tensor.expand(2, *tensor.shape)
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    return tensor


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just("$"),
    lambda keys: st.tuples(keys, keys), max_leaves=4,
)  # fmt: skip
ARRAYS = st_numpy.arrays(
    st_numpy.scalar_dtypes() | st_numpy.unicode_string_dtypes() | st_numpy.byte_string_dtypes(),
    st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
LEAVES = SCALARS | make_tensors() | ARRAYS | ARRAYS.filter(lambda a: a.size).map(lambda a: a.reshape(-1)[0])
STATES = st.recursive(
    LEAVES,
    lambda states: (
        st.lists(states, max_size=4)
        | st.tuples(states, states)
        | st.dictionaries(KEYS, states, max_size=4)
        | st.dictionaries(st.text(), states, max_size=4)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(state=STATES)
def test_any_state_comes_back_exactly(state: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    restored = restore(state, tmp_path_factory.getbasetemp())
    assert_same(restored, state)
    assert digest(restored) == digest(state)


@settings(max_examples=100, deadline=None)
@given(tensor=make_tensors())
def test_a_dense_tensor_keeps_its_strides(tensor: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> None:
    restored = restore({"t": tensor}, tmp_path_factory.getbasetemp())["t"]
    order = sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))
    if tensor.permute(order).is_contiguous():
        assert restored.stride() == tensor.stride()
    else:
        assert restored.is_contiguous()


# safetensors' own reader of torch does not know float8_e8m0fnu yet.
@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_others_can_read_the_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.randint(0, 2, (3, 5), dtype=torch.uint8).to(dtype)
    restore({"a": {"b": tensor, "odd": torch.ones(3, dtype=torch.int8)}}, tmp_path)
    assert_same(load_file(tmp_path / "tensors.safetensors")["a/b"], tensor)


def test_the_versions_of_a_models_modules_come_back(tmp_path: Path) -> None:
    state_dict = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.MultiheadAttention(4, 2)).state_dict()
    restored = restore(state_dict, tmp_path)
    assert restored._metadata == state_dict._metadata
    assert restored._metadata["0"] == {"version": 2}


def test_shared_tensors_are_stored_once_and_shared_again(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    state = {"a": weight, "b": weight, "c": weight.view(4, 4), "row": weight[1], "turned": weight.t(), "p": {}}
    state["p"] = {"weight": torch.nn.Parameter(weight)}
    _, tensors = encode(state)
    assert set(tensors) == {"a", "row", "turned"}
    restored = restore(state, tmp_path)
    assert_same(restored, {**state, "p": {"weight": weight}})
    assert restored["a"] is restored["b"] is restored["c"] is restored["p"]["weight"]
    assert restored["row"].untyped_storage().data_ptr() != restored["a"].untyped_storage().data_ptr()


def test_colliding_names_stay_separate(tmp_path: Path) -> None:
    one, two, three, four = (torch.full((2,), value) for value in (1.0, 2.0, 3.0, 4.0))
    state = {"a": {"b": one, 1: two, "1": three}, "a/b": four, "__metadata__": torch.zeros(1)}
    assert_same(restore(state, tmp_path), state)


def test_reading_ignores_no_missing_bytes(tmp_path: Path) -> None:
    path = tmp_path / "tensors.safetensors"
    structure, tensors = encode({"a": torch.ones(100)})
    with open(path, "wb") as file:
        extents = write_tensors(file, tensors)
    os.truncate(path, path.stat().st_size - 1)
    saved = SavedState(structure, tmp_path, {path.name: extents})
    with pytest.raises(EOFError, match="is too short"):
        saved.fill(saved.contents)


class Colour(IntEnum):
    RED = 1


class Pair(NamedTuple):
    one: int


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (lambda: 0, "a function"),
        (object(), "a object"),
        (Colour.RED, "a Colour"),
        (Pair(1), "a Pair"),
        ({1}, "a set"),
        (b"x", "a bytes"),
        (np.array([object()]), "a ndarray of object"),
        (np.zeros(1, dtype=[("a", "i4")]), "a ndarray of "),
        (torch.eye(2).to_sparse(), "a tensor of torch.sparse_coo layout"),
        (torch.empty(2, device="meta"), "on meta"),
        ({Colour.RED: 1}, "a dict with a Colour as key"),
        ({frozenset(): 1}, "a dict with a frozenset as key"),
    ],
)
def test_what_cannot_be_held_is_named(value: Any, what: str) -> None:
    state = {"objects": {"scheduler": {"lr_lambdas": [None, value]}}}
    with pytest.raises(InvalidType, match=rf"^scheduler\.lr_lambdas\[1\].*{what}.*leave it out"):
        encode(state)


def nest(levels: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = torch.ones(2)
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: {3: value}, lambda value: OrderedDict(a=value)])
def test_what_is_written_is_not_nested_too_deeply_to_be_read(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    state = {"state": nest(MAX_LEVELS - 1, wrap)}
    structure, tensors = encode(state)
    assert_same(decode(parse_json(json.dumps(structure)), tensors, tmp_path), state)
    circle: list[Any] = []
    circle.append(circle)
    for value in (nest(MAX_LEVELS, wrap), circle, {nest(MAX_LEVELS, lambda key: (key,)): 1}):
        with pytest.raises(InvalidType, match=r"^state.* is a value that contains itself, or is nested deeper than 3"):
            encode({"state": value})


BASE = {"a": torch.tensor([1.0, -0.0]), "b": [1, 2.0, None, True], 3: (1,), "n": np.zeros(2)}


def test_the_digest_ignores_what_is_not_content() -> None:
    channels_last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    alike = [
        (BASE, dict(reversed(BASE.items()))),
        ({"a": OrderedDict(x=1)}, {"a": {"x": 1}}),
        ({"t": channels_last}, {"t": channels_last.contiguous()}),
        ({"t": torch.nn.Parameter(torch.ones(2))}, {"t": torch.ones(2)}),
        ({"t": torch.zeros(2), "u": torch.zeros(2)}, dict.fromkeys(["t", "u"], torch.zeros(2))),
        (torch.nn.BatchNorm1d(2).state_dict(), dict(torch.nn.BatchNorm1d(2).state_dict())),
    ]
    for one, other in alike:
        assert digest(one) == digest(other)


def test_the_digest_depends_on_all_content() -> None:
    nan, other_nan = (float.fromhex("nan"), -float.fromhex("nan"))
    variants: list[Any] = [
        BASE,
        {**BASE, "a": torch.tensor([1.0, 0.0])},
        {**BASE, "a": torch.tensor([[1.0, -0.0]])},
        {**BASE, "a": torch.tensor([1.0, -0.0], dtype=torch.float64)},
        {**BASE, "a": torch.tensor([1.0, -0.0]).view(torch.int32)},
        {**BASE, "b": [1, 2.0, None, 1]},
        {**BASE, "b": [1, 2, None, True]},
        {**BASE, "b": (1, 2.0, None, True)},
        {**BASE, "b": [2.0, 1, None, True]},
        {**BASE, 3: [1]},
        {**{key: value for key, value in BASE.items() if key != 3}, "3": (1,)},
        {**BASE, "n": np.zeros(2, dtype=np.float32)},
        {**BASE, "n": torch.zeros(2, dtype=torch.float64)},
        {**BASE, "x": {}},
        {**BASE, "x": Counter()},
        {**BASE, "x": nan},
        {**BASE, "x": other_nan},
        {**BASE, "x": 0.0},
        {**BASE, "x": -0.0},
    ]
    assert len({digest(variant) for variant in variants}) == len(variants)
