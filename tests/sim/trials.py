"""Runs scenarios, and compares each with the run of its script on one rank, without faults."""

import gc
import json
import os
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from signal import SIGKILL
from typing import Any

import torch

from samestep.snapshot.store import Store
from sim.instances import Pool
from sim.machine import Launch, Machine
from sim.scenarios import Round, Scenario
from sim.scheduler import Exited, Killed, Scheduler

SCRIPTS = Path(__file__).parent / "scripts"
MEASURED = re.compile(r"(time|wall|samples/s|seconds|_s)$")  # of metrics: what differs from run to run
DAMAGE = ("cannot be used", "is shorter than", "was changed during")
MISTAKE = 2  # exit code
TWINS = "had 2 copies"  # of the state, which are lost with two ranks
LEFT_OVER = "its pipeline has lost a rank"
STAGES = "held some of the stages"  # all ranks, as many as there are pipelines, have died
# Why ranks do not continue after a death (docs/dev/healing.md).
LIMITS = (
    "not all had begun a loop", "one had already ended its script", "has a further pass", "died in a further pass",
    "died before it sent the values", "is lost with the rank that was writing it", TWINS, STAGES,
)  # fmt: skip
REASON = re.compile(r"do not continue, because (.*?)(: |$)")
RANKS_PER_PIPELINE = 2  # in staged.py, if it has several ranks
MAX_APART = 2  # steps, of the deaths of two ranks that held a part: later, a third one has it
MAX_AFTER_SIGTERM = 2  # steps: the one whose exchange carries the vote may be the next one
STOPPED = (0, 75, 128 + 15)
# For tensors of every size, what is usual for large ones.
CONSTANTS = {
    ("routes", "gather"): {"engine.routes.GATHER_MAX_BYTES": 4 << 20, "engine.routes.NEIGHBORS_MAX_BYTES": 1 << 20},
    ("routes", "chunks"): {"engine.routes.GATHER_MAX_BYTES": 64, "engine.routes.NEIGHBORS_MAX_BYTES": 0},
    ("copies", "at_once"): {"snapshot.async_copy.LARGE_BYTES": 1 << 18},
    ("copies", "background"): {"snapshot.async_copy.LARGE_BYTES": 16},
}
# With steps of a minute: nearly all points would be looks and heartbeats of threads that find nothing.
RARE_LOOKS = {
    "snapshot.snapshotter._POLL_S": 15.0,
    "launch.launcher.POLL_S": 15.0,
    "world.membership.NOTICE_S": 5.0,
    "watch.diagnosis.INTERVAL_S": 25.0,
    "watch.diagnosis.FLOOR_S": 100.0,
}
STUCK_AFTER_S = "600"


class Violation(Exception):
    """A promise that was broken."""


@dataclass(frozen=True)
class Outcome:
    """What a run leaves. Equal for runs that are the same."""

    digest: str
    ledger: bytes
    metrics: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, run_dir: Path) -> "Outcome":
        """Read the outcome of a run directory. Raises Violation."""
        store = Store(run_dir)
        # If all were killed between two of the last step, the newest is a named one.
        snapshots = [each for each in store.snapshots() if each.problem is None]
        if not snapshots:
            raise Violation("the run has left no snapshot")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        rows = [{key: value for key, value in json.loads(line).items() if not MEASURED.search(key)} for line in lines]
        return cls(store.read_digest(snapshots[-1]), (run_dir / "ledger.bin").read_bytes(), rows)

    def compare(self, expected: "Outcome") -> None:
        """Raise Violation if it is not the expected one."""
        if self.digest != expected.digest:
            raise Violation(f"the digest is {self.digest[:12]}, not {expected.digest[:12]}")
        if self.ledger != expected.ledger:
            raise Violation(f"the ledger differs: {len(self.ledger)} bytes, not {len(expected.ledger)}")
        for own, theirs in zip_longest(self.metrics, expected.metrics):
            if own != theirs:
                raise Violation(f"the metrics have the row {own}, not {theirs}")


