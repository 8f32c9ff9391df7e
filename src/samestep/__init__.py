"""Distributed training on PyTorch that gives the same run on one CPU, one GPU or a cluster."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep.version import __version__

# Public name -> the module that holds it. Loaded on first use, so that `import samestep` does not import torch.
_EXPORTS = {
    "Run": "samestep.train.run",
    "Error": "samestep.errors",
    "spawn": "samestep.launch.spawn",
    "TensorBoard": "samestep.watch.trackers",
    "WandB": "samestep.watch.trackers",
}

__all__ = ["Error", "Run", "TensorBoard", "WandB", "__version__", "spawn"]

if TYPE_CHECKING:
    from samestep.errors import Error
    from samestep.launch.spawn import spawn
    from samestep.train.run import Run
    from samestep.watch.trackers import TensorBoard, WandB


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
