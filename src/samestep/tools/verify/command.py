"""`samestep verify`: runs the script several times, one run after the other, and compares the runs."""

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from samestep.command_line import JSON, print_json
from samestep.config import OPTIONS, Option, format_flags, name_flag, whole
from samestep.console import print_result, show_activity
from samestep.errors import Error
from samestep.launch.flags import FLAGS as LAUNCH_FLAGS
from samestep.launch.flags import parse_sizes
from samestep.launch.launcher import check_target
from samestep.launch.script_command import ScriptCommand
from samestep.launch.target import Target
from samestep.plan.sizes import check_numbers
from samestep.tools.traced_script import exiting_on_sigterm
from samestep.tools.verify.causes import DRIFT, DRIFTED, explain
from samestep.tools.verify.plain import run_plain
from samestep.tools.verify.traces import Difference, find_difference, name_tensor
from samestep.tools.verify.trials import TrialOutcome, Trials
from samestep.units import format_ranks
from samestep.world.workdir import open_workdir

OF_RUN = ("batch_size", "micro_batch_size", "seed", "num_threads", "precision", "device", "backend")
NOT_OF_PLAIN = ("shard", "kills", "kill_seed", "heal", *OF_RUN)
FLAGS: dict[str, Option] = {
    "steps": Option(int, "N", "steps of each run; default: 20", whole(1)),
    "world_sizes": Option(str, "N,N", "numbers of ranks, each compared with the first; default: 1,2,3,4"),
    "shard": Option(str, "S,S", "values of shard to compare, on each number of ranks: none, optimizer, fsdp2"),
    "kills": Option(int, "K", "number of kills in the interrupted run; default: 2", whole(0)),
    "kill_seed": Option(int, "N", "seed for the random moments of the kills; default: random"),
    "heal": Option(bool, "", "also train on the most ranks with launch --heal, and kill all but one"),
    "plain": Option(bool, "", "for a script without samestep; --steps: 100, --world-sizes: 1,2 by default"),
    "json": JSON,
    **{name: LAUNCH_FLAGS[name] for name in OF_RUN},
}

KILLER = "samestep.tools.verify.trace:Killer"
REPEATED = (
    "  likely: the script collects or adds up values in the loop over micro-batches, apart from step.backward and "
    "step.log; after a death some of them are there twice, and those of the dead rank are missing"
)
RECIPES = "samestep.recipes."
KILLED = 128 + 9
MAX_EVENTS = 12  # file accesses during a snapshot, after one of which a rank is killed
ROW = "  {run:<18} {ranks:<20} {steps:>7}  {result:<44} {time}"
Place = tuple[int, str | None]  # a number of ranks, and the value of `shard`; None: that of the script


