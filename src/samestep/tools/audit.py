"""Audit of the samples that each step of a run used. Does not import torch."""

import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from samestep.command_line import print_json
from samestep.console import escape
from samestep.data.order_files import order_file, read_order, read_shard_sizes, shards_file
from samestep.errors import Error
from samestep.plan.ledger import Entry
from samestep.plan.loop_plan import LoopPlan, StepSamples
from samestep.plan.order import GivenOrder, Indices
from samestep.snapshot.ledger_file import count_records, read_records
from samestep.watch.records import LEDGER, RECORD, STATUS, read_or_empty

_NUM_SHOWN = 10
_MAX_PROBLEMS = 1000  # an audit stops after these
_MAX_SEARCHED = 1_000_000  # steps that are searched for the samples of a record


def _build_plan(run: Path, numbers: Mapping[str, Any], num_steps: int) -> LoopPlan:
    """Return the plan of one of the run's loops.

    Args:
        num_steps: number of steps of the run. A loop that has none needs no list of shards, which may not be written.
    """
    path = run / RECORD
    try:
        needs_shards = numbers.get("shards") and numbers["shuffle"] and num_steps > numbers.get("first_step", 0)
        return LoopPlan.from_numbers(
            numbers,
            shard_sizes=_read_shard_sizes(run, numbers["shards"]) if needs_shards else (),
            find_order=lru_cache(maxsize=2)(partial(_read_order, run)),
        )
    except KeyError as error:
        raise Error(f"{path} lacks {error}: the run has not started its first step yet", code="SS709") from None


def _read_shard_sizes(run: Path, shards_hash: str) -> list[int]:
    try:
        return read_shard_sizes(run, shards_hash)
    except (OSError, ValueError) as error:
        path = run / shards_file(shards_hash)
        raise Error(
            f"the shards of the data set cannot be read from {path} ({error}): restore it from a backup", code="SS408"
        ) from None


def _read_order(run: Path, epoch: int) -> GivenOrder:
    try:
        return read_order(run, epoch)
    except (OSError, ValueError, EOFError) as error:
        path = run / order_file(epoch)
        raise Error(
            f"the sampler's order of epoch {epoch} cannot be read from {path} ({error}): restore it from a backup",
            code="SS408",
        ) from None


class _Audit:
    """Checks that each step of a loop used its planned samples, and each epoch each sample once. Add steps in order.

    Args:
        num_steps: number of steps of the run, up to the last one of this loop.
    """

    def __init__(self, plan: LoopPlan, num_steps: int) -> None:
        self.problems: list[str] = []
        self._closed: set[int] = set()
        self._plan = plan
        self._num_steps = num_steps
        self._left: dict[int, Indices] = {}  # incomplete epoch -> remaining uses of each sample

    def add(self, step: int, record: Entry) -> StepSamples:
        """Check the ledger's record of step `step`. Returns the samples that the step used."""
        found_step, epoch, num_samples, found, *_ = record
        planned = used = self._plan.plan_step(step)
        if not num_samples:  # a resumed run fills a truncated file with zeros
            self.problems.append(f"step {step}: the ledger has no record of it, ledger.bin was truncated")
        elif found_step != step:
            self.problems.append(f"step {step}: the ledger has a record of step {found_step} at its position")
        if num_samples and found != planned.fingerprint:
            other = self._steps_by_fingerprint.get(found)
            used = planned if other is None else self._plan.plan_step(other)
            what = "samples of no step" if other is None else f"those of step {other}"
            self.problems.append(
                f"step {step}: it should have used sample {planned.samples[0]} and so on, but used {what}"
            )
        elif num_samples and (epoch, num_samples) != (planned.pieces[0][0], len(planned.samples)):
            self.problems.append(f"step {step}: the ledger records {num_samples} samples of epoch {epoch}")
        for piece_epoch, samples in used.pieces:
            self._use(step, piece_epoch, samples)
        for open_epoch in sorted(self._left):
            if self._plan.num_steps_until(open_epoch) <= step + 1:
                self._close(open_epoch)
        return used

    def list_confirmed(self) -> list[str]:
        """Describe what the audit has confirmed."""
        parts = ["each step read its positions of the stream"] if self._plan.is_stream else []
        if num_closed := len(self._closed):
            how_often = "as often as in the sampler's order" if self._plan.has_sampler else "once"
            left_out = " except for the dropped tail" if self._plan.num_dropped else ""
            epochs = "1 complete epoch" if num_closed == 1 else f"{num_closed} complete epochs"
            parts.append(f"in {epochs} each of {self._plan.length} samples was used {how_often}{left_out}")
        if self._left:
            parts.append(f"epoch {max(self._left)} is incomplete, no sample twice")
        return parts

    @cached_property
    def _steps_by_fingerprint(self) -> dict[int, int]:
        steps = range(self._plan.first_step, min(self._num_steps, self._plan.first_step + _MAX_SEARCHED))
        return {self._plan.plan_step(step).fingerprint: step for step in reversed(steps)}

    def _use(self, step: int, epoch: int, samples: Indices) -> None:
        if self._plan.is_stream:
            return  # each sample stands at one position
        if epoch in self._closed:
            self.problems.append(f"step {step}: sample {samples[0]} and so on were used in epoch {epoch} before")
            return
        if epoch not in self._left:
            self._left[epoch] = self._plan.count_uses(epoch)
        left = self._left[epoch]
        np.subtract.at(left, samples, 1)
        for sample in samples[left[samples] < 0]:
            self.problems.append(f"step {step}: sample {sample} was used in epoch {epoch} before")
            left[sample] = 0

    def _close(self, epoch: int) -> None:
        left = self._left.pop(epoch)
        self._closed.add(epoch)
        if left.sum() != self._plan.num_dropped:
            unused = np.flatnonzero(left)
            named = ", ".join(map(str, unused[:_NUM_SHOWN])) + (" ..." if len(unused) > _NUM_SHOWN else "")
            self.problems.append(f"epoch {epoch}: samples never used: {named}")


