"""Distributed training on PyTorch that gives the same run at any number of ranks and through any crash."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep.version import __version__

# Public name -> the module that defines it. Loaded on first use, so that `import samestep` does not import torch.
_EXPORTS = {
    "Run": "samestep.train.run",
    "Step": "samestep.train.step",
    "Epoch": "samestep.train.loop",
    "spawn": "samestep.launch.spawn",
    "TensorBoard": "samestep.watch.tracker_services",
    "WandB": "samestep.watch.tracker_services",
    "MLflow": "samestep.watch.tracker_services",
    "Tracker": "samestep.watch.trackers",
    "TrackerInfo": "samestep.watch.trackers",
    "Source": "samestep.data.source",
    "Shard": "samestep.data.source",
    "Error": "samestep.errors",
    "InvalidValue": "samestep.errors",
    "InvalidType": "samestep.errors",
    "UsageError": "samestep.errors",
    "RunDirectoryError": "samestep.errors",
    "MissingPackage": "samestep.errors",
    "PeerFailed": "samestep.errors",
    "Stuck": "samestep.errors",
    "WorkerDied": "samestep.errors",
}

__all__ = [
    "Epoch",
    "Error",
    "InvalidType",
    "InvalidValue",
    "MLflow",
    "MissingPackage",
    "PeerFailed",
    "Run",
    "RunDirectoryError",
    "Shard",
    "Source",
    "Step",
    "Stuck",
    "TensorBoard",
    "Tracker",
    "TrackerInfo",
    "UsageError",
    "WandB",
    "WorkerDied",
    "__version__",
    "spawn",
]

if TYPE_CHECKING:
    from samestep.data.source import Shard, Source
    from samestep.errors import (
        Error,
        InvalidType,
        InvalidValue,
        MissingPackage,
        PeerFailed,
        RunDirectoryError,
        Stuck,
        UsageError,
        WorkerDied,
    )
    from samestep.launch.spawn import spawn
    from samestep.train.loop import Epoch
    from samestep.train.run import Run
    from samestep.train.step import Step
    from samestep.watch.tracker_services import MLflow, TensorBoard, WandB
    from samestep.watch.trackers import Tracker, TrackerInfo


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
