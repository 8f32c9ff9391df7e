"""What makes a rank compute the same bits every time: torch's settings, its machine, and the global generators."""

import pickle
import platform
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch

from samestep.config import RunConfig
from samestep.hashing import hash_bytes
from samestep.world.group import Group

T = TypeVar("T")
# The global generators. The functions of their modules are methods of these objects.
PYTHON_GENERATOR: Any = random.seed.__self__  # type: ignore[attr-defined]
NUMPY_GENERATOR: Any = np.random.random.__self__  # type: ignore[attr-defined]


def fix_kernels(num_threads: int, deterministic: bool) -> None:
    """Set the number of CPU threads and, if `deterministic`, deterministic kernels."""
    torch.set_num_threads(num_threads)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def describe_machine(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """Return everything that the bits depend on, besides the run's identity."""
    kernels = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),  # random's generator; patch releases keep it
        "numpy": np.__version__,
        "torch": torch.__version__,
        "device": f"{device.type} {kernels}",
        "deterministic": config.deterministic,
        **read_float32_settings(device.type),
    }


def read_float32_settings(device_type: str) -> dict[str, str]:
    """Return how matrix products and convolutions of float32 are computed: "ieee", "tf32" or "bf16".

    torch.get_float32_matmul_precision raises an error after a script has set `torch.backends.*.fp32_precision`.
    """
    backend = (
        {"matmul": "cuda.matmul", "convolution": "cudnn.conv"}
        if device_type == "cuda"
        else {"matmul": "mkldnn.matmul", "convolution": "mkldnn.conv"}
    )
    found = {name: attrgetter(f"{path}.fp32_precision")(torch.backends) for name, path in backend.items()}
    return {name: value.replace("none", "ieee") for name, value in found.items()}


def use_tf32() -> None:
    """Let matrix products and convolutions of float32 use TF32 on a GPU, for this process.

    These two of torch's interfaces leave the others readable; `fp32_precision` does not, and inductor reads both.
    """
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def fix_compiler() -> None:
    """Let torch.compile build one kernel per shape, so that kernels do not depend on the order of micro-batches.

    With dynamic shapes, a kernel compiled for a short micro-batch would also be used for full ones. With a limit on the
    number of shapes, a rank would run its last shapes uncompiled.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.config.automatic_dynamic_shapes = False
        dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit = sys.maxsize


def read_generator(generator: Any) -> str:
    """Return a hash of the state of a global generator."""
    if isinstance(generator, torch.Generator):
        return hash_bytes(generator.get_state().numpy().tobytes())
    return hash_bytes(pickle.dumps(generator.get_state() if generator is NUMPY_GENERATOR else generator.getstate()))


def call_on_rank_0(group: Group, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `fn` on rank 0, and return its result and the states of rank 0's global generators to all ranks."""
    value, states = group.once(lambda: (fn(*args, **kwargs), _read_states()))
    _set_states(states)
    return value


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Restore the states of the global generators at the end of the block."""
    states = _read_states()
    try:
        yield
    finally:
        _set_states(states)


def _read_states() -> tuple[Any, ...]:
    return (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        [generator.get_state() for generator in _list_gpu_generators()],
    )


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
