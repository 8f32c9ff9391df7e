"""The states of random generators: the global ones, and those that a script creates, which samestep does not seed."""

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from samestep.hashing import hash_bytes
from samestep.world.group import Group

T = TypeVar("T")
# The global generators. The functions of their modules are methods of these objects.
PYTHON_GENERATOR: Any = random.seed.__self__  # type: ignore[attr-defined]
NUMPY_GENERATOR: Any = np.random.random.__self__  # type: ignore[attr-defined]


def read_generator(generator: Any) -> str:
    """Return a hash of the state of a global generator."""
    if isinstance(generator, torch.Generator):
        return hash_bytes(generator.get_state().numpy().tobytes())
    return hash_bytes(pickle.dumps(generator.get_state() if generator is NUMPY_GENERATOR else generator.getstate()))


def call_on_rank_0(group: Group, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `fn` on rank 0, and return its result and the states of rank 0's global generators to all ranks."""

    def call() -> tuple[Any, ...]:
        value = fn(*args, **kwargs)
        return value, _read_states() if group.world_size > 1 else None

    value, states = group.once(call)
    if states is not None:
        _set_states(states)
    return value  # type: ignore[no-any-return]


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Restore the states of the global generators at the end of the block."""
    states = _read_states()
    try:
        yield
    finally:
        _set_states(states)


def _read_states() -> tuple[Any, ...]:
    on_gpus = [generator.get_state() for generator in _list_gpu_generators()]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_gpus


def _set_states(states: tuple[Any, ...]) -> None:
    of_python, of_numpy, of_torch, on_gpus = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    for generator, state in zip(_list_gpu_generators(), on_gpus, strict=False):
        generator.set_state(state)


def _list_gpu_generators() -> list[torch.Generator]:
    """Return the generators of all visible GPUs, this rank's own one first; [] before the first use of a GPU."""
    if not torch.cuda.is_initialized():
        return []
    own = torch.cuda.current_device()
    generators = torch.cuda.default_generators
    return [*generators[own:], *generators[:own]]
