"""`samestep verify`: runs the script several times, one run after the other, and compares the runs."""

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import click

from samestep.config import Option, Shard, format_flags, name_flag
from samestep.console import print_result, show_activity
from samestep.errors import Error
from samestep.launch.flags import FLAGS as LAUNCH_FLAGS
from samestep.launch.flags import parse_sizes
from samestep.launch.launcher import check_target
from samestep.launch.script_command import ScriptCommand
from samestep.launch.target import Target
from samestep.plan.schedule import check_numbers
from samestep.tools.traced_script import exiting_on_sigterm
from samestep.tools.verify.causes import DRIFT, DRIFTED, explain
from samestep.tools.verify.gradients import check_gradients, check_schedules
from samestep.tools.verify.plain import PlainOptions, run_plain
from samestep.tools.verify.traces import Difference, find_difference, name_tensor
from samestep.tools.verify.trials import LEAST_DEADLINE_S, TrialOutcome, Trials, is_mode, make_empty
from samestep.units import format_count, format_ranks
from samestep.world.workdir import WorkDir

OF_RUN = ("batch_size", "micro_batch_size", "seed", "num_threads", "precision", "reduction", "device", "backend")
FLAGS: dict[str, Option] = {
    "steps": Option(int, "N", "steps of each run; default: 20"),
    "world_sizes": Option(str, "N,N", "numbers of ranks, each compared with the first; default: 1,2,3,4"),
    "shard": Option(str, "S,S", "values of shard to compare, on each number of ranks: none, optimizer, fsdp2"),
    "kills": Option(int, "K", "number of kills in the interrupted run; default: 2"),
    "kill_seed": Option(int, "N", "seed for the random moments of the kills; default: random"),
    "heal": Option(bool, "", "also train on the most ranks with launch --heal, and kill all but one"),
    "gradients": Option(bool, "", "first compare losses and scores with a computation in float64, sample by sample"),
    "keep_runs": Option(str, "DIR", "keep the run directories and traces in this directory"),
    "plain": Option(bool, "", "for a script without samestep; --steps: 100, --world-sizes: 1,2 by default"),
    "resume_after": Option(int, "K", "plain: kill after a save and at least K steps; default: 1; 0: no kill"),
    "resume_args": Option(str, "ARGS", "plain: arguments that the script needs to resume"),
    "launcher": Option(str, "CMD", "plain: launcher of the script, such as 'torchrun --nproc-per-node {n}'"),
    "link": Option(str, "A,B", "plain: large files and directories to link, not copy; the script must only read them"),
    "json": Option(bool, "", "print one JSON object"),
    **{name: LAUNCH_FLAGS[name] for name in OF_RUN},
}

