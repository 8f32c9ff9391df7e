"""Torch settings that make a rank compute the same bits every time, and a description of its machine."""

import platform
import sys
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from samestep.config import RunConfig


def fix_kernels(num_threads: int, deterministic: bool) -> None:
    """Sets the number of CPU threads and, if `deterministic`, deterministic kernels."""
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
    """Makes matrix products and convolutions of float32 use TF32 on a GPU, for this process.

    These two of torch's interfaces leave the others readable; `fp32_precision` does not, and inductor reads both.
    """
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def fix_compiler() -> None:
    """Makes torch.compile build one kernel per shape, so that kernels do not depend on the order of micro-batches.

    With dynamic shapes, a kernel compiled for a short micro-batch would also be used for full ones. With a limit on the
    number of shapes, a rank would run its last shapes uncompiled.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.config.automatic_dynamic_shapes = False
        dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit = sys.maxsize
