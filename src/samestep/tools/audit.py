"""Audit of the samples that each step of a run used. Does not import torch."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from samestep.cli import print_json
from samestep.console import escape, format_count
from samestep.data.source import order_file, read_order, read_shard_sizes, shards_file
from samestep.errors import Error
from samestep.plan.ledger import Entry
from samestep.plan.loop_plan import LoopPlan, StepSamples
from samestep.plan.order import Indices
from samestep.snapshot.logs import count_records, read_records
from samestep.snapshot.run_record import list_loops
from samestep.watch.records import LEDGER, RECORD, STATUS, read_or_empty

_NUM_SHOWN = 10
_MAX_PROBLEMS = 1000  # an audit stops after these: a damaged ledger may have billions of records


def _build_plan(run: Path, numbers: Mapping[str, Any], num_steps: int) -> LoopPlan:
    """Return the plan of one of the run's loops.

    Args:
        num_steps: number of steps of the run. A loop that has none needs no list of shards, which may not be written.
    """

    @lru_cache(maxsize=2)
    def find_order(epoch: int) -> Indices:
        with _restoring(f"the sampler's order of epoch {epoch}", run / order_file(epoch)):
            return read_order(run, epoch)

    shards = numbers.get("shards")
    sizes: Sequence[int] = ()
    try:
        if shards and numbers["shuffle"] and num_steps > numbers.get("first_step", 0):
            with _restoring("the shards of the data set", run / shards_file(shards)):
                sizes = read_shard_sizes(run, shards)
        return LoopPlan.from_numbers(numbers, shard_sizes=sizes, find_order=find_order)
    except KeyError as error:
        raise Error(f"{run / RECORD} lacks {error}: the run has not started its first step yet", code="SS709") from None


@contextmanager
def _restoring(what: str, path: Path) -> Iterator[None]:
    """Raise Error for a file that cannot be read."""
    try:
        yield
    except (OSError, ValueError, EOFError) as error:
        raise Error(f"{what} cannot be read from {path} ({error}): restore it from a backup", code="SS408") from None


class _Audit:
    """Checks that each step of a loop used its planned samples, and that the plan has each sample once per epoch.

    Add steps in order.
    """

    def __init__(self, plan: LoopPlan) -> None:
        self.problems: list[str] = []
        self._plan = plan
        self._left: dict[int, Indices] = {}  # incomplete epoch -> remaining uses of each sample
        self._num_closed = 0

    def add(self, step: int, record: Entry, *, is_own: bool = True) -> StepSamples | None:
        """Check the ledger's record of a step. Returns the samples that it used; None if they are not known.

        Args:
            is_own: False if another run has made the step, with other micro-batches: its fingerprint is another one.
        """
        planned = self._plan.plan_step(step)
        problem = ""
        if not record.num_samples:  # a resumed run fills a truncated file with zeros
            problem = "the ledger has no record of it, ledger.bin was truncated"
        elif record.step != step:
            problem = f"the ledger has a record of step {record.step} at its position"
        elif is_own and record.fingerprint != planned.fingerprint:
            problem = f"it should have used sample {planned.samples[0]} and so on, but used others"
        elif (record.epoch, record.num_samples) != (min(planned.by_epoch), len(planned.samples)):
            problem = f"the ledger records {record.num_samples} samples of epoch {record.epoch}"
        if problem:
            self.problems.append(f"step {step}: {problem}")
        if not self._plan.is_stream:  # each sample of a stream has one position
            for epoch, samples in planned.by_epoch.items():
                if epoch not in self._left:
                    self._left[epoch] = self._plan.count_uses(epoch)
                np.subtract.at(self._left[epoch], samples, 1)
            for epoch in sorted(self._left):
                if self._plan.num_steps_until(epoch) <= step + 1:
                    left = self._left.pop(epoch)
                    self._num_closed += 1
                    if left.sum() != self._plan.num_dropped or left.min() < 0:
                        self.problems.append(f"epoch {epoch}: the plan does not have each sample once")
        return None if problem else planned

    def list_confirmed(self) -> list[str]:
        """Describe what the audit has confirmed."""
        found = ["each step read its positions of the stream"] if self._plan.is_stream else []
        if self._num_closed:
            how_often = "as often as in the sampler's order" if self._plan.has_sampler else "once"
            left_out = " except for the dropped tail" if self._plan.num_dropped else ""
            found.append(
                f"in {format_count(self._num_closed, 'complete epoch')} each of {self._plan.length} samples was used "
                f"{how_often}{left_out}"
            )
        if self._left:
            found.append(f"epoch {max(self._left)} is incomplete, no sample twice")
        return found


def summarize(problems: Sequence[str], confirmed: Sequence[str]) -> str:
    """Format the result of `audit_samples`."""
    if problems:
        shown = "".join(f"\n  {problem}" for problem in problems[:_NUM_SHOWN])
        more = len(problems) - _NUM_SHOWN
        return f"audit failed:{shown}" + (f"\n  and {more} more" if more > 0 else "")
    return f"audit passed: {'; '.join(confirmed) or 'there are no steps yet'}"


def audit_samples(
    run: Path, record: Mapping[str, Any], see: Callable[[int, StepSamples | None], None] | None = None
) -> tuple[list[str], list[str]]:
    """Check that each step of a run used its planned samples, and each epoch each sample once.

    Args:
        record: the content of run.json.
        see: called with each step and the samples that it used; None if they are not known.

    Returns:
        Descriptions of what is wrong, and of what the audit has confirmed.

    Raises:
        Error: run.json or an order file lacks data that the audit needs.
    """
    continues = record.get("continues") or {"step": 0, "begins": []}
    status = read_or_empty(run / STATUS)
    num_steps = count_records(run / LEDGER)
    plans = [_build_plan(run, loop, num_steps) for loop in list_loops(record)]
    begins = [plan.first_step for plan in plans[1:]]
    audits = [_Audit(plan) for plan in plans]
    for step, entry in enumerate(read_records(run / LEDGER)):
        is_own = step >= continues["step"]
        if not is_own and continues["begins"]:  # of another plan: its own run's audit checks it
            continue
        audit = audits[bisect_right(begins, step)]
        if len(audit.problems) > _MAX_PROBLEMS:
            audit.problems.append(f"steps {step} to {num_steps - 1}: they were not checked")
            break
        used = audit.add(step, entry, is_own=is_own)
        if see is not None:
            see(step, used)
    if num_steps < (num_done := status.get("steps", 0)):
        why = status.get("lost") or "ledger.bin was truncated"
        audits[-1].problems.append(f"steps {num_steps} to {num_done - 1}: the ledger has no record of them, {why}")
    return (
        [problem for audit in audits for problem in audit.problems],
        [each for audit in audits for each in audit.list_confirmed()],
    )


def show_samples(run: Path, record: Mapping[str, Any], *, is_json: bool) -> int:
    """Print the samples of all steps, and the audit. Returns 1 if the audit failed."""
    steps: list[dict[str, Any]] = []

    def show(step: int, used: StepSamples | None) -> None:
        epoch, samples = (None, None) if used is None else (min(used.by_epoch), used.samples.tolist())
        if is_json:
            steps.append({"step": step, "epoch": epoch, "samples": samples})
        elif samples is None:
            print(f"{step}: not the planned samples")
        else:
            print(f"{step} epoch {epoch} {len(samples)}: {' '.join(map(str, samples))}")

    problems, confirmed = audit_samples(run, record, show)
    if is_json:
        print_json({"steps": steps, "audit": {"passed": not problems, "problems": problems}})
    else:
        print(escape(summarize(problems, confirmed)))
    return 1 if problems else 0
