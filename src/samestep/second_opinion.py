"""Finds ranks that compute wrong results: at intervals, another rank recomputes a micro-batch of each rank.

Every rank adds a wrong gradient, so all replicas remain equal. A rank that is always wrong agrees with itself, so only
another rank can find it. Hochschild et al. 2021 ("Cores that don't count") and Dixit et al. 2021 ("Silent data
corruptions at scale") describe such processors. docs/dev/second_opinion.md explains the choices.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.console import join_words
from samestep.data.loader import Loader, to_device
from samestep.engine.leaf import GradientHooks
from samestep.engine.passes import Reduced
from samestep.errors import Error, InvalidValue
from samestep.hashing import hash_content
from samestep.plan.tree import build_layout
from samestep.train.context import RunContext
from samestep.train.determinism import describe_machine, keeping_generators
from samestep.train.interception import Interceptor, LoopParts
from samestep.train.step import Step
from samestep.watch.replica_checksums import checksum, combine, find_drift, read_back
from samestep.world.environment import read_host


class ComputeCheck(NamedTuple):
    """One micro-batch that two ranks compute.

    Attributes:
        v: the micro-batch.
        owner: the rank that owns it.
        checker: the rank that computes it, too.
        judge: the rank that computes it if these two disagree; None with two ranks.
    """

    v: int
    owner: int
    checker: int
    judge: int | None


def plan_checks(n: int, world_size: int, number: int) -> tuple[ComputeCheck, ...]:
    """Return the checks of a step of n micro-batches: one for each rank that owns any; () with one rank.

    No rank checks more than one. With m ranks, every pair (owner, checker) occurs once in m - 1 checked steps.

    Args:
        number: how many checked steps precede this one.
    """
    if world_size == 1:
        return ()
    num_turns, turn = divmod(number, world_size - 1)
    checks = []
    for owner, owned in enumerate(build_layout(n, world_size).ranges):
        if owned:
            checker = (owner + 1 + turn) % world_size
            judge = next((rank for rank in range(world_size) if rank not in (owner, checker)), None)
            checks.append(ComputeCheck(owned[num_turns % len(owned)], owner, checker, judge))
    return tuple(checks)


class Opinion(NamedTuple):
    """What one rank computed for a micro-batch.

    Attributes:
        rank: the rank, with its host and device.
        samples: a hash of the micro-batch that the rank read; "" if it contains no numbers.
        results: checksums of losses and gradients by name.
    """

    rank: str
    samples: str
    results: Mapping[str, int]


class SecondOpinion(Interceptor):
    """Compares the results of two ranks for the same micro-batches, in the steps of `check_compute_every`."""

    called = "check_compute_every"
    permits_fsdp2 = False

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        every = context.config.check_compute_every
        assert every is not None
        self._every = every.count
        self._checks: Sequence[ComputeCheck] = ()
        # Of the micro-batches that two ranks compute: the batch, and checksums of the results, on the device.
        self._batches: dict[int, Any] = {}
        self._sums: dict[int, dict[str, Tensor]] = {}
        self._hooks = ExitStack()  # of the open micro-batch
        self._agreed_step: int | None = None

    def begin_loop(self, loop: LoopParts) -> None:
        """Check whether the ranks can recompute one another's micro-batches.

        Raises:
            Error: they cannot, or not with the same bits.
        """
        self._loop = loop
        context = self.context
        if context.world_size == 1:
            return
        machines = context.group.gather(describe_machine(context.config, context.device))
        devices = [machine["device"] for machine in machines]
        if loop.data.lanes is not None:
            why = "only one rank reads a lane of an IterableDataset"
        elif not context.config.deterministic:
            why = "deterministic=False does not keep them"
        elif any(machine != machines[0] for machine in machines):
            why = f"the ranks compute on machines of different kinds ({', '.join(devices)})"
        else:
            return
        raise InvalidValue(
            f"check_compute_every compares the bits that two ranks compute, but {why}: leave it out", code="SS612"
        )

    def borrow(self, step: int, num_micro_batches: int) -> Sequence[int]:
        return [check.v for check in self._find_checks(step, num_micro_batches) if check.checker == self.context.rank]

    def _find_checks(self, step: int, num_micro_batches: int) -> Sequence[ComputeCheck]:
        if (step + 1) % self._every:
            return ()
        return plan_checks(num_micro_batches, self.context.world_size, step // self._every)

    def results(self) -> tuple[int, int]:
        """Return checksums of this rank's results for the micro-batches that it owns and that it has borrowed."""
        found = {v: combine(read_back(sums)) for v, sums in self._sums.items()}
        computed = next((found[check.v] for check in self._checks if check.owner == self.context.rank), 0)
        recomputed = next((found[check.v] for check in self._checks if check.checker == self.context.rank), 0)
        return computed, recomputed

    def begin_pass(self, step: Step) -> None:
        self._checks = self._find_checks(step.number, len(step.sizes))
        self._sums = {check.v: {} for check in self._checks if self.context.rank in (check.owner, check.checker)}

    def forward(self, step: Step, batch: Any) -> None:
        if (sums := self._sums.get(step.micro_batch)) is None:
            return
        plan = self._loop.gradients.plan
        self._batches[step.micro_batch] = batch

        def add(i: int, grad: Tensor) -> None:
            dense = grad if grad.layout is torch.strided else grad.to_dense()
            sums[f"the gradient of {plan.names[i]}"] = checksum(dense)

        self._hooks.enter_context(GradientHooks(plan.params).passing_to(add))

    def end_micro_batch(self, step: Step) -> None:
        self._hooks.close()

    def backward(self, step: Step, loss: Tensor, weight: float | Tensor | None, model: nn.Module | None) -> None:
        sums = self._sums.get(step.micro_batch)
        if sums is not None and isinstance(loss, Tensor):  # else step.backward refuses it
            sums["loss"] = checksum(loss)

    def after_exchange(self, step: Step, reduced: Reduced) -> Iterator[Any]:
        """If two ranks disagree, let a third rank compute the micro-batch, and name the rank that is wrong.

        Raises:
            Error: ranks disagree. Raised on all ranks, before anything of the step is applied.
        """
        votes = reduced.votes
        wrong = (check for check in self._checks if votes[check.owner].computed != votes[check.checker].recomputed)
        if (check := next(wrong, None)) is None:
            if self._checks:
                self._agreed_step = step.number
            self._batches.clear()
            self._sums.clear()
            return
        v, *ranks = check
        if self.context.rank == check.judge:
            self._sums[v] = {}
            yield from step.compute(v, self._load(step.number, v))
        samples = hash_content(self._batches[v]) if v in self._batches else ""
        rank = f"rank {self.context.rank} ({read_host()}, {self.context.device})"
        replies = self.context.group.gather(Opinion(rank, samples, read_back(self._sums.get(v, {}))))
        sentence = explain_dispute([replies[each] for each in ranks if each is not None], v, step.number)
        last = self._agreed_step
        agreed = "the ranks agreed in no earlier check" if last is None else f"all ranks last agreed in step {last}"
        raise Error(
            f"{sentence}; nothing of this step is saved, but {agreed}, so later snapshots may contain wrong results: "
            "resume from an earlier one (--resume)",
            code="SS503",
        )

    def _load(self, step: int, v: int) -> Any:
        """Load a micro-batch in addition to those of the loop."""
        spec = replace(self._loop.data.spec, num_workers=min(self._loop.data.spec.num_workers, 1))
        device = self.context.device
        with keeping_generators(), Loader(spec, [self._loop.data.plan.task(step, v)], device=device) as loader:
            return to_device(next(loader).batch, device)


def explain_dispute(opinions: Sequence[Opinion], v: int, step: int) -> str:
    """Return the beginning of the message for opinions about micro-batch v that differ."""
    drift = find_drift([each.results for each in opinions])
    assert drift is not None
    named = [each.rank for each in opinions]
    what = f"micro-batch {v} of step {step}"
    if len({each.samples for each in opinions}) > 1:
        return (
            f"{join_words(named)} read different samples for {what}, although the indices are the same: make the "
            "data set depend on the index and torch's generators only (samestep verify finds why it does not), or "
            "suspect the memory of these machines"
        )
    wrong = [named[number] for number in drift.differing]
    others = [name for name in named if name not in wrong]
    than = f" than {join_words(others)}" if others else ", and no majority says which is right"
    more = f" and {drift.num_tensors - 1} more differ" if drift.num_tensors > 1 else " differs"
    return (
        f"{join_words(wrong)} computed different results for {what}{than}, from the same weights and samples: "
        f"{drift.tensor}{more}; suspect the processor and the memory of that machine, and leave it out; or code whose "
        "results depend on earlier calls (a module that keeps a count; samestep verify finds it)"
    )