KILLER = "samestep.tools.verify.killer:Killer"
REPEATED = (
    "  likely: the script collects or adds up values in the loop over micro-batches, apart from step.backward and "
    "step.log; after a death some of them are there twice, and those of the dead rank are missing"
)
RECIPES = "samestep.recipes."
KILLED = 128 + 9
MAX_EVENTS = 12  # file accesses during a snapshot, after one of which a rank is killed
ROW = "  {:<24} {:<10} {:>7}  {:<44} {}"
ROW_OF_MODES = ROW.replace("{:<10}", "{:<20}")
COLOURS = {"same": "green", "skipped": "yellow", "the reference": "yellow", "refused": "yellow"}
Place = tuple[int, str | None]  # a number of ranks, and the value of `shard`; None: that of the script


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `samestep verify`, as in FLAGS. The first of `world_sizes` is the reference for the others."""

    steps: int = 20
    world_sizes: str = "1,2,3,4"
    shard: str | None = None
    kills: int = 2
    kill_seed: int | None = None
    heal: bool = False
    gradients: bool = False
    json: bool = False
    keep_runs: str | None = None


@click.command("verify", cls=ScriptCommand, flags=FLAGS)
def run_verify(target: Target, values: Mapping[str, Any]) -> int:
    """Trains for a few steps on several numbers of ranks, and compares the runs.

    With --shard, also compares the ways to divide the state of a run among the ranks. With --heal, also kills all ranks
    of a run but one, one after the other, while the others continue.
    In one more run, kills ranks at random moments, including during a save, and resumes on a different number of ranks
    (and with another shard) each time. Compares the state after every step, the losses and the samples. Prints the
    first difference and its likely cause. Writes nothing to the run directory named by the script.
    Exit code: 0 if all runs are the same; 1 if they differ or if no kill happened; 2 if the script does not train.

    --plain takes a script that does not use samestep (DDP, Accelerate, Trainer, Lightning). It runs the script on 1 and
    2 ranks, and a third time with a kill and a restart, each time in a copy of the working directory. It checks:
      samples     all ranks: each sample once per epoch     replicas    the same weights on all ranks
      order       a different order in each epoch           evaluation  each sample counts once
      gradient    the mean over all samples of a step       resume      continues with the samples after the save
      state       weights, optimizer and learning rate are restored
    The result of each check is ok, MISTAKE or not observed. The exit code is 1 after a mistake.
    """
    check_target(target)
    own = dict(values)
    is_plain = own.pop("plain", False)
    of_plain = {field.name for field in fields(PlainOptions)}
    shared = of_plain & {field.name for field in fields(VerifyOptions)}
    wrong = [name for name in own if (name not in of_plain if is_plain else name in of_plain - shared)]
    if wrong:
        raise Error(
            f"{name_flag(wrong[0])} {'cannot be used with' if is_plain else 'needs'} --plain: leave it out",
            code="SS104",
        )
    if is_plain:
        options = PlainOptions(**own)
        return 0 if run_plain(target, options, parse_sizes("--world-sizes", options.world_sizes)) else 1
    return _run_exact(target, own)


def _run_exact(target: Target, values: Mapping[str, Any]) -> int:
    """Verify a script that uses samestep. Also returns 1 if no kill occurred before the end of its run."""
    options = VerifyOptions(**{name: value for name, value in values.items() if name not in OF_RUN})
    overrides = {name: value for name, value in values.items() if name in OF_RUN}
    world_sizes = parse_sizes("--world-sizes", options.world_sizes)
    modes = [None] if options.shard is None else _parse_modes(options.shard)
    if world_sizes == [1] and (options.heal or len(modes) > 1):
        raise Error("--heal and --shard need several ranks, and --world-sizes has 1 only: add 2", code="SS104")
    if options.steps < 1 or options.kills < 0:
        raise Error("verify needs at least one step, and at least 0 kills", code="SS101")
    kept = None if options.keep_runs is None else make_empty(Path(options.keep_runs))
    with exiting_on_sigterm(), WorkDir("verify-") as temporary:
        every = max(1, options.steps // (2 * (options.kills + 1)))
        home = (kept or temporary.path).resolve()
        trials = Trials(target, overrides, home, options.steps, every, (temporary.lock.fileno(),))
        return _Verification(trials, options, world_sizes, modes).run()


def _parse_modes(text: str) -> list[str | None]:
    known = ("none", *get_args(Shard))
    modes = [part.strip() for part in text.split(",")]
    if wrong := [mode for mode in modes if mode not in known]:
        raise Error(
            f"--shard takes some of {', '.join(known)}, with commas between them, not {wrong[0]!r}", code="SS101"
        )
    return [*dict.fromkeys(modes)]


class _Verification:
    """Runs and compares, prints a row per run, and collects the explanations for the end."""

    def __init__(
        self, trials: Trials, options: VerifyOptions, world_sizes: Sequence[int], modes: Sequence[str | None]
    ) -> None:
        self._trials = trials
        self._options = options
        self._world_sizes = world_sizes
        self._modes = modes
        self._row = ROW if modes == [None] else ROW_OF_MODES
        self._refused: set[str | None] = set()  # values of shard
        self._lines: list[str] = []
        self._rows: list[dict[str, str]] = []  # of the table
        self._is_same = True
        self._num_kills = 0  # that occurred
        self._free: set[str] = set()  # logged values that differ in two runs on the same number of ranks

    def run(self) -> int:
        is_json = self._options.json
        if not is_json:
            print(f"samestep verify {' '.join(self._trials.target.to_words())}", flush=True)
            print(self._row.format("run", "ranks", "steps", "result", "time"), flush=True)
        self._compare_all()
        is_passed, sentence = self._conclude()
        if is_json:
            facts = {"same": is_passed, "conclusion": sentence, "findings": self._lines, "runs": self._rows}
            print(json.dumps(facts, indent=2))
        else:
            print("\n".join([*self._lines, sentence]))
        return 0 if is_passed else 1

    def _conclude(self) -> tuple[bool, str]:
        """Return whether the runs passed, and the last sentence."""
        wanted = self._options.kills
        if not self._is_same:
            return False, "it is NOT the same"
        if wanted and not self._num_kills:
            return False, (
                "all runs are the same, but no kill occurred before the end of the run, so nothing was resumed: use "
                "more --steps or fewer --kills (0: none)"
            )
        if self._num_kills < wanted:
            self._lines.append(
                f"{self._num_kills} of {wanted} kills occurred before the end of the run: for all, use more --steps"
            )
        return True, "all other runs are the same" if self._refused else "everything is the same"

    def _compare_all(self) -> None:
        first, *others = self._world_sizes
        place = (first, self._modes[0])
        self._reference = self._run_reference(place)
        trace = self._reference.trace
        most = trace.settings["num_micro_batches"]
        allowed = [size for size in (first, *others) if size <= most]
        if others and len(allowed) == 1:
            size = trace.settings["micro_batch_size"]
            check_numbers(most * size, size, min(max(others), most * size), format_flags)
        if self._options.gradients:
            self._check_averages()
        # Equal runs must not depend on Python's hash seed either: plain python uses a new one at each start.
        if self._run_and_compare("again", place, hash_seed="1") != "same":
            return  # a difference between two equal runs would appear in all comparisons
        for size in others:
            if size not in allowed:
                why = f"skipped: a step has {most} micro-batch{'es' if most > 1 else ''} only"
                self._print_row("train", format_ranks(size), "", why)
        places = [(size, mode) for mode in self._modes for size in allowed if size > 1 or mode == self._modes[0]]
        for other in places[1:]:
            if other[1] not in self._refused:
                self._run_and_compare("train", other)
        if self._is_same and self._options.heal:
            self._heal(max(allowed))
        if self._is_same and self._options.kills:
            self._interrupt([each for each in places if each[1] not in self._refused])

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
            raise Error(
                f"{name} ended without a step of samestep.Run (on {format_ranks(size)}): verify needs a script that "
                "trains with run.epochs or run.steps, or --plain for a script without samestep",
                code="SS712",
            )
        if (found := outcome.trace.settings["world_size"]) != size:
            raise Error(f"{name} starts {found} ranks itself: pass the script that each rank runs", code="SS712")
        if outcome.trace.settings["begin"]:
            raise Error(f"{name} did not begin at step 0: it must leave the run's directory to samestep", code="SS712")
        self._trials.deadline_s = max(LEAST_DEADLINE_S, 10 * outcome.seconds)
        self._print_run("train", outcome, "the reference")
        return outcome

    def _run_and_compare(self, name: str, place: Place, **how: Any) -> str:
        """Run, compare with the reference, and print the row. Returns the result: "same", or what differs."""
        size, mode = place
        show_activity(f"{name} on {format_ranks(size)} ...")
        outcome = self._trials.run(size, shard=mode, **how)
        is_killed = "kill" in how and outcome.code == KILLED
        self._num_kills += is_killed
        result = self._judge(outcome, is_cut=is_killed)
        if "kill" in how and not outcome.code:
            result += " (it ended before it was killed)"
        self._print_run(name, outcome, result)
        if result == "same" and not outcome.is_resumed:
            self._compare_logged(outcome)
        return result

    def _compare_logged(self, outcome: TrialOutcome) -> None:
        """Name the logged values that depend on the number of ranks, such as a mean over one rank's micro-batches.

        Values that differ in two runs on the same number of ranks, such as times, depend on something else.
        """
        one = self._reference.logged
        other = outcome.logged
        keys = [key for key in one if key in other and one[key] != other[key] and key[1] not in self._free]
        if outcome.where == self._reference.where:
            self._free |= {name for _, name in keys}
            return
        for step, name in {name: (step, name) for step, name in reversed(keys)}.values():
            self._free.add(name)
            self._lines.append(
                f"{name}, logged after {format_count(step, 'step')}, is {one[step, name]} on "
                f"{self._reference.where} and {other[step, name]} on {outcome.where}: training does not depend on it; "
                "a mean over micro-batches belongs in step.log, which averages over the batch"
            )

    def _check_averages(self) -> None:
        show_activity("averages ...")
        found = check_gradients(self._trials)
        faults = found.faults + check_schedules(self._reference.trace)
        result = "not checked" if found.failure else "same"
        if faults:
            result = "WRONG"
        self._print_row("averages", format_ranks(1), "", result, f"{found.seconds:.1f} s")
        self._lines += [*faults, *found.notes, *([found.failure] if found.failure else [])]
        self._is_same &= result == "same"

    def _interrupt(self, places: Sequence[Place]) -> None:
        """Kill one run several times, and resume it on a different number of ranks, and in another mode, each time."""
        chance = random.Random(self._options.kill_seed)
        num_steps = len(self._reference.trace.steps)
        num_kills = self._options.kills
        run_dir = self._trials.home / "interrupted"
        place: Place = (0, None)
        for number in range(num_kills):
            place = _choose_other(chance, places, place)
            # Each kill in a separate range of steps; the first after the first snapshot, the last before the end.
            low = number * num_steps // num_kills
            high = max((number + 1) * num_steps // num_kills - 2, 0)
            step = chance.randint(min(max(low, self._trials.snapshot_every + 1), high), high)
            rank = chance.randrange(place[0])
            after_s = chance.random() * self._reference.trace.step_s
            name = f"killed rank {rank}"
            kill = {"step": step, "rank": rank, "after_s": after_s}
            if number == 0:
                name = "killed in a save"
                kill = {"step": step, "rank": 0, "events": chance.randint(1, MAX_EVENTS)}
            if self._run_and_compare(name, place, run_dir=run_dir, kill=kill) != "same":
                return
        self._run_and_compare("resumed", _choose_other(chance, places, place), run_dir=run_dir)

    def _heal(self, size: int) -> None:
        """Train with --heal while ranks die, until one is left. Compare the records of all steps, and the end."""
        show_activity(f"healed on {format_ranks(size)} ...")
        flags = ("--heal", "--max-restarts", str(size))
        kills = self._choose_deaths(size)
        outcome = self._trials.run(size, shard=self._modes[0], interceptor=KILLER, flags=flags, kills=kills)
        result = self._judge(outcome, is_cut=False)
        if result != "same":
            self._lines.append(REPEATED)
        elif not outcome.num_lost:
            self._lines.append("with --heal, the ranks did not continue without the one that died: see docs/running.md")
        shown = f"{result}, {outcome.num_lost} of {size} died"
        steps = f"0-{len(outcome.ledger) - 1}"
        self._print_row("healed", format_ranks(size), steps, shown, f"{outcome.seconds:.1f} s")

    def _choose_deaths(self, size: int) -> dict[str, tuple[int, int]]:
        """Choose a step for each rank but one, and how many of its micro-batches in this step it computes."""
        chance = random.Random(self._options.kill_seed)
        computed = [*self._reference.trace.micro_batches.values()]
        deaths = {}
        for rank in chance.sample(range(size), size - 1):
            step = chance.randrange(len(computed))
            deaths[str(rank)] = step, chance.randrange(max(len(computed[step]) // size, 1))
        return deaths

    # --- the verdict ------------------------------------------------------------------------------------------

    def _judge(self, outcome: TrialOutcome, *, is_cut: bool) -> str:
        """Compare with the reference, and explain a difference. Returns the entry for the table."""
        reference = self._reference
        trace = outcome.trace
        where = f"on {outcome.where}"
        if (difference := find_difference(reference.trace, trace)) is not None:
            self._is_same = False
            self._explain(outcome, difference)
            return f"differs from step {difference.step}"
        if is_cut:
            return "same"
        if (refusal := outcome.refusal) is not None:
            self._refused.add(outcome.shard)
            self._lines.append(f"shard={outcome.shard} is refused: {refusal}")
            return "refused"
        if outcome.code:
            result = f"exit code {outcome.code}"
            self._lines += [f"{where} it ends with {result}:", outcome.last_words]
            self._lines += [f"  likely: {DRIFT}"] * any(words in outcome.output for words in DRIFTED)
            self._is_same = False
            return result
        pairs = zip(reference.ledger, outcome.ledger, strict=False)
        differing = [one.step for one, other in pairs if one != other]
        if differing:
            result = f"differs from step {differing[0]}"
        elif len(outcome.ledger) != len(reference.ledger):
            result = "different steps"
        elif outcome.final != reference.final:
            result = "a different last snapshot"
        else:
            return "same"
        self._is_same = False
        self._lines.append(f"{where}, the ledger or the last snapshot is not the same: {result}")
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
        causes = explain(reference.trace, outcome.trace, difference, is_resumed=outcome.is_resumed)
        self._lines += [f"  likely: {cause}" for cause in causes]

    # --- the table --------------------------------------------------------------------------------------------

    def _print_run(self, name: str, outcome: TrialOutcome, result: str) -> None:
        steps = outcome.trace.steps
        shown = f"{min(steps)}-{max(steps)}" if steps else "none"
        ranks = format_ranks(outcome.world_size) + (f", {outcome.shard}" if is_mode(outcome.shard) else "")
        self._print_row(name, ranks, shown, result, f"{outcome.seconds:.1f} s")

    def _print_row(self, name: str, ranks: str, steps: str, result: str, time: str = "") -> None:
        self._rows.append({"run": name, "ranks": ranks, "steps": steps, "result": result, "time": time})
        if self._options.json:
            return
        colour = next((colour for text, colour in COLOURS.items() if result.startswith(text)), "red")
        print_result(self._row.format(name, ranks, steps, result, time).rstrip(), result, colour)


def _choose_other(chance: random.Random, places: Sequence[Place], place: Place) -> Place:
    """Return one with another number of ranks and another mode, if there is one."""
    both = [other for other in places if other[0] != place[0] and other[1] != place[1]]
    return chance.choice(both or [other for other in places if other != place] or [*places])
