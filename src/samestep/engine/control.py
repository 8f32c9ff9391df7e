"""What each rank tells all others once per pass, in a control block that is sent with its gradients.

Losses and their weights, the values of `step.log`, votes, and which parameters and buffers were used. The blocks are
gathered, not summed. The host reads losses and values from a GPU without waiting for what the GPU has to do after them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import reduce
from numbers import Real
from operator import add
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.errors import InvalidType, InvalidValue, UsageError
from samestep.plan.tree import Layout

NOT_CALLED = -1.0  # the weight of a micro-batch that had no backward
BUFFER_BYTES = 4  # of the entry of a buffer, see `Buffers.pack`
# outside, products of weights and gradients can leave the range of float32
MIN_WEIGHT = 1e-20
MAX_WEIGHT = 1e20

Means = Mapping[str, tuple[float, float]]  # of a micro-batch: name -> the mean of its logged values, and their number
Value = float | Tensor  # a tensor only on a GPU: float64, not copied to the host yet


def copy_to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the host. Returns a function that waits for the copy, and returns it.

    A tensor on the CPU is returned itself.
    """
    copy = tensor.to("cpu", non_blocking=True)
    if not tensor.is_cuda:
        return lambda: copy
    event: Any = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        event.synchronize()
        return copy

    return wait


