"""`samestep verify`: runs the script several times, one run after the other, and compares the runs."""

import random
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from samestep.cli import JSON, print_json
from samestep.config import OPTIONS, Option, format_flags, name_flag, whole
from samestep.console import print_result, show_activity
from samestep.errors import Error
from samestep.launch.target import FLAGS as LAUNCH_FLAGS
from samestep.launch.target import ScriptCommand, Target, check_target, parse_sizes
from samestep.plan.tree import check_numbers
from samestep.tools.traced_script import OF_RUN, open_workdir
from samestep.tools.verify.plain import run_plain
from samestep.tools.verify.runs import DRIFT, DRIFTED, Difference, Setup, Trial, explain, find_difference, run_trial

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

KILLER = "samestep.tools.interceptors:Killer"
REPEATED = (
    "  likely: the script collects or adds up values in the loop over micro-batches, apart from step.backward and "
    "step.log; after a death some of them are there twice, and those of the dead rank are missing"
)
KILLED = 128 + 9
MAX_EVENTS = 12  # file accesses during a snapshot, after one of which a rank is killed
ROW = "  {run:<18} {ranks:<20} {steps:>7}  {result:<44} {time}"


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
        return run_plain(target, values, parse_sizes(values.get("world_sizes", "1,2")))
    world_sizes = parse_sizes(values.get("world_sizes", "1,2,3,4"))
    modes: list[str | None] = [None]  # as the script has it
    if "shard" in values:
        modes = [OPTIONS["shard"].check("--shard", each.strip()) or "none" for each in values["shard"].split(",")]
    if world_sizes == [1] and ("heal" in values or len(modes) > 1):
        raise Error("--heal and --shard need several ranks, and --world-sizes has 1 only: add 2", code="SS104")
    with open_workdir("verify") as home:
        verification = _Verification(target, values, home.resolve())
        if "json" not in values:
            print(f"samestep verify {' '.join(target.to_words())}", flush=True)
            print(ROW.format(run="run", ranks="ranks", steps="steps", result="result", time="time"), flush=True)
        verification.compare_all(world_sizes, modes)
    sentence = "everything is the same" if verification.is_same else "it is NOT the same"
    if "json" in values:
        print_json(
            {
                "same": verification.is_same,
                "conclusion": sentence,
                "findings": verification.lines,
                "runs": verification.rows,
            }
        )
    else:
        print("\n".join([*verification.lines, sentence]))
    return 0 if verification.is_same else 1


