"""Finds ranks that compute wrong results: at intervals, another rank recomputes a micro-batch of each rank.

Every rank adds a wrong gradient, so all replicas remain equal. A rank that is always wrong agrees with itself, so only
another rank can find it. Hochschild et al. 2021 ("Cores that don't count") and Dixit et al. 2021 ("Silent data
corruptions at scale") describe such processors. docs/dev/second_opinion.md explains the choices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.console import warn
from samestep.data.content import hash_content
from samestep.data.loader import Loader, to_device
from samestep.engine.leaf import Inspect
from samestep.engine.passes import Reduced
from samestep.errors import Error, InvalidValue
from samestep.plan.tree import build_layout
from samestep.train.context import RunContext
from samestep.train.determinism import describe_machine
from samestep.train.generators import keeping_generators
from samestep.train.step.interception import Interceptor, LoopParts
from samestep.train.step.steps import Step
from samestep.watch.replica_checksums import checksum, combine, find_drift, read_back
from samestep.world.environment import read_host


class ComputeCheck(NamedTuple):
    """One micro-batch that two ranks compute.

    Attributes:
        v: the micro-batch.
        owner: the rank that holds it.
        checker: the rank that computes it, too.
        judge: the rank that computes it if these two disagree; None with two ranks.
    """

    v: int
    owner: int
    checker: int
    judge: int | None


def plan_checks(n: int, world_size: int, number: int) -> tuple[ComputeCheck, ...]:
    """Return the checks of a step of n micro-batches: one for each rank that holds any; () with one rank.

    Idle ranks check first, and no rank checks more than one. With m ranks that check one another, every pair
    (owner, checker) occurs once in m - 1 checked steps.

    Args:
        number: how many checked steps precede this one.
    """
    if world_size == 1:
        return ()
    ranges = build_layout(n, world_size).ranges
    owners = [rank for rank, held in enumerate(ranges) if held]
    idle = [rank for rank, held in enumerate(ranges) if not held]
    turn = number % len(owners)
    owners = owners[turn:] + owners[:turn]
    ring = owners[len(idle) :]
    distance = 1 + number % (len(ring) - 1) if len(ring) > 1 else 0
    checkers = idle[: len(owners)] + [
        ring[(k + distance) % len(ring)] if distance else owners[0] for k in range(len(ring))
    ]
    checks = []
    for owner, checker in zip(owners, checkers, strict=True):
        held = ranges[owner]
        judge = next((rank for rank in (*idle, *owners) if rank not in (owner, checker)), None)
        checks.append(ComputeCheck(held[number // (world_size - 1) % len(held)], owner, checker, judge))
    return tuple(checks)


class Opinion(NamedTuple):
    """What one rank computed for a micro-batch.

    Attributes:
        rank: the rank.
        place: its host and device.
        samples: a hash of the micro-batch that the rank read; "" if it contains no numbers.
        results: checksums of losses and gradients by name.
    """

    rank: int
    place: str
    samples: str
    results: Mapping[str, int]


@dataclass
class _Results:
    """Checksums of the results for one micro-batch, on the device."""

    batch: Any
    sums: dict[str, Tensor] = field(default_factory=dict)


class SecondOpinion(Interceptor):
    """Compares the results of two ranks for the same micro-batches, in the steps of `check_compute_every`."""

    called = "check_compute_every"
    permits_fsdp2 = False

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        every = context.config.check_compute_every
        assert every is not None
        assert every.steps is not None
        self._every = every.steps
        self._has_warned = False
        self._checks: Sequence[ComputeCheck] = ()
        self._results: dict[int, _Results] = {}  # by micro-batch, of those that two ranks compute
        self._open: _Results | None = None
        self._term: tuple[Tensor, float | Tensor | None] | None = None  # loss and weight of the current backward
        self._agreed_step: int | None = None

    def begin_loop(self, loop: LoopParts) -> None:
        """Check whether the ranks can recompute one another's micro-batches.

        Raises:
            Error: they cannot, or not with the same bits.
        """
        self._data = loop.data
        self._gradients = loop.gradients
        context = self.context
        name = "check_compute_every"
        if context.world_size == 1:
            self._warn_once(f"{name} does nothing with one rank: no other rank can compute a micro-batch again")
            return
        if loop.data.lanes is not None:
            raise InvalidValue(
                f"{name} lets ranks compute micro-batches of one another, but only one rank reads a lane of an "
                "IterableDataset: leave it out, or use a data set with indices",
                code="SS612",
            )
        if not context.config.deterministic:
            raise InvalidValue(
                f"{name} compares bits, which deterministic=False does not keep: leave one of them out", code="SS612"
            )
        machines = context.group.gather(describe_machine(context.config, context.device))
        if (other := next((rank for rank, machine in enumerate(machines) if machine != machines[0]), None)) is not None:
            raise InvalidValue(
                f"{name} compares bits, but rank {other} computes on {machines[other]['device']} and rank 0 on "
                f"{machines[0]['device']}: leave it out, or use machines of one kind",
                code="SS612",
            )

    def _warn_once(self, sentence: str) -> None:
        if not self._has_warned:
            warn(self.context.say, sentence, start="check_compute_every")
        self._has_warned = True

    def borrow(self, step: int, num_micro_batches: int) -> Sequence[int]:
        return [check.v for check in self._find_checks(step, num_micro_batches) if check.checker == self.context.rank]

    def _find_checks(self, step: int, num_micro_batches: int) -> Sequence[ComputeCheck]:
        if (step + 1) % self._every:
            return ()
        return plan_checks(num_micro_batches, self.context.world_size, step // self._every)

    def results(self) -> tuple[int, int]:
        """Return checksums of this rank's results for the micro-batches that it holds and that it has borrowed."""
        rank = self.context.rank
        sums = {v: combine(read_back(results.sums)) for v, results in self._results.items()}
        computed = next((sums[check.v] for check in self._checks if check.owner == rank), 0)
        recomputed = next((sums[check.v] for check in self._checks if check.checker == rank), 0)
        return computed, recomputed

    def begin_pass(self, step: Step) -> None:
        self._checks = self._find_checks(step.number, len(step.sizes))
        self._results = {
            check.v: _Results(None) for check in self._checks if self.context.rank in (check.owner, check.checker)
        }

    def inspect(self, step: Step) -> Inspect | None:
        if (results := self._results.get(step.micro_batch)) is None:
            return None
        names = self._gradients.plan.names

        def add(i: int, grad: Tensor) -> None:
            results.sums[f"the gradient of {names[i]}"] = checksum(grad)

        return add

    def forward(self, step: Step, batch: Any) -> None:
        if (results := self._results.get(step.micro_batch)) is not None:
            results.batch = batch
            self._open = results

    def backward(self, step: Step, loss: Tensor, weight: float | Tensor | None, model: nn.Module | None) -> None:
        self._term = loss, weight

    def end_backward(self, step: Step) -> None:
        # It is checked by now.
        term = self._term
        self._term = None
        if (results := self._open) is None or term is None:
            return
        loss, own = term
        results.sums["loss"] = checksum(loss)
        if own is not None:
            results.sums["the weight of the loss"] = checksum(torch.as_tensor(own, dtype=torch.float64))

    def end_micro_batch(self, step: Step) -> None:
        self._open = None

    def after_exchange(self, step: Step, reduced: Reduced) -> Iterator[Any]:
        """If two ranks disagree, let a third rank compute the micro-batch, and name the rank that is wrong.

        Raises:
            Error: ranks disagree, and `check_compute` is "stop". Raised on all ranks, before anything of the step is
                applied.
        """
        votes = reduced.votes
        rank = self.context.rank
        wrong = (check for check in self._checks if votes[check.owner].computed != votes[check.checker].recomputed)
        if (check := next(wrong, None)) is None:
            if self._checks:
                self._agreed_step = step.number
            self._results = {}
            return
        if rank == check.judge:
            self._results[check.v] = _Results(None)
            yield from step.compute(check.v, self._load(step.number, check.v))
        mine = self._results.get(check.v)
        own = None if mine is None else [hash_content(mine.batch), read_back(mine.sums)]
        replies = self.context.group.gather([f"{read_host()}, {self.context.device}", own])
        places = [place for place, _ in replies]
        involved = [each for each in (check.owner, check.checker, check.judge) if each is not None]
        sentence = explain_dispute(
            [Opinion(each, places[each], *replies[each][1]) for each in involved], check.v, step.number
        )
        last = self._agreed_step
        agreed = "the ranks agreed in no earlier check" if last is None else f"all ranks last agreed in step {last}"
        advice = f"{agreed}, so later snapshots may contain wrong results"
        if self.context.config.check_compute == "stop":
            raise Error(
                f"{sentence}; nothing of this step is saved, but {advice}: resume from an earlier one (--resume)",
                code="SS503",
            )
        self.context.say(f"{sentence}; the run continues with it; {advice}")
        self._results = {}

    def _load(self, step: int, v: int) -> Any:
        """Load a micro-batch in addition to those of the loop."""
        spec = replace(self._data.spec, num_workers=min(self._data.spec.num_workers, 1))
        device = self.context.device
        with keeping_generators(), Loader(spec, [self._data.plan.task(step, v)], device=device) as loader:
            return to_device(next(loader).batch, device)


