"""Audit of the samples that each step of a run used. Does not import torch."""

import json
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.console import escape
from samestep.data.source import parse_shards
from samestep.errors import Error
from samestep.files import is_count, open_regular, read_bytes
from samestep.plan.epochs import Epochs
from samestep.plan.ledger import Entry, combine, fingerprint
from samestep.plan.order import GivenOrder, Order, build_order
from samestep.snapshot.ledger_file import count_records, read_records
from samestep.watch.records import LEDGER, STATUS, order_file, read_or_empty, shards_file

_NUM_SHOWN = 10
_MOST_PROBLEMS = 1000  # an audit stops after these
_MOST_SEARCHED = 1_000_000  # steps that are searched for the samples of a record
_MOST_MICRO_BATCHES = 1 << 20

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Planned:
    """The planned samples of a step: epoch and samples, for each epoch that has samples in the step."""

    pieces: tuple[tuple[int, Indices], ...]
    fingerprint: int

    @property
    def samples(self) -> Indices:
        return np.concatenate([samples for _, samples in self.pieces])


class _Plan:
    """The samples of one of the run's loops, computed from its numbers. Steps and epochs are counted over the run."""

    def __init__(self, run: Path, numbers: Mapping[str, Any]) -> None:
        self.first_step: int = numbers.get("first_step", 0)
        self._first_epoch: int = numbers.get("first_epoch", 0)
        try:
            sizes = numbers["data_length"], numbers["batch_size"], numbers["micro_batch_size"]
            self.is_endless, self.is_given = numbers["mode"] == "steps", numbers["sampler"] == "given"
            self.is_stream, self._shards = "num_lanes" in numbers, numbers.get("shards", "")
            self._seed, self._shuffle, self.drop_last = numbers["seed"], numbers["shuffle"], numbers["drop_last"]
        except KeyError as error:
            raise Error(f"{run / 'run.json'} lacks {error}: the run has not started its first step yet") from None
        if not all(map(is_count, (*sizes, self._seed))) or sizes[1] // max(sizes[2], 1) > _MOST_MICRO_BATCHES:
            raise Error(f"{run / 'run.json'} has invalid sizes or an invalid seed ({sizes}, {self._seed}): repair it")
        self.drop_last = self.drop_last and not self.is_endless
        self.length: int = sizes[0]
        self.batch_size: int = sizes[1]
        self._run = run
        self._epochs = Epochs(
            *sizes[1:], drop_last=self.drop_last, is_endless=self.is_endless, first_step=self.first_step,
            first_epoch=self._first_epoch, length=None if self.is_given else self.length,
        )  # fmt: skip
        self.order = lru_cache(maxsize=2)(self._read_order if self.is_given else self._build_order)

    def step(self, step: int) -> Planned:
        while self.is_given and self._epochs.end < self._epochs.place_of(step + 1):
            self._epochs.add(len(self.order(self._epochs.next_epoch)))
        spans = self._epochs.micro_batches(step)
        taken = [
            [(epoch, self.order(epoch).take(start, stop)) for epoch, start, stop in self._epochs.pieces(step, span)]
            for span in spans
        ]
        prints = [fingerprint(np.concatenate([samples for _, samples in pieces])) for pieces in taken]
        return Planned(tuple(piece for pieces in taken for piece in pieces), combine(prints))

    def num_steps_until(self, epoch: int) -> int:
        """Return the number of steps until all samples of an epoch and of earlier ones are used."""
        place = self._epochs.start_of(epoch + 1)
        return self.first_step - (-place // self.batch_size) if self.is_endless else place

    def count_dropped(self, epoch: int) -> int:
        """Return the number of samples of an epoch that no step uses."""
        return len(self.order(epoch)) % self.batch_size if self.drop_last else 0

    def expect_uses(self, epoch: int) -> NDArray[np.int64]:
        """Return how often each sample should be used in an epoch."""
        if self.is_given:
            return np.bincount(self.order(epoch).take(0, len(self.order(epoch))))
        return np.ones(self.length, dtype=np.int64)

    def _build_order(self, epoch: int) -> Order:
        sizes = self._shard_sizes
        return build_order(self.length, seed=self._seed, epoch=epoch, shuffle=self._shuffle, shard_sizes=sizes)

    @cached_property
    def _shard_sizes(self) -> list[int]:
        if not self._shards or not self._shuffle:
            return []
        path = self._run / shards_file(self._shards)
        try:
            return [shard.num_samples for shard in parse_shards(read_bytes(path))[0]]
        except (OSError, ValueError) as error:
            raise Error(
                f"the shards of the data set cannot be read from {path} ({error}): restore it from a backup"
            ) from None

    def _read_order(self, epoch: int) -> Order:
        path = self._run / order_file(epoch)
        try:
            with open(path, "rb", opener=open_regular) as file:
                indices = np.load(file, allow_pickle=False)
            return GivenOrder(indices, int(indices.max()) + 1, epoch)
        except (OSError, ValueError, EOFError) as error:
            raise Error(
                f"the sampler's order of epoch {epoch} cannot be read from {path} ({error}): restore it from a backup"
            ) from None


class _Audit:
    """Checks that each step of a loop used its planned samples, and each epoch each sample once. Add steps in order.

    Args:
        num_steps: number of steps of the run, up to the last one of this loop.
    """

    def __init__(self, plan: _Plan, num_steps: int) -> None:
        self.problems: list[str] = []
        self._closed: set[int] = set()
        self._plan, self._num_steps = plan, num_steps
        self._left: dict[int, Indices] = {}  # incomplete epoch -> remaining uses of each sample

    def add(self, step: int, record: Entry) -> Planned:
        """Check the ledger's record of step `step`. Returns the samples that the step used."""
        found_step, epoch, num_samples, found, *_ = record
        planned = used = self._plan.step(step)
        if not num_samples:  # a resumed run fills a truncated file with zeros
            self.problems.append(f"step {step}: the ledger has no record of it, ledger.bin was truncated")
        elif found_step != step:
            self.problems.append(f"step {step}: the ledger has a record of step {found_step} at its position")
        if num_samples and found != planned.fingerprint:
            other = self._steps_by_fingerprint.get(found)
            used = planned if other is None else self._plan.step(other)
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

    def describe(self) -> list[str]:
        """Describe what the audit has confirmed."""
        parts = ["each step read its positions of the stream"] if self._plan.is_stream else []
        if num_closed := len(self._closed):
            how_often = "as often as in the sampler's order" if self._plan.is_given else "once"
            left_out = " except for the dropped tail" if self._plan.drop_last else ""
            epochs = "1 complete epoch" if num_closed == 1 else f"{num_closed} complete epochs"
            parts.append(f"in {epochs} each of {self._plan.length} samples was used {how_often}{left_out}")
        if self._left:
            parts.append(f"epoch {max(self._left)} is incomplete, no sample twice")
        return parts

    @cached_property
    def _steps_by_fingerprint(self) -> dict[int, int]:
        steps = range(self._plan.first_step, min(self._num_steps, self._plan.first_step + _MOST_SEARCHED))
        return {self._plan.step(step).fingerprint: step for step in reversed(steps)}

    def _use(self, step: int, epoch: int, samples: Indices) -> None:
        if self._plan.is_stream:
            return  # each sample stands at one position
        if epoch in self._closed:
            self.problems.append(f"step {step}: sample {samples[0]} and so on were used in epoch {epoch} before")
            return
        if epoch not in self._left:
            self._left[epoch] = self._plan.expect_uses(epoch)
        left = self._left[epoch]
        np.subtract.at(left, samples, 1)
        for sample in samples[left[samples] < 0]:
            self.problems.append(f"step {step}: sample {sample} was used in epoch {epoch} before")
            left[sample] = 0

    def _close(self, epoch: int) -> None:
        left = self._left.pop(epoch)
        self._closed.add(epoch)
        if left.sum() != self._plan.count_dropped(epoch):
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
    run: Path, record: Mapping[str, Any], see: Callable[[int, Planned], None] | None = None
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
    of_all = {name: value for name, value in numbers.items() if name not in ("num_lanes", "shards")}
    plans = [_Plan(run, numbers), *(_Plan(run, of_all | loop) for loop in record.get("loops", []))]
    path, status = run / LEDGER, read_or_empty(run / STATUS)
    num_steps = count_records(path)
    ends = [*(plan.first_step for plan in plans[1:]), num_steps]
    audits = [_Audit(plan, min(end, num_steps)) for plan, end in zip(plans, ends, strict=True)]
    for step, entry in enumerate(read_records(path)):
        audit = audits[bisect_right(ends[:-1], step)]
        if len(audit.problems) > _MOST_PROBLEMS:
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
        [part for audit in audits for part in audit.describe()],
    )


def show_samples(run: Path, record: Mapping[str, Any], *, which: int | str, is_json: bool) -> int:
    """Print the samples of a step (all steps if `which` is "latest") and the audit. Returns 1 if the audit failed."""
    steps = []

    def show(step: int, used: Planned) -> None:
        if which not in ("latest", step):
            return
        if is_json:
            epoch, samples = used.pieces[0][0], used.samples.tolist()
            steps.append({"step": step, "epoch": epoch, "num_samples": len(samples), "samples": samples})
        else:
            print(_format_step(step, used, _NUM_SHOWN if sys.stdout.isatty() else len(used.samples)))

    problems, parts = audit_samples(run, record, show)
    if is_json:
        print(json.dumps({"steps": steps, "audit": {"passed": not problems, "problems": problems}}))
    else:
        print(escape(summarize(problems, parts)))
    return 1 if problems else 0


def _format_step(step: int, used: Planned, num_shown: int) -> str:
    samples = used.samples
    listed = " ".join(map(str, samples[:num_shown])) + (" ..." if len(samples) > num_shown else "")
    return f"{step} epoch {used.pieces[0][0]} {len(samples)}: {listed}"
