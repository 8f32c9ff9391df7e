"""Loader workers that persist between evaluations, because forking them takes longer than most evaluations."""

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.data.loader import Workers
from samestep.data.spec import DataSpec
from samestep.hashing import hash_short
from samestep.torch_internals import read_version

MOST = 4  # data sets; each worker holds the memory that its process had when it was forked
PLAIN = (int, float, str, bool, bytes, type(None))
LARGE_BYTES = 1 << 16
LARGE_LENGTH = 1000
MAX_VALUES = 2000
MAX_DEPTH = 5


@dataclass
class _Pool:
    spec: DataSpec
    state: Any
    workers: Workers


class Pools:
    """A run's workers for evaluations, for at most `MOST` data sets.

    Workers persist from a data set's second evaluation on, because many scripts build a new data set for each
    evaluation. They are restarted if the data set (see `describe_value`) or the arguments have changed.
    """

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}
        self._seen: deque[int] = deque(maxlen=4 * MOST)  # ids of data sets; reused ids do no harm

    def lend(self, spec: DataSpec, device: torch.device) -> Workers | None:
        """Return the workers for one series of tasks; None if the Loader must start workers or use none.

        Persistent workers are used in the main thread only, because workers end with the thread that started them.
        """
        if not spec.num_workers or threading.current_thread() is not threading.main_thread():
            return None
        key = id(spec.dataset)
        state = describe_value((spec.dataset, spec.collate_fn))
        pool = self._pools.get(key)
        if pool is not None:
            is_same = replace(pool.spec, dataset=None) == replace(spec, dataset=None)
            if is_same and pool.state == state and pool.workers.are_alive:
                return pool.workers
            self._pools.pop(key).workers.stop()
        if key not in self._seen:
            self._seen.append(key)
            return None
        if len(self._pools) == MOST:
            return None
        self._pools[key] = pool = _Pool(spec, state, Workers(spec, device))
        return pool.workers

    def close(self) -> None:
        """Stop all workers."""
        while self._pools:
            self._pools.popitem()[1].workers.stop()


def describe_value(value: Any, depth: int = MAX_DEPTH, seen: Iterator[int] | None = None) -> Any:
    """Describe a value. Two descriptions are equal if no change is detected.

    Covers plain values, tensors and arrays (a sample of the bytes of large ones), and the contents of lists, dicts and
    attributes, up to MAX_DEPTH and MAX_VALUES. In long lists, a replaced element is detected, but not a change inside.
    """
    seen = itertools.count() if seen is None else seen
    if type(value) in PLAIN:
        return type(value), repr(value) if type(value) is float else value
    if isinstance(value, (Tensor, np.ndarray)):
        return id(value), _describe_bytes(value)
    is_deep = depth > 0 and next(seen) < MAX_VALUES
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        if not is_deep or len(items) > LARGE_LENGTH:
            return id(value), hash(tuple(map(id, items)))
        return tuple(describe_value(item, depth - 1, seen) for item in items)
    inside = getattr(value, "__dict__", None)
    if not is_deep or not isinstance(inside, dict) or isinstance(value, type):
        return id(value)
    return id(value), describe_value(inside, depth, seen)


def _describe_bytes(value: Any) -> Any:
    version = None
    if isinstance(value, Tensor):
        version = None if value.is_inference() else read_version(value)
        if value.device.type != "cpu" or value.layout is not torch.strided or not value.is_contiguous():
            return version
        try:
            value = value.detach().reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, TypeError):  # some subclasses have no bytes
            return version
    return version, hash_short(value.flat[:: 1 + value.nbytes // LARGE_BYTES].tobytes())
