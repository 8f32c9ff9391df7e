"""The values inside samples and batches, as bytes and as hashes."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import numpy as np

from samestep.hashing import hash_chunks, view_bytes


def hash_content(batch: Any) -> str:
    """Return a hash of all tensors and numbers; "" without any. Strings are left out, because paths may differ."""
    pieces = _find_bytes(batch)
    first = next(pieces, None)
    return "" if first is None else hash_chunks(chain([first], pieces))[:16]


def _find_bytes(batch: Any) -> "Iterator[bytes | memoryview]":
    import torch

    for value in find_leaves(batch):
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            yield f"{value.dtype}{value.shape}".encode()
            yield value.tobytes()
        elif isinstance(value, torch.Tensor):
            dense = value.to_dense() if value.layout is not torch.strided else value
            yield f"{dense.dtype}{tuple(dense.shape)}".encode()
            yield view_bytes(dense)
        elif isinstance(value, bool | int | float | complex | np.number):
            yield repr(value).encode()


def find_leaves(value: Any) -> Iterator[Any]:
    """Yield the values in nested mappings, sequences and dataclasses."""
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, Mapping):
        value = [*value.values()]
    if not isinstance(value, list | tuple):
        yield value
        return
    for item in value:
        yield from find_leaves(item)