@click.command("verify", cls=ScriptCommand, flags=FLAGS)
def run_verify(target: Target, values: Mapping[str, Any]) -> int:
    """Trains for a few steps on several numbers of ranks, and compares the runs.

    With --shard, also compares the ways to divide the state of a run among the ranks. With --heal, also kills all ranks
    of a run but one, one after the other, while the others continue.
    In one more run, kills ranks at random moments, including during a save, and resumes on a different number of ranks
    (and with another shard) each time. Compares the state after every step, the losses and the samples. Prints the
    first difference and its likely cause. Writes nothing to the run directory named by the script.
    Exit code: 0 if all runs are the same; 1 if they differ; 2 if the script does not train.

    --plain takes a script that does not use samestep (DDP, Accelerate, Trainer, Lightning). It runs the script on 1 and
    2 ranks, each time in a copy of the working directory. It checks:
      samples     all ranks: each sample once per epoch     replicas    the same weights on all ranks
      order       a different order in each epoch           evaluation  each sample counts once
      gradient    the mean over all samples of a step
    The result of each check is ok, MISTAKE or not observed. The exit code is 1 after a mistake.
    """
    check_target(target)
    if "plain" in values:
        if wrong := [name for name in NOT_OF_PLAIN if name in values]:
            raise Error(f"{name_flag(wrong[0])} cannot be used with --plain: leave it out", code="SS104")
        return run_plain(target, values, parse_sizes("--world-sizes", values.get("world_sizes", "1,2")))
    world_sizes = parse_sizes("--world-sizes", values.get("world_sizes", "1,2,3,4"))
    modes: list[str | None] = [None]  # as the script has it
    if "shard" in values:
        modes = [OPTIONS["shard"].check("--shard", each.strip()) or "none" for each in values["shard"].split(",")]
    if world_sizes == [1] and ("heal" in values or len(modes) > 1):
        raise Error("--heal and --shard need several ranks, and --world-sizes has 1 only: add 2", code="SS104")
    num_steps = values.get("steps", 20)
    every = max(1, num_steps // (2 * (values.get("kills", 2) + 1)))
    overrides = {name: value for name, value in values.items() if name in OF_RUN}
    with exiting_on_sigterm(), open_workdir("verify-") as temporary:
        trials = Trials(target, overrides, temporary.resolve(), num_steps, every)
        return _Verification(trials, values, world_sizes, modes).run()


class _Verification:
    """Runs and compares, prints a row per run, and collects the explanations for the end."""

    def __init__(
        self, trials: Trials, values: Mapping[str, Any], world_sizes: Sequence[int], modes: Sequence[str | None]
    ) -> None:
        self._trials = trials
        self._values = values
        self._world_sizes = world_sizes
        self._modes = modes
        self._num_kills = values.get("kills", 2)
        self._chance = random.Random(values.get("kill_seed"))
        self._lines: list[str] = []
        self._rows: list[dict[str, str]] = []  # of the table
        self._is_same = True

    def run(self) -> int:
        if "json" not in self._values:
            print(f"samestep verify {' '.join(self._trials.target.to_words())}", flush=True)
            print(ROW.format(run="run", ranks="ranks", steps="steps", result="result", time="time"), flush=True)
        self._compare_all()
        sentence = "everything is the same" if self._is_same else "it is NOT the same"
        if "json" in self._values:
            facts = {"same": self._is_same, "conclusion": sentence, "findings": self._lines, "runs": self._rows}
            print_json(facts)
        else:
            print("\n".join([*self._lines, sentence]))
        return 0 if self._is_same else 1

    def _compare_all(self) -> None:
        first, *others = self._world_sizes
        place = (first, self._modes[0])
        self._reference = self._run_reference(place)
        settings = self._reference.trace.settings
        most = settings["num_micro_batches"]
        allowed = [size for size in (first, *others) if size <= most]
        if others and len(allowed) == 1:
            size = settings["micro_batch_size"]
            check_numbers(most * size, size, min(max(others), most * size), format_flags)
        # Equal runs must not depend on Python's hash seed either: plain python uses a new one at each start.
        if self._run_and_compare("again", place, hash_seed="1") != "same":
            return  # a difference between two equal runs would appear in all comparisons
        if skipped := [size for size in others if size > most]:
            which = ", ".join(map(str, skipped))
            self._lines.append(f"skipped: {which} ranks, because the number of micro-batches of a step is {most}")
        places = [(size, mode) for mode in self._modes for size in allowed if size > 1 or mode == self._modes[0]]
        for other in places[1:]:
            self._run_and_compare("train", other)
        if self._is_same and "heal" in self._values:
            self._heal(max(allowed))
        if self._is_same and self._num_kills:
            self._interrupt(places)

    # --- the runs ---------------------------------------------------------------------------------------------

    def _run_reference(self, place: Place) -> TrialOutcome:
        size, mode = place
        show_activity(f"train on {format_ranks(size)} ...")
        outcome = self._trials.run(size, shard=mode)
        name = self._trials.target.name.removeprefix(RECIPES)
        if outcome.code or not outcome.trace.steps:
            show_activity("")
            print(outcome.last_words, file=sys.stderr)
        if outcome.code:
            raise Error(
                f"{name} ends with exit code {outcome.code} on {format_ranks(size)}, before anything can be "
                "compared: see its output above",
                code="SS711",
            )
        if not outcome.trace.steps:
            raise Error(
                f"{name} ended without a step of samestep.Run (on {format_ranks(size)}): verify needs a script that "
                "trains with run.epochs or run.steps, or --plain for a script without samestep",
                code="SS712",
            )
        if (found := outcome.trace.settings["world_size"]) != size:
            raise Error(f"{name} starts {found} ranks itself: pass the script that each rank runs", code="SS712")
        self._print_row("train", outcome, "the reference")
        return outcome

    def _run_and_compare(self, name: str, place: Place, **how: Any) -> str:
        """Run, compare with the reference, and print the row. Returns the result: "same", or what differs."""
        size, mode = place
        show_activity(f"{name} on {format_ranks(size)} ...")
        outcome = self._trials.run(size, shard=mode, **how)
        result = self._judge(outcome, is_cut="kill" in how and outcome.code == KILLED)
        self._print_row(name, outcome, result)
        return result

    def _interrupt(self, places: Sequence[Place]) -> None:
        """Kill one run several times, and resume it on a different number of ranks, and in another mode, each time."""
        num_steps = len(self._reference.trace.steps)
        if num_steps < 2:
            raise Error("a run is killed in its second step or later: give more --steps, or --kills 0", code="SS104")
        run_dir = self._trials.home / "interrupted"
        place: Place = (0, None)
        for number in range(self._num_kills):
            place = self._choose_other(places, place)
            # Each kill in a separate range of steps; the first after the first snapshot, the last before the end.
            low = number * num_steps // self._num_kills
            high = max((number + 1) * num_steps // self._num_kills - 2, 0)
            step = self._chance.randint(min(max(low, self._trials.snapshot_every + 1), high), high)
            kill: dict[str, float] = {"step": step, "last": num_steps - 1, "rank": 0}
            if number == 0:
                name = "killed in a save"
                kill["events"] = self._chance.randint(1, MAX_EVENTS)
            else:
                kill["rank"] = self._chance.randrange(place[0])
                name = f"killed rank {kill['rank']}"
                kill["after_s"] = self._chance.random() * self._reference.trace.step_s
            if self._run_and_compare(name, place, run_dir=run_dir, kill=kill) != "same":
                return
        self._run_and_compare("resumed", self._choose_other(places, place), run_dir=run_dir)

    def _choose_other(self, places: Sequence[Place], place: Place) -> Place:
        """Return one with another number of ranks and another mode, if there is one."""
        both = [other for other in places if other[0] != place[0] and other[1] != place[1]]
        return self._chance.choice(both or [other for other in places if other != place] or [*places])

    def _heal(self, size: int) -> None:
        """Train with --heal while ranks die, each in a step of its own, until one is left. Compare all steps."""
        show_activity(f"healed on {format_ranks(size)} ...")
        computed = [*self._reference.trace.micro_batches.values()]
        kills = {}  # rank -> a step, and how many of its micro-batches in this step it computes
        for rank in self._chance.sample(range(size), size - 1):
            step = self._chance.randrange(len(computed))
            kills[str(rank)] = step, self._chance.randrange(max(len(computed[step]) // size, 1))
        flags = ("--heal", "--max-restarts", str(size))
        outcome = self._trials.run(size, shard=self._modes[0], interceptor=KILLER, flags=flags, kills=kills)
        result = self._judge(outcome, is_cut=False)
        if result != "same":
            self._lines.append(REPEATED)
        elif not outcome.num_lost:
            self._lines.append("with --heal, the ranks did not continue without the one that died: see docs/running.md")
        self._print_row("healed", outcome, f"{result}, {outcome.num_lost} of {size} died")

    # --- the verdict ------------------------------------------------------------------------------------------

    def _judge(self, outcome: TrialOutcome, *, is_cut: bool) -> str:
        """Compare with the reference, and explain a difference. Returns the entry for the table."""
        reference = self._reference
        if (difference := find_difference(reference.trace, outcome.trace)) is not None:
            self._explain(outcome, difference)
            result = f"differs from step {difference.step}"
        elif is_cut:
            return "same"
        elif outcome.code:
            result = f"exit code {outcome.code}"
            self._lines += [f"on {outcome.where} it ends with {result}:", outcome.last_words]
            self._lines += [f"  likely: {DRIFT}"] * any(words in outcome.output for words in DRIFTED)
        else:
            pairs = zip(reference.ledger, outcome.ledger, strict=False)
            differing = [f"step {one.step}" for one, other in pairs if one != other]
            if len(outcome.ledger) != len(reference.ledger):
                differing.append("the number of steps")
            elif outcome.final != reference.final:
                differing.append("the last snapshot")
            if not differing:
                return "same"
            result = f"{differing[0]} differs"
            self._lines.append(f"on {outcome.where}, the ledger or the last snapshot is not the same: {result}")
        self._is_same = False
        return result

    def _explain(self, outcome: TrialOutcome, difference: Difference) -> None:
        reference = self._reference
        resumed = ", resumed" if outcome.is_resumed else ""
        whose = f"in two runs on {reference.where}"
        if outcome.where != reference.where:
            whose = f"on {outcome.where} and on {reference.where}"
        self._lines.append(f"step {difference.step} is not the same {whose}{resumed}")
        if difference.tensor is not None:
            count = difference.num_tensors
            others = f"of {count} tensors that differ" if count > 1 else "the only tensor that differs"
            self._lines.append(f"  first: {name_tensor(difference.tensor)}, {others}")
        elif difference.what in ("value", "loss"):
            name = name_tensor(difference.name) or "the loss"
            self._lines.append(f"  first: {name}, {difference.values[0]} and {difference.values[1]}")
        cause = explain(reference.trace, outcome.trace, difference, is_resumed=outcome.is_resumed)
        self._lines.append(f"  likely: {cause}")

    def _print_row(self, name: str, outcome: TrialOutcome, result: str) -> None:
        numbers = [*outcome.trace.steps] or [entry.step for entry in outcome.ledger]
        row = {
            "run": name,
            "ranks": outcome.where.replace(" with shard=", ", "),
            "steps": f"{min(numbers)}-{max(numbers)}" if numbers else "none",
            "result": result,
            "time": f"{outcome.seconds:.1f} s",
        }
        self._rows.append(row)
        if "json" not in self._values:
            colour = "green" if result.startswith("same") else "yellow" if result == "the reference" else "red"
            print_result(ROW.format(**row), result, colour)
