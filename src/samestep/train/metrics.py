"""A run's metrics: averages per epoch, rows of `metrics.jsonl`, the progress display, trackers and the ledger."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from samestep.engine.gradient_checksum import compute_checksum
from samestep.engine.leaf import read_grad
from samestep.engine.passes import Reduced
from samestep.errors import Error
from samestep.plan.ledger import Entry, combine, to_bits
from samestep.plan.loop_plan import LoopPlan
from samestep.train.context import RunContext
from samestep.train.objects import Objects
from samestep.train.prepared import Prepared
from samestep.train.step import Step, StepObserver, StepResult
from samestep.watch.beats import describe_spent, share_spent
from samestep.watch.progress import Progress
from samestep.watch.trackers import TrackerInfo, Trackers


class RunMetrics(StepObserver):
    """Records every finished step, and rows of metrics."""

    def __init__(self, context: RunContext, progress: Progress, trackers: Trackers) -> None:
        self._context = context
        self._state = context.state
        self._progress = progress
        self._trackers = trackers
        self._info: TrackerInfo | None = None
        # If gradients are divided: this rank's checksum of the last pass, and the list for that of all ranks.
        self._last: tuple[Callable[[], int], list[Callable[[], int]]] | None = None

    def begin_loop(self, plan: LoopPlan, prepared: Prepared, info: TrackerInfo | None) -> None:
        """A loop begins. `info`: the description of this start, for the trackers, before the first one; else None."""
        self._num_samples = 0
        self._plan = plan
        self._prepared = prepared
        self._info = info or self._info

    def start(self) -> None:
        """Start the trackers, show the progress, and time the loop, which has steps left."""
        self._start_trackers(self._state.steps_done)
        self._progress.begin(total_steps=self._state.loop.last_step, has_epochs=not self._plan.is_endless)
        self._began_s = time.perf_counter()

    def _start_trackers(self, resumed_step: int) -> None:
        """Start the trackers, on rank 0. `resumed_step`: as in `TrackerInfo`."""
        if self._context.rank == 0 and self._info is not None:
            self._trackers.start(replace(self._info, resumed_step=resumed_step))

    def take_over(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show the progress and pass rows to the trackers, on a rank that has become rank 0.

        Args:
            rows: the last ones, in their order. Some of them may not have reached the trackers.
        """
        self._progress.take_over()
        if not self._state.is_in_loop:
            return
        try:
            self._start_trackers(min([self._state.steps_done, *(row["step"] - 1 for row in rows)]))
        except Error as error:
            self._context.say(f"{error}; the run continues without trackers")
        for row in rows:
            self._trackers.log({name: row[name] for name in row if name not in ("step", "epoch")}, row["step"])

    def reduced(self, step: Step) -> None:
        """Read the gradient and the learning rates of the update, which the script's body may change afterwards."""
        plan = self._prepared.gradients.plan
        location = self._context.location
        is_divided = plan.is_divided and location.path is not None
        if is_divided or location.directory or location.kept:
            own = compute_checksum([*map(read_grad, plan.params)], step.number)
            if is_divided:
                self._last = own, step.result.checksums
            else:
                step.result.checksums.append(own)
        steps_done = step.number + 1
        self._is_logged = self._context.config.log_every.is_due(steps_done, self._plan.epochs_done(steps_done))
        if self._is_logged:
            self._rates = learning_rates(self._prepared.objects)

    def end_step(self, step: Step) -> None:
        """Record a finished step."""
        self._num_samples += step.num_samples
        steps_done = step.number + 1
        location = self._context.location
        if (records := location.directory or location.kept) is not None:
            # Checksums on a GPU are read after the next step, which needs no wait. The step, which has batches, may go.
            place = step.number, step.epoch, step.num_samples
            records.enter(partial(_build_entry, place, step.num_passes, step.result))
        self._progress.step(steps_done, step.num_samples, step.epoch)
        if not self._plan.is_endless:
            self._state.tally.add(step.epoch, step.result.averages)
        if self._is_logged:
            row = {f"train/{name}": float(value) for name, (value, _) in step.result.averages.items()}
            loss = {"train/loss": row.pop("train/loss")} if "train/loss" in row else {}
            num_skipped = self._state.tally.num_skipped
            skipped = {"train/skipped_steps": num_skipped} if num_skipped else {}
            self.write_row(loss | self._rates | row | skipped, steps_done, epoch=step.epoch)

    def read_checksum(self) -> int:
        """Return this rank's part of the checksum of the last pass, for the next exchange; 0 if there is none."""
        return 0 if self._last is None else self._last[0]()

    def exchanged(self, step: Step, reduced: Reduced) -> None:
        if self._last is not None:
            self._combine([vote.checksum for vote in reduced.votes])

    def complete_checksums(self) -> None:
        """Combine the checksums of the last gradient, before the ledger is written. On all ranks."""
        if self._prepared.gradients.plan.is_divided:
            self._combine(self._context.group.gather_number(self.read_checksum()))

    def _combine(self, values: Sequence[int]) -> None:
        """Combine the checksum of the last pass. `values`: the results of `read_checksum` on all ranks."""
        if self._last is not None:
            self._last[1].append(partial(max, values))  # ranks that have the row have the same, and the others 0
            self._last = None

    def write_row(self, values: Mapping[str, Any], step: int, **position: int) -> None:
        """Write a row of `metrics.jsonl` on rank 0, and pass it to the progress display and the trackers.

        The other ranks show nothing, and have started no trackers.
        """
        location = self._context.location
        records = location.directory if self._context.rank == 0 else location.kept
        if records is not None:
            records.write_row({"step": step, **position, **values})
        self._progress.log(values, step)
        self._trackers.log(values, step)

    def finish(self, rows: Mapping[str, Any], status: str) -> None:
        """End the progress display with a table, and the trackers with the status."""
        location = self._context.location
        directory = {} if location.path is None else {"written to": location.shown}
        self._progress.end({**self._state.summary, **rows, **directory})
        self._trackers.finish(status)

    def sum_up(self, spent_s: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return rows for the table at the end of a loop, and what was measured, for `status.json`.

        Args:
            spent_s: phase -> seconds.
        """
        num_steps = self._state.steps_done
        num_skipped = self._state.tally.num_skipped
        rows: dict[str, Any] = {"steps": num_steps}
        if not self._num_samples:
            return rows, {}
        wall_s = time.perf_counter() - self._began_s
        samples_per_s = self._num_samples / wall_s
        if num_skipped:
            rows["steps without an update"] = f"{num_skipped} of {num_steps}"
        rows |= {"samples/s": f"{samples_per_s:,.0f}", "wall time": f"{wall_s:.1f} s"}
        if spent := describe_spent(spent_s):
            rows["time"] = spent
        return rows, {"samples_per_s": samples_per_s, "wall_s": wall_s, "time_share": share_spent(spent_s)}


def _build_entry(place: tuple[int, int, int], num_passes: int, result: StepResult) -> Entry | None:
    """Return the ledger's entry of a step; None if the run has failed after it. `place`: its first three fields."""
    if len(result.checksums) < num_passes:
        return None
    loss = math.nan if result.loss is None else result.loss
    return Entry(*place, combine(result.fingerprints), to_bits(loss), result.gradient_checksum)


def learning_rates(objects: Objects) -> dict[str, float]:
    """Return the learning rate of each optimizer's first parameter group, by its name in a row of metrics."""
    groups = {name: optimizer.param_groups[0] for name, optimizer in objects.optimizers.items()}
    rates = {name: float(group["lr"]) for name, group in groups.items() if "lr" in group}
    return {"train/learning_rate" if len(rates) == 1 else f"train/learning_rate/{name}": rates[name] for name in rates}
