"""The loop over epochs and steps: what happens between two steps, and how it ends."""

import os
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.data.attributes import Attributes
from samestep.data.loader import Loader, seed_all
from samestep.errors import Error
from samestep.plan.seeds import derive
from samestep.snapshot.inspection import TrainingState
from samestep.train.batches import Batches
from samestep.train.evaluate import check_not_alone
from samestep.train.loops import Place
from samestep.train.shutdown import let_go
from samestep.train.stateful import list_calm
from samestep.train.steps import Epoch, Step
from samestep.train.stop_signals import MOST_IDLE_STOPS, count_idle_stops, describe_stop
from samestep.train.unprepared import Unprepared
from samestep.watch.records import RESTARTS
from samestep.world.environment import BEGUN, FINISHED, ROOM, START_AGAIN, STOPPED, advise, stop_code
from samestep.world.private import make_private

if TYPE_CHECKING:
    from samestep.train.run import Run

AFTER_LOOP = 2**31  # evaluations there are counted from here on: they draw other noise than those in the loop


class Loop:
    """One loop of a run: what `run.epochs` or `run.steps` gives.

    A body runs whole or not at all: snapshots, votes and stops happen when the next step or epoch is asked for, and
    those of an epoch's last step wait for the epoch's body.

    Attributes:
        steps_done: steps finished so far, over all restarts.
        began_step: the steps that were done when the loop began.
        step: the present step, or the last one.
        ending: no further step begins.
        is_ended: all of its steps are done, or it ended early.
        repeats_head: an epoch has begun for the second time, and none of its steps yet; or the loop is past, so that
            what follows it has run before.
        failure: at its end, where the snapshot that was due there could not be written, or where to be started again
            would be in vain.
    """

    def __init__(self, run: "Run", batches: Batches, place: Place) -> None:
        self._run, self.batches, self.place = run, batches, place
        self.steps_done = self.began_step = place.steps_done
        self.last_step, self._is_cut = place.last_step, place.last_step < place.planned_step
        self.step: Step | None = None
        self.ending = self.steps_done >= self.last_step or bool(run._stop_reason)
        self._left = ""
        self.repeats_head = place.is_past
        self.failure: Error | None = None
        self.is_ended = self._has_agreed = False
        self._signal = 0
        self._agreed_epoch = -1
        self._num_samples = 0
        self._began_s = time.perf_counter()
        tasks = batches.tasks(self.steps_done, self.last_step, rank=run.rank, world_size=run.world_size)
        source = replace(batches.source, num_workers=0) if place.is_past else batches.source
        # One rank looks, in a run that can be resumed.
        looks = run.rank == 0 and run.dir is not None and run._trace is None and not place.is_further
        roots = {"the data set": source.dataset, "collate_fn": source.collate_fn}
        self._unprepared = Unprepared(run._objects if looks else None, roots, run._say)
        self._loader, self._attributes = Loader(source, tasks, device=run.device), Attributes(batches.source)

    def run_epochs(self, num_epochs: int) -> Generator[Epoch, None, None]:
        """Yields the epochs from where the run stands."""
        per_epoch = self.batches.steps_per_epoch
        assert per_epoch is not None
        self._begin()
        for number in range(self.batches.epoch_of(self.steps_done), self.batches.first_epoch + num_epochs):
            if self.ending:
                break
            if self.batches.has_sampler:
                self._agree_on_order(number)
            self._begin_body("epoch", number)
            end = self.batches.end_of(number)
            self.repeats_head = self.steps_done > end - per_epoch
            epoch = Epoch(self, number, per_epoch, self._run._tally)
            try:
                yield epoch
            except GeneratorExit:
                self._leave("epochs", f"epoch {number}")
                raise
            self.check_not_left()
            if not epoch.done:
                raise Error(
                    f"the steps of epoch {number} were not iterated over: its body needs `for step in epoch`; to end "
                    "early, call run.stop() and let the loop end by itself"
                )
            self._vote_alone()
            self._unprepared.look(self.steps_done - self.began_step, ends_epoch=True)
            whole = self.steps_done == end
            self._run._watchdog.enter("script", self.steps_done)
            if not whole:  # the body of an epoch that was cut short will run again: what it asks for is not final
                self._run._snapshotter.drop_names()
            self._save_what_is_due(epochs_done=number + 1 if whole else None, numbered=whole)
            self._leave_if_told()
        self._finish()

    def run_steps(self) -> Generator[Step, None, None]:
        """Yields the steps from where the run stands."""
        self._begin()
        while not self.ending:
            if self.batches.has_sampler:
                for epoch in self.batches.epochs_of(self.steps_done):
                    self._agree_on_order(epoch)
            yield from self.next_step(last=False)
        self._finish()

    def next_step(self, *, last: bool) -> Iterator[Step]:
        """Yields the next step and, when its body is done, closes it. `last`: of its epoch, whose body is to come."""
        run, number = self._run, self.steps_done
        began_s = time.monotonic()
        self.repeats_head = False
        self._begin_body("step", number)
        if number == self.began_step:
            run._snapshotter.watch(list_calm(run._objects))
        build = Step if run._trace is None else run._trace.build_step
        self.step = step = build(run, self, number, self._loader)
        try:
            yield step
        except GeneratorExit:
            self._leave("steps", f"step {number}")
            raise
        step.check_not_left()
        if step.open or not step.num_passes:
            raise Error(
                f"the micro-batches of step {number} were not iterated over: its body needs `for batch in step`; to "
                "end early, call run.stop() and let the loop end by itself"
            )
        self.steps_done += 1
        run._watchdog.enter("script", self.steps_done)
        self._account(step)
        self._unprepared.look(self.steps_done - self.began_step)
        self._warn_of_grace(time.monotonic() - began_s)
        self._vote_alone()
        self.ending |= self.steps_done >= self.last_step
        if not last:
            self._save_what_is_due(epochs_done=None, numbered=True)
            self._leave_if_told()

    def warn_of_changed_data(self) -> None:
        """Says, once, that the loader's workers do not see what the script has changed in the data set."""
        if (change := self._attributes.find_change()) is not None:
            self._run._say(change)

    def explain_end(self) -> str:
        """Why no step is left to a start, and how to train longer."""
        if self.steps_done < self.last_step:
            return f"run.stop() has ended this run; go on from here with {advise(resume=self.steps_done)}"
        more = "a larger max_steps" if self._is_cut else "more epochs" if self.batches.steps_per_epoch else "more steps"
        return f"{self.steps_done} of {self.last_step} steps are done; ask for {more}"

    def check_not_left(self) -> None:
        """Raises Error where the script has left one of the loops before its end."""
        error = self.left_error()
        if error is not None:
            raise error

    def find_end(self) -> tuple[int, int]:
        """The step and the epoch at which the next loop of the run begins. Raises Error while this one goes on."""
        if not self.is_ended:
            raise Error(
                "this run is inside another loop: call run.epochs() or run.steps() after that loop, not inside it "
                "or before it has begun"
            )
        return self.steps_done, self.batches.next_epoch(self.steps_done)

    def left_error(self) -> Error | None:
        """What is to be said of a loop that was left before its end."""
        if not self._left:
            return None
        return Error(
            f"{self._left}, so that what came after the last snapshot is lost: to end early, call run.stop() and let "
            "the loop end by itself"
        )

    def _leave(self, loop: str, where: str) -> None:
        self._run._watchdog.leave(self.steps_done)
        if not self.is_ended and not self._left:
            self._left = f"the loop over the {loop} was left by break (or return, or an error) in {where}"

    def _begin(self) -> None:
        """Before the first step: who was told to stop by now leaves without one."""
        run = self._run
        if self.place.is_past:
            return
        run._watchdog.begin()
        if self.place.is_further:
            run._snapshotter.write_status("running", "", None)
        elif run._snapshotter.directory is not None:
            run._snapshotter.directory.write_start(run._restart, from_step=self.steps_done, world_size=run.world_size)
        if run.local_rank == 0:
            self._tell_launcher(ROOM, str(run.batch_size // run.micro_batch_size))
            if run.dir is not None:
                self._tell_launcher(BEGUN, run._snapshotter.shown)
        if run._signals is not None:
            self.take_votes(run._group.gather_number(run._signals.heard))
            self._leave_if_told()
        self._agree_on_stop(is_everyone_here=True)

    def _begin_body(self, purpose: str, number: int) -> None:
        """Makes what the body draws, and its evaluations, depend on its number alone, not on where the run resumed."""
        seed_all(derive(self._run.seed, purpose, step=number))
        self._run._num_evaluations = 0

    def check_copying(self, copying: list[bool]) -> None:
        """Raises Error where some ranks alone have a snapshot on its way: what all look at together would not match."""
        if True in copying and False in copying:
            raise Error(
                f"rank {copying.index(True)} takes a snapshot of step {self.steps_done}, and rank "
                f"{copying.index(False)} does not: call run.snapshot on every rank; one of them writes it"
            )

    def take_votes(self, votes: list[int], wants_snapshot: bool = False) -> None:
        """Any rank's signal ends the run on all ranks, at the end of this step or epoch's body; a clock's snapshot
        is due there.

        The last thing before the script may update: what is being copied for a snapshot is copied by now.
        """
        snapshotter, pulse = self._run._snapshotter, self._run._watchdog
        before, is_copying = pulse.now[0], snapshotter.is_copying
        if is_copying:
            pulse.enter("saving", self.steps_done)
        snapshotter.join_copy()
        if is_copying:
            pulse.enter(before, self.steps_done)
        snapshotter.is_wanted |= wants_snapshot
        if not self.is_ended:
            self._signal = max(votes)
            self.ending |= bool(self._signal)

    def _vote_alone(self) -> None:
        """A signal in a body's last lines counts at its end, where no other rank has to hear of it."""
        if self._run.world_size == 1 and self._run._signals is not None:
            self.take_votes([self._run._signals.heard])

    def explain_loss(self, error: RuntimeError) -> None:
        """Raises Error where an exchange has failed because of a run.stop() on another rank alone."""
        stopped = self._run._group.find_stopped()
        if stopped is not None:
            raise self._build_stop_error(*stopped, other=self._run.rank) from error

    def _build_stop_error(self, rank: int, step: int | str, other: int) -> Error:
        return Error(
            f"rank {rank} ended its loop after step {step} by run.stop(), and rank {other} did not: call it on every "
            "rank, decided on what all ranks know (step.loss, step.metrics, epoch.metrics; not loss.item())",
            rank=self._run.rank,
        )

    def _agree_on_stop(self, *, is_everyone_here: bool) -> None:
        """Whether the ranks that end their loop by run.stop() are all of them.

        Args:
            is_everyone_here: all ranks call this, with and without a run.stop(). Else only those with one do: it
                costs the others nothing.

        Raises:
            Error: they are not.
        """
        run, has_stopped = self._run, bool(self._run._stop_reason)
        if self._has_agreed or self._signal or self.steps_done >= self.last_step:
            return
        if is_everyone_here:
            stops = run._group.gather_number(int(has_stopped))
            check_not_alone(stops)
            if 0 in stops and 1 in stops:
                raise self._build_stop_error(stops.index(1), self.steps_done, other=stops.index(0))
        elif has_stopped:
            other = run._group.find_going_on(self.steps_done)
            if other is not None:
                first, step = run._group.find_stopped() or (run.rank, self.steps_done)
                raise self._build_stop_error(first, step, other)
        self._has_agreed = has_stopped

    def _account(self, step: Step) -> None:
        """Writes down a finished step."""
        run, epoch = self._run, self.batches.epoch_of(step.number)
        self._num_samples += step.num_samples
        directory = run._snapshotter.directory
        if directory is not None:
            directory.enter(step.number, epoch, step.num_samples, step.fingerprint)
        run._progress.step(self.steps_done, step.num_samples, epoch)
        if step.is_skipped:
            run._tally.num_skipped += 1
            if run._tally.num_skipped == 1:
                run._say(
                    f"step {step.number} makes no update: no micro-batch of it had a step.backward with a weight above "
                    "0; such steps are counted as skipped_steps"
                )
        if self.batches.steps_per_epoch is not None:
            run._tally.add(epoch, step.weighted_metrics())
        if run._logs_step(self.steps_done):
            skipped = {"train/skipped_steps": run._tally.num_skipped} if run._tally.num_skipped else {}
            run._write_row(step.row | skipped, self.steps_done, epoch=epoch)

    def _warn_of_grace(self, step_s: float) -> None:
        """Says, once, that the kill which follows a signal to stop comes before a step and a snapshot are through."""
        run, directory = self._run, self._run._snapshotter.directory
        if run._grace_s is None or directory is None or not directory.save_s:
            return
        if step_s + directory.save_s > run._grace_s:
            run._say(
                f"the grace period of {run._grace_s} s is too short: a step takes {step_s:.1f} s and a "
                f"snapshot {directory.save_s:.1f} s, a run told to stop may be killed before it has saved: ask for more"
            )
            run._grace_s = None

    def _save_what_is_due(self, *, epochs_done: int | None, numbered: bool) -> None:
        run = self._run
        if run._trace is not None:
            run._trace.end_step(self)
        run._replicas.compare_if_due(self.steps_done, epochs_done)
        # At an epoch's end what follows is not always the next step's exchange.
        self._agree_on_stop(is_everyone_here=epochs_done is not None)
        if run.dir is None:
            return

        def build_state() -> dict[str, Any]:
            epoch = self.batches.epoch_of(self.steps_done) if epochs_done is None else epochs_done
            return run._build_state({"step": self.steps_done, "epoch": epoch})

        def get_state() -> TrainingState:
            return run._replicas.describe(build_state, self.steps_done)

        run._watchdog.enter("saving", self.steps_done)
        run._snapshotter.save_what_is_due(
            get_state,
            step=self.steps_done,
            epochs_done=epochs_done,
            numbered=numbered,
            ending=self.ending,
            notes={"tally": run._tally.state_dict()}
            | ({"stopped": run._stop_reason} if run._stop_reason and self.steps_done < self.last_step else {}),
        )
        run._watchdog.leave_saving(self.steps_done)

    @property
    def _is_to_leave(self) -> bool:
        """Whether a signal ends this start: a run that is whole, or has ended itself, has nothing to go on with."""
        return bool(self._signal) and self.steps_done < self.last_step and not self._run._stop_reason

    def _leave_if_told(self) -> None:
        if not self._is_to_leave:
            return
        snapshotter = self._run._snapshotter
        saved = snapshotter.saved_step == self.steps_done
        self._run._say(
            f"stopped by a signal after step {self.steps_done}"
            + (f", saved in {snapshotter.named}: the same command goes on from there" if saved else "")
        )
        if self._run._signals is not None:
            self._run._signals.leave()
        self._end("stopped", describe_stop(self._signal))
        if self.failure is not None:
            raise self.failure
        self._tell_launcher(STOPPED)
        raise SystemExit(self._run._signals.exit_code if self._run._signals is not None else 0)

    def _tell_launcher(self, what: str, text: str = "") -> None:
        """Tells our launcher what has become of the run: torch's agent knows success and failure only."""
        if self._run._error_dir is not None:
            path = Path(self._run._error_dir, what)
            with suppress(OSError):  # that disk is full: the launcher takes the usual for granted
                make_private(path.parent)
                path.write_bytes(os.fsencode(text))

    def _finish(self) -> None:
        """The loop has ended by itself."""
        if not self.place.is_past:
            if self._run._stop_reason:
                self._run._say(f"stopped at step {self.steps_done}: {self._run._stop_reason}")
            self._end("stopped" if self._run._stop_reason else "done", self._run._stop_reason)
            self._tell_launcher(FINISHED)
            self._run._stop_reason = ""  # a further loop is not stopped by it
        self.is_ended = True
        self._run._loops.end(self.place, self.steps_done)
        # What follows the loop draws the same where a later start has found nothing left to do.
        self._begin_body("after", self.steps_done)
        self._run._num_evaluations = AFTER_LOOP

    def _end(self, status: str, reason: str) -> None:
        self.is_ended = True
        self._loader.close()
        run, snapshotter = self._run, self._run._snapshotter
        run._pools.close()
        run._watchdog.enter("saving", self.steps_done)
        snapshotter.end(self.steps_done)
        # All are told: where the launcher of one node ended with START_AGAIN, srun would for all of them.
        ends = [(run.rank, self._explain_failure())]
        ends = run._group.gather(ends[0]) if self._signal else ends
        rank, failure = next((end for end in ends if end[1]), (0, ""))
        if failure:
            self.failure, status, reason = Error(failure, rank=rank), "failed", failure
        seconds = time.perf_counter() - self._began_s
        end = {"steps": self.steps_done, "measured": run._watchdog.measure(self._num_samples, seconds)}
        snapshotter.write_status(status, reason, None if failure else end)
        rows: dict[str, Any] = {"steps": self.steps_done}
        time_row = self._run._watchdog.close()
        if self.steps_done > self.began_step:
            if run._tally.num_skipped:
                rows["steps without an update"] = f"{run._tally.num_skipped} of {self.steps_done}"
            rows |= {"samples/s": f"{self._num_samples / seconds:,.0f}", "wall time": f"{seconds:.1f} s", **time_row}
        run._show_end(rows, status)
        if self.failure is None:
            let_go(run)

    def _explain_failure(self) -> str:
        """What is to be said of the run's end, on ranks that write it down; "" where it is as it should be."""
        run, snapshotter = self._run, self._run._snapshotter
        if snapshotter.unsaved is not None and snapshotter.unsaved[0] == self.steps_done:
            return f"{snapshotter.unsaved[1]}; mend that, and start the same command again"
        if not self._is_to_leave or stop_code(self._signal) != START_AGAIN or run.rank != 0 or snapshotter.path is None:
            return ""
        if (snapshotter.saved_step or 0) > run._steps_done:
            return ""
        count = count_idle_stops(snapshotter.path / RESTARTS) + 1
        if count < MOST_IDLE_STOPS:
            return ""
        cure = "give each more time (of submit: a longer --time)"
        if run._settings.snapshot_every is None:
            cure = "let it save (--snapshot-every), or give it time for all of its steps"
        return (
            f"{count} starts in a row were told to stop before they had saved more than step {run._steps_done}: "
            f"{cure}, and start the same command again"
        )

    def _agree_on_order(self, epoch: int) -> None:
        """A sampler's order must be the same on all ranks; it is kept for the audit."""
        run = self._run
        if epoch <= self._agreed_epoch:
            return
        self._agreed_epoch = epoch
        if len(set(run._group.gather(self.batches.order_fingerprint(epoch)))) > 1:
            raise Error(f"sampler({epoch}) gave other indices on other ranks: seed it from the epoch, not the rank")
        if run.dir is not None:
            directory = run.dir
            run._snapshotter.once(lambda: self._keep_order(epoch, directory))

    def _keep_order(self, epoch: int, directory: Path) -> None:
        try:
            if problem := self.batches.keep_order(epoch, directory, self.steps_done):
                self._run._say(problem)
        except OSError as error:
            self._run._say(f"the order of epoch {epoch} could not be written down ({error}): the run goes on")