def explain_dispute(opinions: Sequence[Opinion], v: int, step: int) -> str:
    """Return the beginning of the message for opinions about micro-batch v that differ."""
    drift = find_drift([each.results for each in opinions])
    assert drift is not None
    named = [f"rank {each.rank} ({each.place})" for each in opinions]
    what = f"micro-batch {v} of step {step}"
    if len({each.samples for each in opinions}) > 1:
        return (
            f"{_join(named)} read different samples for {what}, although the indices are the same: make the "
            "data set depend on the index and torch's generators only (samestep verify finds why it does not), or "
            "suspect the memory of these machines"
        )
    more = f" and {drift.num_tensors - 1} more differ" if drift.num_tensors > 1 else " differs"
    cause = "code whose results depend on earlier calls (a module that keeps a count; samestep verify finds it)"
    if not drift.has_majority:
        why = "no third rank says which is right" if len(opinions) == 2 else "no two of them agree"
        return (
            f"{_join(named)} computed different results for {what} from the same weights and samples, and {why}: "
            f"{drift.tensor}{more}; suspect the processors and the memory of these machines, or {cause}"
        )
    differing = [named[place] for place in drift.differing]
    others = [name for name in named if name not in differing]
    return (
        f"{_join(differing)} computed different results for {what} than {_join(others)}, from the same weights and "
        f"samples: {drift.tensor}{more}; suspect the processor and the memory of that machine, and leave it out; or "
        f"{cause}"
    )


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
