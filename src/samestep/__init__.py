"""Distributed training on PyTorch that gives the same run at any number of ranks and through any crash."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep.version import __version__

# Public name -> the module that defines it. Loaded on first use, so that `import samestep` does not import torch.
_EXPORTS = {
    "Run": "samestep.train.run",
    "Step": "samestep.train.step.steps",
    "Epoch": "samestep.train.loops.loop",
    "spawn": "samestep.launch.spawn",
    "TensorBoard": "samestep.watch.trackers.tensorboard_tracker",
    "WandB": "samestep.watch.trackers.wandb_tracker",
    "MLflow": "samestep.watch.trackers.mlflow_tracker",
    "Tracker": "samestep.watch.trackers.protocol",
    "TrackerInfo": "samestep.watch.trackers.protocol",
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
    from samestep.train.loops.loop import Epoch
    from samestep.train.run import Run
    from samestep.train.step.steps import Step
    from samestep.watch.trackers.mlflow_tracker import MLflow
    from samestep.watch.trackers.protocol import Tracker, TrackerInfo
    from samestep.watch.trackers.tensorboard_tracker import TensorBoard
    from samestep.watch.trackers.wandb_tracker import WandB


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