class Progress:
    """Checks that a start resumes from the newest snapshot that must be on the disk. `every`: `--snapshot-every`."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._least = 0  # the step from which the run resumes, at least
        self._is_known = True

    def check(self, launch: Launch) -> None:
        """Check all starts of a launch. Raises Violation."""
        kinds = {fault.kind for fault in launch.struck}
        if launch.flipped or "full" in kinds or (launch.round.heals and "kill" in kinds):  # snapshots are omitted
            self._is_known = False
        firsts = [i for i, process in enumerate(launch.processes) if process.rank == 0]
        for begin, end in zip(firsts, [*firsts[1:], None], strict=True):
            steps = [found for process in launch.processes[begin:end] if (found := _find_steps(process.output))]
            if not steps:
                continue
            first = min(each[0] for each in steps)
            if self._is_known and first < self._least:
                raise Violation(f"the run resumes from step {first}, and had saved step {self._least}")
            # When a snapshot is due, the one before it is complete.
            done = min(each[-1] for each in steps)
            self._least = max(self._least, (done // self._every - 1) * self._every)
            if kinds == {"stop"} and launch.launcher.code == STOPPED[1]:
                self._least = max(self._least, done)


def _find_steps(lines: Sequence[str]) -> list[int]:
    """Return the numbers of the steps that a rank has begun, from what it has printed."""
    return [int(line.split()[1]) for line in lines if re.fullmatch(r"step \d+", line)]


class Laboratory:
    """Runs scenarios, one after the other. One for each process, since it changes the process.

    Attributes:
        num_deaths: ranks that were killed in launches with --heal.
        endings: "healed", or why ranks have not continued -> number of these launches.
        history: what has happened in the last scenario, for a person.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        os.chdir(SCRIPTS)  # where samestep looks for the modules of a script
        gc.disable()  # a cycle is freed at the end of its process, and not at any time
        sys.unraisablehook = _hide_ends(sys.unraisablehook)
        self._pool = Pool()
        self.num_deaths = 0
        self.endings = Counter[str]()
        self.history: list[str] = []
        self._expected: dict[tuple[str, int], Outcome] = {}
        # Imports all that is needed, and sets all constants.
        self.run(Scenario(0, shard="optimizer", owners=2, pace=60, rounds=(Round(5, heals=True),)), self._pool)

    def check(self, scenario: Scenario, planted: Pool | None = None) -> None:
        """Run a scenario. Raises Violation, Hang, or an error of the simulation, if it is not the run on one rank.

        Args:
            planted: copies of samestep that have a fault.
        """
        key = scenario.script, scenario.steps
        if key not in self._expected:
            self._expected[key] = self.run(Scenario(0, script=scenario.script, steps=scenario.steps), self._pool)
        self.run(scenario, planted or self._pool).compare(self._expected[key])

    def run(self, scenario: Scenario, pool: Pool) -> Outcome:
        """Run a scenario to its end."""
        choose = random.Random(f"machine {scenario.seed}")
        switch = choose.choice((0.05, 0.2, 0.6))
        scheduler = Scheduler(f"{scenario.seed}", switch=switch, tick_s=10 ** choose.uniform(-5, -2))
        self.history = scheduler.history
        options = {
            "snapshot-every": str(scenario.every),
            "max-steps": str(scenario.steps),
            **({"shard": scenario.shard, "shard-copies": str(scenario.owners)} if scenario.shard != "none" else {}),
        }
        script = SCRIPTS / f"{scenario.script}.py"
        constants = {**CONSTANTS["routes", scenario.routes], **CONSTANTS["copies", scenario.copies]}
        if scenario.pace >= 60:
            constants |= RARE_LOOKS
            options["stuck-after-s"] = STUCK_AFTER_S
        slow = choose.choice((0, 0, 0.02))
        machine = Machine(scheduler, pool, script, options, constants, scenario.pace, slow)
        progress = Progress(scenario.every)
        is_damaged = False
        try:
            for each in scenario.rounds:
                launch = machine.run(each)
                deaths = [fault for fault in launch.struck if fault.kind == "kill"]
                if each.heals and deaths:
                    self.num_deaths += len(deaths)
                    self.endings[_explain_end(launch)] += 1
                _check_ends(launch, is_damaged=is_damaged)
                progress.check(launch)
                is_damaged |= bool(launch.flipped)
                if not is_damaged:
                    _check_snapshots(machine.disk.run_dir)
            return Outcome.read(machine.disk.run_dir)
        finally:
            machine.close()


