"""The machine a rank computes on: made to give the same bits every time, and described."""

import sys
from typing import Any

import torch

from samestep.config import RunConfig


def fix_kernels(num_threads: int, deterministic: bool) -> None:
    """Makes one rank compute the same bits every time."""
    torch.set_num_threads(num_threads)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def describe_machine(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """What the bits depend on beside the run's numbers."""
    kernels = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "torch": torch.__version__,
        "device": f"{device.type} {kernels}",
        "reduction": config.reduction,
        "deterministic": config.deterministic,
    }


def fix_compiler() -> None:
    """A kernel of its own for every shape, whichever micro-batches a rank meets, and in which order.

    With dynamic shapes, a ragged micro-batch would bring a kernel that serves full ones afterwards. With a limit, a
    rank would run uncompiled those of its shapes that it meets last.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.config.automatic_dynamic_shapes = False
        dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit = sys.maxsize
