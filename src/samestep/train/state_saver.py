"""Compares the replicas and saves the snapshots that are due between two steps."""

from collections.abc import Callable, Mapping
from typing import Any

from samestep.snapshot.snapshotter import Snapshotter
from samestep.train.replicas import Replicas
from samestep.train.stateful import Objects, list_calm
from samestep.train.steps import Step, StepObserver


class StateSaver(StepObserver):
    """Saves the state of one loop.

    Args:
        build_state: position -> the state that a snapshot holds.
    """

    def __init__(
        self,
        snapshotter: Snapshotter,
        objects: Objects,
        replicas: Replicas,
        build_state: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._snapshotter, self._objects, self._replicas = snapshotter, objects, replicas
        self._build_state = build_state
        self._is_watching = False

    def begin_step(self, step: Step) -> None:
        if not self._is_watching:
            self._is_watching = True
            self._snapshotter.watch(list_calm(self._objects))

    def compare_if_due(self, step: int, epochs_done: int | None) -> None:
        """Compare the replicas. Arguments and errors as for `Replicas.compare_if_due`."""
        self._replicas.compare_if_due(step, epochs_done)

    def save(
        self,
        *,
        step: int,
        epoch: int,
        epochs_done: int | None,
        numbered: bool,
        ending: bool,
        notes: Mapping[str, Any],
    ) -> None:
        """Save the snapshots that are due after `step` steps. Arguments and errors as for `save_what_is_due`."""
        self._snapshotter.save_what_is_due(
            lambda: self._replicas.describe(lambda: self._build_state({"step": step, "epoch": epoch}), step),
            step=step,
            epochs_done=epochs_done,
            numbered=numbered,
            ending=ending,
            notes=notes,
        )