class HostValue:
    """The value that a tensor with one element has now on a GPU, whose copy to the host is only queued.

    Reading it waits for what was queued before it. So a loss that is taken before its backward pass is read while the
    GPU computes that pass, and the host can queue the update meanwhile. `Tensor.item` would wait for all of it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._wait = copy_to_host(tensor)

    def __float__(self) -> float:
        return float(self._wait())


def read_later(tensor: Tensor) -> float | HostValue:
    """Return the value that a tensor with one element has now: the script may write to it after the call.

    Example::

        >>> import torch
        >>> from samestep.engine.control import read_later
        >>> read_later(torch.tensor(0.5))
        0.5
    """
    return tensor.item() if tensor.device.type == "cpu" else HostValue(tensor.detach())


class Saving(IntEnum):
    """What a rank does for a snapshot."""

    NOTHING = 0  # that concerns the other ranks
    COPYING = 1  # it copies its state
    WRITTEN = 2  # it has written its part of a divided snapshot, or failed
    WATCHING = 3  # it looks for tensors that the script changes before the first update


class Vote(NamedTuple):
    """One rank's requests to all ranks after this step.

    Attributes:
        stop: number of the signal by which this rank was requested to stop; 0 for none.
        snapshot: whether a snapshot is due by this rank's clock.
        saving: what this rank does for a snapshot, a `Saving`.
        computed: checksum of this rank's results for a micro-batch that another rank computes, too; 0 for none.
        recomputed: checksum of this rank's results for a micro-batch of another rank; 0 for none.
        checksum: `compute_checksum` of this rank's part of the previous gradient, if the ranks divide it; else 0.
    """

    stop: int = 0
    snapshot: bool = False
    saving: int = Saving.NOTHING
    computed: int = 0
    recomputed: int = 0
    checksum: int = 0


class MicroBatchReport(NamedTuple):
    """What a rank reports of one of its micro-batches.

    Attributes:
        fingerprint: of the samples.
        loss, weight: of step.backward. Without a call, the weight is `NOT_CALLED`.
        logged: the mean of the values logged under the first known name, and their number; those of the next name; ...
    """

    fingerprint: int
    loss: float
    weight: float
    logged: Sequence[float] = ()


class Control(NamedTuple):
    """One rank's control block.

    Attributes:
        reports: per micro-batch.
        has_new_names: whether this rank logged values under names that are not in the block's format yet.
        used: a byte per parameter: whether a micro-batch used it.
        buffers: see `Buffers.pack`.
        order: a hash of the order in which this rank used the units of sharded models; 0 if none are sharded.
    """

    vote: Vote
    reports: Sequence[MicroBatchReport] = ()
    has_new_names: bool = False
    used: bytes = b""
    buffers: bytes = b""
    order: int = 0


class ControlFormat:
    """The memory layout of the control blocks for one `Layout`; all ranks' blocks have the same size.

    Args:
        num_names: number of the names of logged values.

    Attributes:
        size_bytes: size of one block, a multiple of 64.
    """

    def __init__(self, layout: Layout, num_params: int, num_buffers: int, num_names: int) -> None:
        self._head = Struct(f"<q?BQQQ?{num_params}s{BUFFER_BYTES * num_buffers}sQ")
        self._report = Struct(f"<Q{2 + 2 * num_names}d")
        num_bytes = self._head.size + max(map(len, layout.ranges)) * self._report.size
        self.size_bytes = -(-num_bytes // 64) * 64

    def pack_into(self, block: memoryview, control: Control) -> None:
        """Write a control block."""
        vote, reports, *rest = control
        self._head.pack_into(block, 0, *vote, *rest)
        offset = self._head.size
        for *numbers, logged in reports:
            self._report.pack_into(block, offset, *numbers, *logged)
            offset += self._report.size

    def unpack_from(self, block: memoryview, num_micro_batches: int) -> Control:
        """Read the control block of a rank that has `num_micro_batches`."""
        *vote, has_new_names, used, buffers, order = self._head.unpack_from(block)
        rows = block[self._head.size :][: num_micro_batches * self._report.size]
        reports = [
            MicroBatchReport(fingerprint, loss, weight, logged)
            for fingerprint, loss, weight, *logged in self._report.iter_unpack(rows)
        ]
        return Control(Vote(*vote), reports, has_new_names, used, buffers, order)


class PassReports:
    """Collects what this rank's micro-batches report.

    Args:
        step: number of the step, for messages.
        sizes: number of samples of each micro-batch of the step.
        held: this rank's micro-batches.

    Attributes:
        terms: micro-batch -> its loss and its weight.
    """

    def __init__(self, step: int, sizes: Sequence[int], held: range) -> None:
        self._step = step
        self._sizes = sizes
        self._held = held
        self.terms: dict[int, tuple[float | HostValue, float | HostValue]] = {}
        self._logged: dict[int, dict[str, list[float | HostValue]]] = {}  # micro-batch -> name -> values

    def add_loss(self, v: int, loss: Tensor, weight: float | Tensor | None) -> float | Tensor:
        """Note the loss of a step.backward. Returns its weight; arguments and errors as for it."""
        if v in self.terms:
            raise UsageError(
                f"step.backward was called twice in micro-batch {v} of step {self._step}: add the losses and call it "
                "once, dividing each by its own number of units (step.total); for another model, loop over the step "
                "once more",
                code="SS202",
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad or loss.is_complex():
            hint = "compute it as a tensor from the model's output, outside of torch.no_grad()"
            if isinstance(loss, Tensor) and loss.numel() > 1:
                hint = "take its mean"
            raise InvalidValue(
                f"step.backward needs a scalar loss that depends on the model, not {describe_value(loss)}: {hint}",
                code="SS203",
            )
        own: float | Tensor = self._sizes[v]
        if weight is not None:
            is_on_device = isinstance(weight, Tensor) and weight.device.type != "cpu"
            own = weight if is_on_device else self._check_weight(v, weight)
        # Before the backward pass, see `HostValue`.
        self.terms[v] = read_later(loss), read_later(own) if isinstance(own, Tensor) else own
        return own

    def _check_weight(self, v: int, weight: Any) -> float:
        try:
            number = float(weight)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if number != 0 and not MIN_WEIGHT <= number <= MAX_WEIGHT:
            raise InvalidValue(
                f"step.backward got weight {weight} in micro-batch {v} of step {self._step}: a weight is 0, or a "
                f"number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}",
                code="SS203",
            )
        return number

    def log(self, v: int, name: str, value: Value) -> None:
        """Note a value of step.log."""
        values = self._logged.setdefault(v, {}).setdefault(name, [])
        values.append(read_later(value) if isinstance(value, Tensor) else value)

    def read_logged(self) -> list[Means]:
        """Return the logged values per micro-batch. Waits for a GPU to compute them."""
        means: list[Means] = [{}] * len(self._held)
        for k, v in enumerate(self._held) if self._logged else ():
            # The built-in sum differs: since Python 3.12 it compensates for rounding.
            means[k] = {
                name: (reduce(add, map(float, values), 0.0) / len(values), len(values))
                for name, values in self._logged.get(v, {}).items()
            }
        return means

    def build(
        self, fingerprints: Sequence[int], logged: Sequence[Means], names: Sequence[str]
    ) -> list[MicroBatchReport]:
        """Return the reports. Waits for a GPU to compute the losses, not for the backward passes.

        Args:
            logged: the result of `read_logged`.
            names: the known names of logged values.

        Raises:
            InvalidValue: a weight on a GPU is out of range.
        """
        reports = []
        for v, fingerprint, means in zip(self._held, fingerprints, logged, strict=True):
            loss, weight = self.terms.get(v, (0.0, NOT_CALLED))
            if isinstance(weight, HostValue):
                weight = self._check_weight(v, weight)
            numbers: list[float] = []
            for name in names:
                numbers += means.get(name, (0.0, 0.0))
            reports.append(MicroBatchReport(fingerprint, float(loss) if weight else 0.0, weight, numbers))
        return reports


def find_logged(report: MicroBatchReport, names: Sequence[str]) -> Means:
    """Return the logged values of a micro-batch."""
    rows = zip(names, report.logged[::2], report.logged[1::2], strict=True)
    return {name: (mean, count) for name, mean, count in rows if count}


def average_losses(
    reports: Sequence[MicroBatchReport], step: int, layout: Layout, ranks: Sequence[int]
) -> tuple[float, float | None]:
    """Return the total weight of all ranks' losses, and their average; None without weight.

    Args:
        ranks: those that have the losses, in the order of the layout.

    Raises:
        InvalidValue: a loss is not finite.
    """
    weights: list[float] = []
    weighted: list[float] = []
    for v, (_, loss, weight, _) in enumerate(reports):
        if not math.isfinite(loss):
            rank = next(rank for rank, held in zip(ranks, layout.ranges, strict=True) if v in held)
            raise InvalidValue(
                f"the loss of step {step} is {loss} in micro-batch {v} (rank {rank}): nothing of this step is saved; "
                "check that batch, the learning rate and the precision",
                code="SS206",
            )
        if weight != NOT_CALLED:
            weights.append(weight)
            weighted.append(loss * weight)
    total = math.fsum(weights)
    return (total, math.fsum(weighted) / total) if total else (0.0, None)


def read_number(what: str, given: object, num_samples: int = 1) -> Value:
    """Return a number without waiting for a GPU; of a tensor with `num_samples` values, their mean.

    Raises Error if `given` is no number. `what` names it.
    """
    if isinstance(given, Tensor) and given.shape == (num_samples,) and num_samples > 1:
        given = given.detach().double().mean()
    if not (given.numel() == 1 if isinstance(given, Tensor) else isinstance(given, Real)):
        raise InvalidType(
            f"{what} must be a number, not {describe_value(given)}: reduce it by mean() or sum()", code="SS102"
        )
    if isinstance(given, Tensor):
        given = given.detach()
        return float(given) if given.device.type == "cpu" else given.to(torch.float64, copy=True).reshape(())
    return float(given)  # type: ignore[arg-type]


def average_weighted(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean (0 without weight) of (value, weight) pairs and the total weight, from exactly rounded sums."""
    total = math.fsum(weight for _, weight in pairs)
    try:
        return (math.fsum(value * weight for value, weight in pairs if weight) / total if total else 0.0), total
    except ValueError:  # infinities of both signs
        return math.nan, total
    except OverflowError:
        return math.inf, total


def average_batch(
    logged: Sequence[Means], reports: Sequence[MicroBatchReport], sizes: Sequence[int]
) -> dict[str, tuple[float, float]]:
    """Return name -> the average over the batch, and the total weight. The arguments are per micro-batch.

    Args:
        sizes: samples, the weights of those without step.backward.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for means, report, size in zip(logged, reports, sizes, strict=True):
        weight = float(size) if report.weight == NOT_CALLED else report.weight
        for name, (value, count) in means.items():
            pairs.setdefault(name, []).append((value, weight * count))
    return {name: average_weighted(of_name) for name, of_name in pairs.items()}


def describe_value(value: object) -> str:
    """Describe a value in a few words, for a message."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")
