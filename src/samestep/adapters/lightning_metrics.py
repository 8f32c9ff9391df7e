"""The metrics of torchmetrics in a LightningModule, with states that do not depend on the number of ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

from samestep import InvalidType

State = list[Any]  # number of updates, name -> a tensor or a list of tensors
Names = dict[str, str]  # name of a logged value -> path of its metric in the module


class Metrics:
    """All metrics of a module. Its `state_dict` is part of every snapshot.

    Each micro-batch begins with empty states, as a process does under DDP. The states of all micro-batches are then
    reduced in the order of the micro-batches, on every rank. A pass over micro-batches is `hold`, for each of them
    `clear` and `take`, then `fold` and `release`.
    """

    def __init__(self, module: nn.Module) -> None:
        for part in module.modules():
            if isinstance(part, MetricCollection):  # else only the first metric of a group has a state
                part._enable_compute_groups = False  # noqa: SLF001
                part.add_metrics({})
        self._metrics: dict[str, Metric] = {p: part for p, part in module.named_modules() if isinstance(part, Metric)}
        for metric in self._metrics.values():
            metric.distributed_available_fn = _is_never_distributed  # else it would reduce its state over ranks
        self._held: dict[str, State] = {}
        self._of_step = Names()
        self._of_epoch = Names()
        self._logged = Names()

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def is_metric(self, value: Any) -> bool:
        """Return whether a value is a metric of torchmetrics."""
        return isinstance(value, Metric)

    def log(self, metric: Any, of_step: str | None, of_epoch: str | None) -> None:
        """Name the metric's value over the batch, and over the epoch; None: it is not wanted.

        Raises InvalidType if the module does not contain the metric.
        """
        path = self._find(metric, of_step or of_epoch)
        self._of_step |= {of_step: path} if of_step else {}
        self._of_epoch |= {of_epoch: path} if of_epoch else {}

    def compute(self, names: Names) -> dict[str, Any]:
        """Return the values of metrics."""
        return {name: self._metrics[path].compute() for name, path in names.items()}

    def compute_now(self, name: str, metric: Any) -> Any:
        """Return the value of a metric that is logged at the end of an epoch. `reset` empties its state."""
        self._logged[name] = self._find(metric, name)
        return metric.compute()

    def reset(self, names: Names) -> None:
        """Empty the states of the metrics that were logged in this epoch, as Lightning does."""
        for path in {*names.values(), *self._logged.values()}:
            self._metrics[path].reset()
        self._logged = {}

    def hold(self) -> None:
        """Put the states of the epoch so far aside."""
        self._held = {path: _read(metric) for path, metric in self._metrics.items()}

    def clear(self) -> None:
        """Empty all states, before a micro-batch."""
        for metric in self._metrics.values():
            metric.reset()

    def take(self, suffix: str = "") -> Sequence[Any]:
        """Return the part of a micro-batch: the states that it has updated, and the names in its calls of `log`.

        Args:
            suffix: added to the names of values over the epoch.
        """
        of_epoch = {f"{name}{suffix}": path for name, path in self._of_epoch.items()}
        names = [self._of_step, of_epoch]
        self._of_step = {}
        self._of_epoch = {}
        return [{path: _read(metric) for path, metric in self._metrics.items() if metric.update_count}, *names]

    def pack(self, part: Sequence[Any], world_size: int) -> Sequence[Any]:
        """Return a part of `take` to send to other ranks, if there are any."""
        return part if world_size == 1 else to_host(part)

    def fold(self, parts: Sequence[Sequence[Any]]) -> tuple[Names, Names]:
        """Set all states to those of this pass. Returns the names of values over the batch, and over the epoch.

        Args:
            parts: the results of `take` for all micro-batches, in their order.
        """
        self.clear()
        for path, metric in self._metrics.items():
            if states := [part[path] for part, *_ in parts if path in part]:
                _write(metric, _reduce(metric, states))
        of_step = Names()
        of_epoch = Names()
        for _, step_names, epoch_names in parts:
            of_step |= step_names
            of_epoch |= epoch_names
        return of_step, of_epoch

    def release(self) -> None:
        """Add the states that `hold` put aside."""
        for path, metric in self._metrics.items():
            states = [state for state in (self._held[path], _read(metric)) if state[0]]
            _write(metric, _reduce(metric, states) if states else self._held[path])

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all metrics that have been updated since their last reset."""
        states: dict[str, Any] = to_host([{p: _read(each) for p, each in self._metrics.items() if each.update_count}])[
            0
        ]
        return states

    def load_state_dict(self, state: Mapping[str, State]) -> None:
        """Set the states from `state_dict`."""
        self.clear()
        for path, metric in self._metrics.items():
            if path in state:
                _write(metric, state[path])

    def _find(self, metric: Any, name: str | None) -> str:
        path = next((path for path, own in self._metrics.items() if own is metric), None)
        if path is not None:
            return path
        raise InvalidType(
            f"self.log got {name}, a {type(metric).__name__} that is no submodule of the LightningModule: assign it to "
            "an attribute in __init__, or to an nn.ModuleDict",
            code="SS803",
        )


def to_host(part: Sequence[Any]) -> list[Any]:
    """Return a part of `Metrics.take` with all tensors on the CPU."""

    def move(value: Any) -> Any:
        return [each.cpu() for each in value] if isinstance(value, list) else value.cpu()

    states, *names = part
    return [{p: [num, {key: move(v) for key, v in values.items()}] for p, (num, values) in states.items()}, *names]


def _is_never_distributed() -> bool:
    return False


def _read(metric: Metric) -> State:
    values = metric.metric_state.items()  # `reset` empties the lists
    return [metric.update_count, {name: [*value] if isinstance(value, list) else value for name, value in values}]


def _write(metric: Metric, state: State) -> None:
    metric.reset()  # the value that it has kept, too
    metric._update_count, values = state  # noqa: SLF001
    for name, value in values.items():
        is_list = isinstance(value, list)
        setattr(metric, name, [each.to(metric.device) for each in value] if is_list else value.to(metric.device))


def _reduce(metric: Metric, states: Sequence[State]) -> State:
    """Return the state after all updates of `states`, in their order."""
    if len(states) == 1:
        return states[0]
    counts = [num for num, _ in states]
    merged: dict[str, Any] = {}
    for name, how in metric._reductions.items():  # noqa: SLF001
        values = [each[name] for _, each in states]
        if isinstance(values[0], list):
            merged[name] = [entry for value in values for entry in value]
        elif how is dim_zero_cat:
            merged[name] = dim_zero_cat(values)
        elif how is dim_zero_mean:
            merged[name] = torch.stack([n * value for n, value in zip(counts, values, strict=True)]).sum(0) / sum(
                counts
            )
        elif callable(how):
            merged[name] = how(torch.stack(values))
        else:
            raise InvalidType(
                f"{type(metric).__name__} has no reduction for its state {name} (dist_reduce_fx=None), so those of "
                "several micro-batches cannot be combined: keep the predictions, and compute it from all of them",
                code="SS803",
            )
    return [sum(counts), merged]
