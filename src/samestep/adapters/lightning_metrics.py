"""The metrics of torchmetrics in a LightningModule, with states that do not depend on the number of ranks."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from samestep import InvalidType

State = list[Any]  # number of updates, name -> a tensor or a list of tensors
Names = dict[str, str]  # name of a logged value -> path of its metric in the module


class Metrics:
    """All metrics of a module; none if torchmetrics is not imported. Its `state_dict` is part of every snapshot.

    Each micro-batch begins with empty states. `merge_state` of torchmetrics then adds the states of all micro-batches
    in their order, on every rank. A pass is `set_aside`, then `take` for each micro-batch, then `fold`.
    """

    def __init__(self, module: nn.Module) -> None:
        torchmetrics = sys.modules.get("torchmetrics")
        self._metrics: dict[str, Any] = {}
        if torchmetrics is not None:
            for layer in module.modules():
                if isinstance(layer, torchmetrics.MetricCollection):  # else only the first of a group has a state
                    layer._enable_compute_groups = False  # noqa: SLF001
                    layer.add_metrics({})
            self._metrics = {
                path: layer for path, layer in module.named_modules() if isinstance(layer, torchmetrics.Metric)
            }
        for metric in self._metrics.values():
            metric.distributed_available_fn = _is_never_distributed  # else it would reduce its state over ranks
        self._aside: dict[str, State] = {}
        self._of_step = Names()
        self._of_epoch = Names()
        self._logged = Names()

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def log(self, metric: Any, of_step: str | None, of_epoch: str | None) -> None:
        """Name the metric's value over the batch, and over the epoch; None: it is not wanted."""
        path = self._find(metric, of_step or of_epoch)
        self._of_step |= {of_step: path} if of_step else {}
        self._of_epoch |= {of_epoch: path} if of_epoch else {}

    def compute(self, names: Names) -> dict[str, float]:
        """Return the values of metrics."""
        return {name: float(self._metrics[path].compute()) for name, path in names.items()}

    def compute_now(self, name: str, metric: Any) -> Any:
        """Return the value of a metric that is logged at the end of an epoch. `reset` empties its state."""
        self._logged[name] = self._find(metric, name)
        return metric.compute()

    def reset(self, names: Names) -> None:
        """Empty the states of the metrics that were logged in this epoch, as Lightning does."""
        for path in {*names.values(), *self._logged.values()}:
            self._metrics[path].reset()
        self._logged = {}

    def set_aside(self) -> None:
        """Put the states of the epoch so far aside, and empty all."""
        self._aside = {path: _read(metric) for path, metric in self._metrics.items()}
        self._clear()

    def _clear(self) -> None:
        for metric in self._metrics.values():
            metric.reset()

    def take(self) -> list[Any]:
        """Return those of a micro-batch: the states that it has updated, on the CPU, and the names of `log`.

        Empties all states, for the next micro-batch.
        """
        taken = [self.state_dict(), self._of_step, self._of_epoch]
        self._of_step = {}
        self._of_epoch = {}
        self._clear()
        return taken

    def fold(self, taken: Sequence[Sequence[Any]]) -> tuple[dict[str, float], Names]:
        """Add a pass to the states of the epoch. Returns the values over the pass, and the names of those of the epoch.

        Args:
            taken: the results of `take` for all micro-batches, in their order.
        """
        of_step = Names()
        of_epoch = Names()
        for _, step_names, epoch_names in taken:
            of_step |= step_names
            of_epoch |= epoch_names
        states = {path: [states[path] for states, *_ in taken if path in states] for path in self._metrics}
        for path, metric in self._metrics.items():
            _merge(metric, states[path])
        values = self.compute(of_step)
        for path, metric in self._metrics.items():
            if self._aside[path][0]:
                _merge(metric, [self._aside[path], *states[path]])
        return values, of_epoch

    def state_dict(self) -> dict[str, State]:
        """Return the states of all metrics that have been updated since their last reset, on the CPU."""
        return {path: _read(metric, "cpu") for path, metric in self._metrics.items() if metric.update_count}

    def load_state_dict(self, state: Mapping[str, State]) -> None:
        """Set the states from `state_dict`."""
        for path, metric in self._metrics.items():
            _merge(metric, [state[path]] if path in state else [])

    def _find(self, metric: Any, name: str | None) -> str:
        for path, own in self._metrics.items():
            if own is metric:
                return path
        raise InvalidType(
            f"self.log got {name}, a {type(metric).__name__} that is no submodule of the LightningModule: assign it to "
            "an attribute in __init__, or to an nn.ModuleDict",
            code="SS803",
        )


def is_metric(value: Any) -> bool:
    """Return whether a value is a metric of torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def _is_never_distributed() -> bool:
    return False


def _read(metric: Any, device: Any = None) -> State:
    states = metric.metric_state.items()  # `reset` empties the lists, so they are copied
    return [metric.update_count, {name: _to(value, device or metric.device) for name, value in states}]


def _to(value: Any, device: Any) -> Any:
    return [each.to(device) for each in value] if isinstance(value, list) else value.to(device)


def _merge(metric: Any, states: Sequence[State]) -> None:
    """Set a metric to the state after all updates of `states`, in their order."""
    metric.reset()
    for number, (count, values) in enumerate(states):
        num_before, before = _read(metric)
        metric.reset()
        metric._update_count = num_before + count  # noqa: SLF001
        for name, value in values.items():
            setattr(metric, name, _to(value, metric.device))
        if number == 0:
            continue
        metric._update_count = num_before / count + 1  # noqa: SLF001  # which takes this state for one update
        try:
            metric.merge_state(before)
        except RuntimeError:
            raise InvalidType(
                f"merge_state of {type(metric).__name__} does not combine the states of several micro-batches, since "
                "its full_state_update is not False: set it if the order of updates does not matter, or keep the "
                "predictions, and compute it from all of them",
                code="SS803",
            ) from None
        metric._update_count = num_before + count  # noqa: SLF001
