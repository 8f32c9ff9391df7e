"""`samestep verify`: runs the script several times, one run after the other, and compares the runs."""

import random
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from samestep.config import format_flags
from samestep.errors import Error
from samestep.plan.schedule import check_numbers
from samestep.tools.verify.causes import explain, explain_drift, measure_difference
from samestep.tools.verify.experiments import Experiments
from samestep.tools.verify.gradients import check_gradients, check_schedules
from samestep.tools.verify.table import Table
from samestep.tools.verify.traces import Difference, Traced, find_difference, name_tensor
from samestep.tools.verify.trials import LEAST_DEADLINE_S, Outcome, Subject, Trials
from samestep.world.workdir import WorkDir

KILLED = 128 + 9
MAX_EVENTS = 12  # file accesses during a snapshot, after one of which a rank is killed


@dataclass(frozen=True)
class Options:
    """The options of `samestep verify`.

    Attributes:
        num_steps: steps of each run.
        world_sizes: numbers of ranks. The first is the reference for all others.
        num_kills: kills of the interrupted run; 0: no run is interrupted.
        kill_seed: seed of the moments of the kills; None: random.
        gradients: whether to check the averages first.
        keep_runs: directory in which the runs are kept; None: they are removed.
    """

    num_steps: int = 20
    world_sizes: Sequence[int] = (1, 2, 3, 4)
    num_kills: int = 2
    kill_seed: int | None = None
    gradients: bool = False
    keep_runs: Path | None = None


