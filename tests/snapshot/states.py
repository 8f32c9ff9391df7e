"""States of runs for the tests of snapshots, and their comparison."""

import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.snapshot.serialization import SavedState, encode, write_tensors
from samestep.snapshot.store import Store


def make_state(mark: float) -> dict[str, Any]:
    """Build a run's state of about 4000 bytes. Its content depends on `mark`."""
    weight = torch.arange(1000.0) + mark
    return {
        "objects": {"model": {"weight": weight, "tied": weight}, "optimizer": {"state": {0: {"step": mark}}}},
        "position": {"step": 1, "epoch": 0},
        "state": {"best": mark},
    }


def write_divided(store: Store, state: Any, step: int, num_ranks: int = 3) -> Path:
    """Write a snapshot of which each rank writes its rows of the tensors, one rank after the other."""
    structure, tensors = encode(state)
    draft = store.begin(step, None)
    parts = [store.prepare(draft, take_rows(tensors, rank, num_ranks), rank) for rank in range(num_ranks)]
    return store.commit(draft, parts[0], structure, step=step, name=None, meta={}, num_parts=num_ranks)


def decode(structure: Any, tensors: Mapping[str, torch.Tensor], directory: Path) -> Any:
    """Decode a state, with its tensors from a file in the directory."""
    with open(directory / "tensors.safetensors", "wb") as file:
        extents = write_tensors(file, tensors)
    saved = SavedState(structure, directory, {"tensors.safetensors": extents})
    return saved.fill(saved.contents)


def take_rows(tensors: Mapping[str, torch.Tensor], rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """Return the rows of a rank, as FSDP2 divides them. Other tensors are rank 0's."""
    if rank == 0:
        return {name: tensor.chunk(num_ranks)[0] if tensor.ndim else tensor for name, tensor in tensors.items()}
    chunks = {name: tensor.chunk(num_ranks)[rank:][:1] for name, tensor in tensors.items() if tensor.ndim}
    return {name: chunk[0] for name, chunk in chunks.items() if chunk}


def assert_same(found: Any, expected: Any) -> None:
    """Check that all bits are equal, and that the types are those that a snapshot restores."""
    assert _describe(found) == _describe(expected)


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        plain = torch.empty(value.numel(), dtype=value.dtype)
        plain.view(value.shape).copy_(value.detach())
        return value.dtype, value.shape, plain.view(torch.uint8).tolist()
    if isinstance(value, np.ndarray | np.generic):
        return isinstance(value, np.ndarray), value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict):
        return isinstance(value, Counter), [(_describe(key), _describe(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return isinstance(value, list), [*map(_describe, value)]
    return type(value), struct.pack(">d", value) if type(value) is float else value