def _hide_ends(before: Any) -> Any:
    """Return a hook that hides what the finalizers of killed processes raise."""

    def report(found: Any) -> None:
        if not isinstance(found.exc_value, Killed | Exited):
            before(found)

    return report


def _check_ends(launch: Launch, *, is_damaged: bool) -> None:
    """Check the exit codes of a launch, and what its processes have printed. `is_damaged`: whether a snapshot is."""
    kinds = {fault.kind for fault in launch.struck}
    lines = [line for process in [launch.launcher, *launch.processes] for line in process.output]
    last = " / ".join(lines[-5:])
    code = launch.launcher.code
    if code != 0 and (not kinds or (kinds <= {"freeze"})):
        raise Violation(f"the launch ended with {code}: {last}")
    if code == MISTAKE and not (is_damaged or kinds & {"full", "flip"}):
        raise Violation(f"the launch ended as after a mistake in the script: {last}")
    if kinds <= {"stop", "freeze"} and code not in STOPPED:
        raise Violation(f"after SIGTERM the launch ended with {code}: {last}")
    is_too_short = any("IndexError" in line for line in lines)  # in passes.py: a list by position
    num_gone = len(launch.struck) + sum(LEFT_OVER in line for line in launch.launcher.output)
    is_refused = kinds == {"kill"} and launch.round.heals and code and num_gone < launch.round.num_ranks
    if is_refused and not any(map(REASON.search, lines)):
        raise Violation(f"no sentence says why the other ranks do not continue: {last}")
    killed = sorted(max(_find_steps(each.output), default=-1) for each in launch.processes if each.code == -SIGKILL)
    are_close = any(later - earlier <= MAX_APART for earlier, later in pairwise(killed))
    has_ended = any(each.code == 0 for each in launch.processes)  # the script, and taken its copy along
    for line in lines:
        if TWINS in line and not (are_close or has_ended):
            raise Violation(line)
        if STAGES in line and len(killed) < launch.round.num_ranks // RANKS_PER_PIPELINE:
            raise Violation(line)
    if kinds == {"kill"} and not is_too_short:
        for line in lines:
            if REASON.search(line) and not any(limit in line for limit in LIMITS):
                raise Violation(line)
    for process in launch.processes:
        if process.num_lines_before is not None:
            steps = _find_steps(process.output[process.num_lines_before :])
            if len(steps) > MAX_AFTER_SIGTERM:
                raise Violation(f"after SIGTERM {process.name} has begun the steps {steps}")
    for line in lines:
        if not is_damaged and any(words in line for words in DAMAGE):
            raise Violation(line)


def _explain_end(launch: Launch) -> str:
    """Return why ranks have not continued after a death, without numbers; "healed" if they have."""
    for line in launch.launcher.output:
        if found := REASON.search(line):
            return re.sub(r"\d+", "N", found[1])
    return "healed" if launch.launcher.code == 0 else f"exit code {launch.launcher.code}"


def _check_snapshots(run_dir: Path) -> None:
    """Check that every snapshot that can be seen is undamaged."""
    store = Store(run_dir)
    for snapshot in store.snapshots():
        problems: list[str] = []
        store.find(snapshot.name or snapshot.step, warn=problems.append)
        if problems or snapshot.problem:
            raise Violation(f"the snapshot {snapshot.label} is damaged: {problems or snapshot.problem}")