def summarize(problems: Sequence[str], parts: Sequence[str]) -> str:
    """Format the result of `audit_samples`."""
    if problems:
        shown = "".join(f"\n  {problem}" for problem in problems[:_NUM_SHOWN])
        more = len(problems) - _NUM_SHOWN
        return f"audit failed:{shown}" + (f"\n  and {more} more" if more > 0 else "")
    return f"audit passed: {'; '.join(parts) or 'there are no steps yet'}"


def audit_samples(
    run: Path, record: Mapping[str, Any], see: Callable[[int, StepSamples], None] | None = None
) -> tuple[list[str], list[str]]:
    """Check that each step of a run used its planned samples, and each epoch each sample once.

    Args:
        record: the content of run.json.
        see: called with each step and the samples that it used.

    Returns:
        Descriptions of what is wrong, and of what the audit has confirmed.

    Raises:
        Error: run.json or an order file lacks data that the audit needs.
    """
    numbers = record.get("numbers", {})
    of_all = {name: value for name, value in numbers.items() if name not in ("num_lanes", "epoch_length", "shards")}
    path = run / LEDGER
    status = read_or_empty(run / STATUS)
    num_steps = count_records(path)
    loops = [numbers, *(of_all | loop for loop in record.get("loops", []))]
    plans = [_build_plan(run, loop, num_steps) for loop in loops]
    ends = [*(plan.first_step for plan in plans[1:]), num_steps]
    audits = [_Audit(plan, min(end, num_steps)) for plan, end in zip(plans, ends, strict=True)]
    for step, entry in enumerate(read_records(path)):
        audit = audits[bisect_right(ends[:-1], step)]
        if len(audit.problems) > _MAX_PROBLEMS:
            audit.problems.append(f"steps {step} to {num_steps - 1}: they were not checked")
            break
        used = audit.add(step, entry)
        if see is not None:
            see(step, used)
    if num_steps < (num_done := status.get("steps", 0)):
        why = status.get("lost", "ledger.bin was truncated")
        audits[-1].problems.append(f"steps {num_steps} to {num_done - 1}: the ledger has no record of them, {why}")
    return (
        [problem for audit in audits for problem in audit.problems],
        [part for audit in audits for part in audit.list_confirmed()],
    )


def show_samples(run: Path, record: Mapping[str, Any], *, only: int | None, is_json: bool) -> int:
    """Print the samples of a step, or of all steps if `only` is None, and the audit. Returns 1 if the audit failed.

    Raises:
        Error: the ledger has no such step.
    """
    num_steps = count_records(run / LEDGER)
    if only is not None and only >= num_steps:
        which = f"steps 0 to {num_steps - 1}" if num_steps else "no steps"
        raise Error(f"the ledger has {which}: there is no step {only}", code="SS709")
    steps = []

    def show(step: int, used: StepSamples) -> None:
        if only not in (None, step):
            return
        if is_json:
            epoch = used.pieces[0][0]
            samples = used.samples.tolist()
            steps.append({"step": step, "epoch": epoch, "num_samples": len(samples), "samples": samples})
        else:
            print(_format_step(step, used, _NUM_SHOWN if sys.stdout.isatty() else len(used.samples)))

    problems, parts = audit_samples(run, record, show)
    if is_json:
        print_json({"steps": steps, "audit": {"passed": not problems, "problems": problems}})
    else:
        print(escape(summarize(problems, parts)))
    return 1 if problems else 0


def _format_step(step: int, used: StepSamples, num_shown: int) -> str:
    samples = used.samples
    listed = " ".join(map(str, samples[:num_shown])) + (" ..." if len(samples) > num_shown else "")
    return f"{step} epoch {used.pieces[0][0]} {len(samples)}: {listed}"