class _Verification:
    """Runs and compares, and prints a row per run.

    Attributes:
        lines: the explanations, for the end.
        rows: of the table.
    """

    def __init__(self, target: Target, values: Mapping[str, Any], home: Path) -> None:
        self.is_same = True
        self.lines: list[str] = []
        self.rows: list[dict[str, str]] = []
        self._values = values
        self._num_kills = values.get("kills", 2)
        num_steps = values.get("steps", 20)
        self._snapshot_every = max(1, num_steps // (2 * (self._num_kills + 1)))
        self._overrides = {
            **{name: value for name, value in values.items() if name in OF_RUN},
            "max_steps": num_steps,
            "snapshot_every": self._snapshot_every,
        }
        self._target = target
        self._home = home
        self._chance = random.Random(values.get("kill_seed"))

    def compare_all(self, world_sizes: Sequence[int], modes: Sequence[str | None]) -> None:
        """Train on all numbers of ranks and in all modes. If all is the same, also with deaths and interruptions."""
        setup = Setup(world_sizes[0], modes[0])
        self._reference = self._run_reference(setup)
        most = self._reference.settings["num_micro_batches"]
        allowed = [size for size in world_sizes if size <= most]
        if len(world_sizes) > 1 and len(allowed) == 1:
            size = self._reference.settings["micro_batch_size"]
            check_numbers(most * size, size, min(max(world_sizes), most * size), format_flags)
        # Equal runs must not depend on Python's hash seed either: plain python uses a new one at each start.
        if not self._run_and_compare("again", setup, hash_seed="1"):
            return  # a difference between two equal runs would appear in all comparisons
        if skipped := ", ".join(str(size) for size in world_sizes if size > most):
            self.lines.append(f"skipped: {skipped} ranks, because the number of micro-batches of a step is {most}")
        setups = [Setup(size, mode) for mode in modes for size in allowed if size > 1 or mode == modes[0]]
        for other in setups[1:]:
            self._run_and_compare("train", other)
        if self.is_same and "heal" in self._values:
            self._heal(Setup(max(allowed), modes[0]))
        if self.is_same and self._num_kills:
            self._interrupt(setups)

    # --- the runs ---------------------------------------------------------------------------------------------

    def _run(self, name: str, setup: Setup, **how: Any) -> Trial:
        show_activity(f"{name} on {setup} ...")
        directory = self._home / f"{len(self.rows):02}-on-{setup.world_size}"
        return run_trial(self._target, setup, self._overrides, directory, **how)

    def _run_reference(self, setup: Setup) -> Trial:
        trial = self._run("train", setup)
        name = self._target.said
        if trial.code or not trial.steps:
            show_activity("")
            print(trial.last_words, file=sys.stderr)
        if trial.code:
            raise Error(
                f"{name} ends with exit code {trial.code} on {setup}, before anything can be compared: see its output "
                "above",
                code="SS711",
            )
        if not trial.steps:
            raise Error(
                f"{name} ended without a step of samestep.Run (on {setup}): verify needs a script that trains with "
                "run.epochs or run.steps, or --plain for a script without samestep",
                code="SS712",
            )
        if (found := trial.settings["world_size"]) != setup.world_size:
            raise Error(f"{name} starts {found} ranks itself: pass the script that each rank runs", code="SS712")
        self._print_row("train", trial, "the reference")
        return trial

    def _run_and_compare(self, name: str, setup: Setup, **how: Any) -> bool:
        """Run, compare with the reference, and print the row. Returns whether it is the same."""
        trial = self._run(name, setup, **how)
        result = self._judge(trial, is_cut="kill" in how and trial.code == KILLED)
        self._print_row(name, trial, result)
        return result == "same"

    def _interrupt(self, setups: Sequence[Setup]) -> None:
        """Kill one run several times, and resume it on a different number of ranks, and in another mode, each time."""
        num_steps = len(self._reference.steps)
        if num_steps < 2:
            raise Error("a run is killed in its second step or later: give more --steps, or --kills 0", code="SS104")
        run_dir = self._home / "interrupted"
        setup = Setup(0, None)
        for number in range(self._num_kills):
            setup = self._choose_other(setups, setup)
            # Each kill in a separate range of steps; the first after the first snapshot, the last before the end.
            low = number * num_steps // self._num_kills
            high = max((number + 1) * num_steps // self._num_kills - 2, 0)
            step = self._chance.randint(min(max(low, self._snapshot_every + 1), high), high)
            rank = self._chance.randrange(setup.world_size) if number else 0
            kill: dict[str, float] = {"step": step, "last": num_steps - 1, "rank": rank}
            if number == 0:
                name = "killed in a save"
                kill["events"] = self._chance.randint(1, MAX_EVENTS)
            else:
                name = f"killed rank {rank}"
                kill["after_s"] = self._chance.random() * self._reference.step_s
            if not self._run_and_compare(name, setup, run_dir=run_dir, kill=kill):
                return
        self._run_and_compare("resumed", self._choose_other(setups, setup), run_dir=run_dir)

    def _choose_other(self, setups: Sequence[Setup], setup: Setup) -> Setup:
        """Return one with another number of ranks and another mode, if there is one."""
        both = [each for each in setups if each.world_size != setup.world_size and each.shard != setup.shard]
        return self._chance.choice(both or [each for each in setups if each != setup] or [*setups])

    def _heal(self, setup: Setup) -> None:
        """Train with --heal while ranks die, each in a step of its own, until one is left. Compare all steps."""
        size = setup.world_size
        computed = self._reference.count_micro_batches()
        kills = {}  # rank -> a step, and how many of its micro-batches in this step it computes
        for rank in self._chance.sample(range(size), size - 1):
            step = self._chance.randrange(len(computed))
            kills[str(rank)] = step, self._chance.randrange(max(computed[step] // size, 1))
        flags = ("--heal", "--max-restarts", str(size))
        trial = self._run("healed", setup, interceptor=KILLER, flags=flags, kills=kills)
        result = self._judge(trial)
        if result != "same":
            self.lines.append(REPEATED)
        elif not trial.num_lost:
            self.lines.append("with --heal, the ranks did not continue without the one that died: see docs/running.md")
        self._print_row("healed", trial, f"{result}, {trial.num_lost} of {size} died")

    # --- the verdict ------------------------------------------------------------------------------------------

    def _judge(self, trial: Trial, *, is_cut: bool = False) -> str:
        """Compare with the reference, and explain a difference. Returns the entry for the table."""
        reference = self._reference
        if (difference := find_difference(reference, trial)) is not None:
            self._explain(trial, difference)
            result = f"differs from step {difference.step}"
        elif is_cut:
            return "same"
        elif trial.code:
            result = f"exit code {trial.code}"
            self.lines += [f"on {trial.setup} it ends with {result}:", trial.last_words]
            if any(words in trial.output for words in DRIFTED):
                self.lines.append(f"  likely: {DRIFT}")
        elif (trial.ledger, trial.final) == (reference.ledger, reference.final):
            return "same"
        else:
            pairs = zip_longest(reference.ledger, trial.ledger)
            differing = (f"step {step}" for step, (one, other) in enumerate(pairs) if one != other)
            result = f"{next(differing, 'the last snapshot')} differs"
            self.lines.append(f"on {trial.setup}, the ledger or the last snapshot is not the same: {result}")
        self.is_same = False
        return result

    def _explain(self, trial: Trial, difference: Difference) -> None:
        reference = self._reference
        resumed = ", resumed" if trial.settings["begin"] else ""
        whose = f"on {trial.setup} and on {reference.setup}"
        if str(trial.setup) == str(reference.setup):
            whose = f"in two runs on {reference.setup}"
        self.lines.append(f"step {difference.step} is not the same {whose}{resumed}")
        if tensors := difference.tensors:
            others = f"of {len(tensors)} tensors that differ" if len(tensors) > 1 else "the only tensor that differs"
            self.lines.append(f"  first: {tensors[0]}, {others}")
        elif difference.what in ("value", "loss"):
            one, other = difference.values
            self.lines.append(f"  first: {difference.name or 'the loss'}, {one} and {other}")
        self.lines.append(f"  likely: {explain(reference, trial, difference)}")

    def _print_row(self, name: str, trial: Trial, result: str) -> None:
        numbers = [*trial.steps] or [entry.step for entry in trial.ledger]
        row = {
            "run": name,
            "ranks": str(trial.setup).replace(" with shard=", ", "),
            "steps": f"{min(numbers)}-{max(numbers)}" if numbers else "none",
            "result": result,
            "time": f"{trial.seconds:.1f} s",
        }
        self.rows.append(row)
        if "json" not in self._values:
            colour = "green" if result.startswith("same") else "yellow" if result == "the reference" else "red"
            print_result(ROW.format(**row), result, colour)