def parse_world_sizes(text: str) -> tuple[int, ...]:
    """Parse numbers of ranks such as "1,2,3,4". Raises Error if they are not."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise Error(f"--world-sizes takes numbers of ranks such as 1,2,3,4, not {text!r}")
    return tuple(dict.fromkeys(map(int, parts)))


def run_verify(subject: Subject, options: Options) -> int:
    """Run and compare everything.

    Returns:
        The exit code: 0 if all runs are equal; 1 if not, or if no kill occurred before the end of its run.

    Raises:
        Error: the script does not train with samestep, or fails on its own.
    """
    if options.num_steps < 1 or options.num_kills < 0:
        raise Error("verify needs at least one step, and at least 0 kills")
    if (kept := options.keep_runs) is not None:
        if kept.exists() and (not kept.is_dir() or any(kept.iterdir())):
            raise Error(f"--keep-runs {kept} exists and is not empty: name a new or an empty directory")
        try:
            kept.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Error(f"--keep-runs {kept} cannot be created ({error.strerror}): name another directory") from None
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with nullcontext() if kept is not None else WorkDir("verify-") as home:
            path, locks = (kept, ()) if home is None else (home.path, (home.lock.fileno(),))
            assert path is not None
            return _Verification(subject, options, path.resolve(), locks).run()
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # runs the cleanup that ends the current run and removes its files


class _Verification:
    def __init__(self, subject: Subject, options: Options, home: Path, locks: Sequence[int]) -> None:
        self._options = options
        self._subject = subject
        every = max(1, options.num_steps // (2 * (options.num_kills + 1)))
        self._trials = Trials(subject, home, options.num_steps, every, locks)
        self._lines: list[str] = []
        self._is_same = True
        self._num_struck = 0

    def run(self) -> int:
        self._table = Table(f"samestep verify {' '.join(self._subject.words)}")
        try:
            self._compare_all()
        finally:
            self._table.close()
        for line in self._lines:
            print(line)
        num_struck, num_kills = self._num_struck, self._options.num_kills
        if not self._is_same:
            print("it is NOT the same")
            return 1
        if num_kills and not num_struck:
            print(
                "all runs are the same, but no kill occurred before the end of the run, so nothing was resumed: use "
                "more --steps or fewer --kills (0: none)"
            )
            return 1
        if num_struck < num_kills:
            print(f"{num_struck} of {num_kills} kills occurred before the end of the run: for all, use more --steps")
        print("everything is the same")
        return 0

    def _compare_all(self) -> None:
        first, *others = self._options.world_sizes
        self._reference = reference = self._run_reference(first)
        assert reference.trace is not None
        most = reference.trace.settings["num_micro_batches"]
        allowed = [size for size in (first, *others) if size <= most]
        if others and len(allowed) == 1:
            size = reference.trace.settings["micro_batch_size"]
            check_numbers(most * size, size, min(max(others), most * size), format_flags)
        if self._options.gradients:
            self._table.begin("averages", _count(max(allowed)))
            found = check_gradients(self._trials, max(allowed))
            faults = found.faults + check_schedules(reference.trace)
            result = "WRONG" if faults else "not checked" if found.failure else "same"
            self._table.add("averages", f"1 and {max(allowed)}", "", result, found.seconds)
            self._lines += [*faults, *found.notes, *([found.failure] if found.failure else [])]
            self._is_same &= result == "same"
        if not self._run_and_compare("again", first):
            return  # a difference between two equal runs would appear in all comparisons
        for size in others:
            if size not in allowed:
                why = f"skipped: a step has {most} micro-batch{'es' if most > 1 else ''} only"
                self._table.add("train", _count(size), "", why)
                continue
            self._run_and_compare("train", size)
        if self._is_same and self._options.num_kills:
            self._interrupt(allowed)

    # --- the runs ---------------------------------------------------------------------------------------------

    def _run_reference(self, size: int) -> Outcome:
        self._table.begin("train", _count(size))
        outcome = self._trials.run(size)
        if outcome.code or outcome.trace is None or not outcome.trace.steps:
            self._table.close()
            print(outcome.last_words, file=sys.stderr)
            if outcome.code:
                raise Error(
                    f"{self._subject.name} ends with exit code {outcome.code} on {_count(size)}, before anything "
                    "can be compared: see its output above"
                )
            raise Error(
                f"{self._subject.name} ended without a step of samestep.Run (on {_count(size)}): verify needs a "
                "script that trains with run.epochs or run.steps"
            )
        found = outcome.trace.settings["world_size"]
        if found != size:
            raise Error(f"{self._subject.name} starts {found} ranks itself: pass the script that each rank runs")
        if outcome.trace.settings["begin"]:
            raise Error(f"{self._subject.name} did not begin at step 0: it must leave the run's directory to samestep")
        self._trials.deadline_s = max(LEAST_DEADLINE_S, 10 * outcome.seconds)
        self._table.add("train", _count(size), str(len(outcome.trace.steps)), "the reference", outcome.seconds)
        return outcome

    def _run_and_compare(self, name: str, size: int) -> bool:
        self._table.begin(name, _count(size))
        # Equal runs must not depend on Python's hash seed either: plain python uses a new one at each start.
        outcome = self._trials.run(size, hash_seed="1" if name == "again" else "0")
        result = self._judge(outcome)
        steps = 0 if outcome.trace is None else len(outcome.trace.steps)
        self._table.add(name, _count(size), str(steps), result, outcome.seconds)
        return result == "same"

    def _interrupt(self, sizes: Sequence[int]) -> None:
        """Kill one run several times, and resume it at another number of ranks each time."""
        seed = self._options.kill_seed
        chance = random.Random(random.randrange(2**32) if seed is None else seed)
        assert self._reference.trace is not None
        num_steps, num_kills = len(self._reference.trace.steps), self._options.num_kills
        run_dir = self._trials.home / "interrupted"
        step_s = self._reference.trace.step_s
        size = 0
        for number in range(num_kills + 1):
            size = chance.choice([other for other in sizes if other != size] or list(sizes))
            if number == num_kills:
                self._table.begin("resumed", _count(size))
                outcome = self._trials.run(size, run_dir=run_dir)
                result = self._judge(outcome, is_resumed=True)
                self._table.add("resumed", _count(size), _describe_steps(outcome.trace), result, outcome.seconds)
                return
            # Each kill in a separate range of steps; the first after the first snapshot, the last before the end.
            low, high = number * num_steps // num_kills, max((number + 1) * num_steps // num_kills - 2, 0)
            low = max(low, self._trials.snapshot_every + 1)
            step = chance.randint(min(low, high), high)
            kill: dict[str, float] = {"step": step, "rank": chance.randrange(size), "after_s": chance.random() * step_s}
            if number == 0:  # while a snapshot is written
                kill = {"step": step, "rank": 0, "events": chance.randint(1, MAX_EVENTS)}
            if not self._kill(size, run_dir, kill, is_resumed=number > 0):
                return

    def _kill(self, size: int, run_dir: Path, kill: dict[str, float], *, is_resumed: bool) -> bool:
        """Run until a rank is killed. Returns whether to continue: a rank was killed, and no difference was found."""
        where = "in a save" if "events" in kill else f"rank {kill['rank']}"
        self._table.begin(f"killed {where}", _count(size))
        outcome = self._trials.run(size, run_dir=run_dir, kill=kill)
        struck = outcome.code == KILLED
        self._num_struck += struck
        result = self._judge(outcome, is_resumed=is_resumed, is_cut=struck)
        shown = result if outcome.code else f"{result} (it ended before it was killed)"
        self._table.add(f"killed {where}", _count(size), _describe_steps(outcome.trace), shown, outcome.seconds)
        return struck and result == "same"

    # --- the verdict ------------------------------------------------------------------------------------------

    def _judge(self, outcome: Outcome, *, is_resumed: bool = False, is_cut: bool = False) -> str:
        """Compare with the reference, and explain a difference. Returns the entry for the table."""
        reference, trace = self._reference, outcome.trace
        assert reference.trace is not None
        difference = None if trace is None else find_difference(reference.trace, trace)
        if trace is not None and difference is not None:
            self._is_same = False
            self._explain(outcome, trace, difference, is_resumed=is_resumed)
            return f"differs from step {difference.step}"
        if is_cut:
            return "same"
        if outcome.code:
            self._is_same = False
            self._lines += [
                f"on {_count(outcome.world_size)} it ends with exit code {outcome.code}:",
                outcome.last_words,
                *explain_drift(reference.trace, outcome.output),
            ]
            return f"exit code {outcome.code}"
        last = max(reference.trace.steps)
        if (trace is None and not is_resumed) or (trace is not None and max(trace.steps, default=last) != last):
            result = "other steps"
        elif outcome.final != reference.final:
            result = "another last snapshot"
        elif outcome.ledger != reference.ledger:
            result = "other samples in the ledger"
        else:
            return "same"
        self._is_same = False
        self._lines.append(f"on {_count(outcome.world_size)}: {result}, though the digests of all steps are the same")
        return result

    def _explain(self, outcome: Outcome, trace: Traced, difference: Difference, *, is_resumed: bool) -> None:
        reference = self._reference
        assert reference.trace is not None
        if outcome.world_size != reference.world_size:
            whose = f"on {_count(outcome.world_size)} and on {_count(reference.world_size)}"
        else:
            whose = f"in two runs on {_count(reference.world_size)}"
        self._lines.append(f"step {difference.step} is not the same {whose}" + (", resumed" if is_resumed else ""))
        if difference.tensor is not None:
            count = difference.num_tensors
            others = f"of {count} tensors that differ" if count > 1 else "the only tensor that differs"
            self._lines.append(
                f"  first: {name_tensor(difference.tensor)}, {others}: "
                + self._measure(outcome, difference.step, difference.tensor)
            )
        elif difference.what in ("value", "loss"):
            name = name_tensor(difference.name) or "the loss"
            self._lines.append(f"  first: {name}, {difference.values[0]} and {difference.values[1]}")
        experiments = Experiments(self._trials, reference.world_size, difference.step + 1)
        causes = explain(reference.trace, trace, difference, is_resumed=is_resumed, experiments=experiments)
        self._lines += [f"  likely: {cause}" for cause in causes]

    def _measure(self, outcome: Outcome, step: int, name: str) -> str:
        """Run both again up to that step, from where each began, and compare the tensors themselves."""
        places = []
        for run in (self._reference, outcome):
            again = self._trials.run(
                run.world_size, run_dir=run.begun_from, num_steps=step + 1, hash_seed=run.hash_seed, dump=step
            )
            if not (again.place / "dump.safetensors").exists():
                return f"another run on {_count(run.world_size)} did not reach that step"
            places.append(again.place)
        return measure_difference(places[0], places[1], name)


def _count(size: int) -> str:
    return f"{size} rank{'s' if size > 1 else ''}"


def _describe_steps(trace: Traced | None) -> str:
    if trace is None or not trace.steps:
        return "0"
    return f"{min(trace.steps)}-{max(trace.steps)}"
