"""`samestep verify`: runs the script several times, one run after the other, and compares the runs.

Says where two runs differ first, on the way from samples to state, and the likely cause.
"""

import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

from samestep.cli import JSON, print_json
from samestep.config import OPTIONS, Option, format_flags, name_flag, whole
from samestep.console import format_count, print_result, show_activity
from samestep.errors import Error
from samestep.files import read_tail
from samestep.launch.target import FLAGS as LAUNCH_FLAGS
from samestep.launch.target import ScriptCommand, Target, Values, check_target, parse_sizes
from samestep.plan.ledger import Entry
from samestep.plan.tree import check_numbers
from samestep.snapshot.logs import read_records
from samestep.snapshot.store import Store
from samestep.tools.traced_script import OF_RUN, SHOWN_LINES, find_errors, open_workdir, read_lines, run_traced
from samestep.tools.verify.plain import run_plain
from samestep.watch.records import HEALS, LEDGER, read_rows

NOT_OF_PLAIN = ("shard", "kills", "kill_seed", "heal", *OF_RUN)
FLAGS: dict[str, Option] = {
    "steps": Option(int, "N", "steps of each run; default: 20", whole(1)),
    "world_sizes": Option(str, "N,N", "numbers of ranks, each compared with the first; default: 1,2,3,4"),
    "shard": Option(str, "S,S", "values of shard to compare, on each number of ranks: none, optimizer, fsdp2"),
    "kills": Option(int, "K", "number of kills in the interrupted run; default: 2", whole(0)),
    "kill_seed": Option(int, "N", "seed for the random moments of the kills; default: random"),
    "heal": Option(
        bool, "", "also train with launch --heal on the most ranks, and kill all ranks (or pipelines) but one"
    ),
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
ROW = "  {run:<18} {ranks:<22} {steps:>7}  {result:<44} {time}"

TRACE = "samestep.tools.interceptors:Trace"

# The facts of a step, on its way from samples to state.
STAGES = ("initial", "samples", "input", "losses", "draws", "gradient", "state", "value")
WHOLE = ("state", "value")  # written by rank 0 alone: one that a run lacks is a difference, too
Line = dict[str, Any]


@click.command("verify", cls=ScriptCommand, flags=FLAGS)
def run_verify(target: Target, values: Values) -> int:
    """Trains for a few steps on several numbers of ranks, and compares the runs.

    Of a run with a pipeline, compares the maps of its stages to these ranks. With --shard, also compares the ways to
    divide the state of a run among the ranks. With --heal, also kills all ranks of a run but one, or one rank of all
    pipelines but one, one after the other, while the others continue.
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


# --- a run ------------------------------------------------------------------------------------------------------------


class Setup(NamedTuple):
    """What differs between the starts of a run.

    Attributes:
        world_size: number of ranks.
        shard: the value of the option `shard`; None: that of the script.
        pipeline_ranks: the value of the option; None: its default.
    """

    world_size: int
    shard: str | None
    pipeline_ranks: int | None = None

    def __str__(self) -> str:
        """Return it in words, such as "2 ranks with shard=fsdp2". One rank has nothing to divide."""
        text = format_count(self.world_size, "rank")
        if self.world_size == 1:
            return text
        if ranks := self.pipeline_ranks:
            text = f"{format_count(self.world_size // ranks, 'pipeline')} of {format_count(ranks, 'rank')}"
        return text + (f" with shard={self.shard}" if self.shard not in (None, "none") else "")


@dataclass(frozen=True)
class Trial:
    """One start of a run.

    Attributes:
        code: the launcher's exit code.
        output: output of the launcher and rank 0.
        settings: the first line of the traces: facts about the run; empty if it has begun no step.
        steps: step -> rank 0's line, in which "facts" are those of all ranks: (what, its name) -> its value.
        final: the digest of the newest snapshot.
        ledger: the record of each step.
        num_lost: the number of ranks that have died while others continued.
    """

    setup: Setup
    code: int
    seconds: float
    output: str
    settings: Line
    steps: Mapping[int, Line]
    final: str | None
    ledger: tuple[Entry, ...]
    num_lost: int

    @property
    def last_words(self) -> str:
        """The error at the end; without one, the end of the output."""
        return "\n".join(find_errors(self.output) or self.output.rstrip().splitlines()[-SHOWN_LINES:])

    @property
    def step_s(self) -> float:
        """Median seconds per step, including the checksums."""
        ends = [line["at_s"] for line in self.steps.values()]
        return median(b - a for a, b in pairwise(ends)) if len(ends) > 1 else 0.0

    def count_micro_batches(self) -> list[int]:
        """Return how many micro-batches each step has computed, over all passes."""
        return [sum(what == "samples" for what, _ in line["facts"]) for line in self.steps.values()]


def read_traces(directory: Path) -> tuple[Line, dict[int, Line]]:
    """Return the `settings` and `steps` of a `Trial` from the traces of all ranks."""
    settings: Line = {}
    facts: dict[int, dict[tuple[str, str], Any]] = {}
    steps: dict[int, Line] = {}
    for path in sorted(directory.glob("rank-*.jsonl")):
        for line in read_lines(path):
            if "step" not in line:
                settings = settings or line
                continue
            known = facts.setdefault(line["step"], {})
            known |= {(what, name): value for what, name, value in line["facts"]}
            if "digest" in line:
                steps[line["step"]] = line | {"facts": known}
    return settings, dict(sorted(steps.items()))


# --- differences ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        what: one of STAGES, or "loss" (of the step).
        name: name of the tensor, micro-batch, parameter or plain value, as in a script: model.0.weight.
        values: of both runs.
        tensors: names of the tensors of the state that differ at the end of that step.
    """

    step: int
    what: str
    name: str
    values: tuple[Any, Any]
    tensors: Sequence[str]


def find_difference(one: Trial, other: Trial) -> Difference | None:
    """Find the first step of both runs that differs, and the first difference on its way from samples to state.

    Returns:
        None if losses and digests are equal in all steps that both runs have.
    """
    for step in sorted(one.steps.keys() & other.steps.keys()):
        a, b = one.steps[step], other.steps[step]
        if (a["digest"], a["loss"]) == (b["digest"], b["loss"]):
            continue
        pairs = {key: (a["facts"].get(key), b["facts"].get(key)) for key in {**a["facts"], **b["facts"]}}
        found = [
            (*key, pair) for key, pair in pairs.items() if pair[0] != pair[1] and (None not in pair or key[0] in WHOLE)
        ]
        # Of the state, the tensors of models before those of optimizers.
        found.sort(key=lambda each: (STAGES.index(each[0]), each[0] == "state" and "/state/" in each[1]))
        tensors = [_name(name) for what, name, _ in found if what == "state"]
        what, name, values = (*found, ("loss", "", (a["loss"], b["loss"])))[0]
        return Difference(step, what, _name(name), values, tensors)
    return None


def _name(name: str) -> str:
    """Format a name as in a script: objects/model/0.weight -> model.0.weight."""
    return name.removeprefix("objects/").replace("/", ".")


# --- causes -----------------------------------------------------------------------------------------------------------

DRIFTED = ("have the same model", "a different model than")  # in the error of ranks whose models differ
DRIFT = "a rank changes the model by its own values (its rank, its micro-batches): updates may use the gradient only"
CARRIED = (
    "the script keeps state from one micro-batch to the next (an attribute, a global variable, its own generator), of "
    "which each rank computes others, or it reads its rank or the number of ranks (run.rank, os.environ), or calls "
    "torch.set_num_threads; derive values from step.number and the samples, and draw from the global generators"
)
OR_CARRIED = f"; or, if runs with --shard none differ, too: {CARRIED}"
INPUT = "the data set, or collate_fn, returned different values for the same samples ({name} of step {step})"
EVERYWHERE = {
    "samples": "the steps use different samples: the sampler must depend on the epoch alone, not on the rank",
    "draws": "the body of {name} draws a different number of random values: it must not depend on rank or earlier "
    "micro-batches",
}

# What differs first -> the likely cause. `{name}` is the tensor or micro-batch, `{step}` the step.
# Between two runs on the same number of ranks:
OF_REPETITION = EVERYWHERE | {
    "initial": "{name} differs before the first step: build it after samestep.Run(...), which seeds the generators",
    "input": f"{INPUT}: build random data after samestep.Run(...), which seeds the generators, read no clock and no "
    "file that changes, and sort the elements of a set of strings, whose order differs with each PYTHONHASHSEED",
}
UNREPEATABLE = (
    "look for clocks (time.time(), datetime.now()), generators without a seed, the order of a set of strings or hash() "
    "of a string (both differ with each PYTHONHASHSEED: sort, or export PYTHONHASHSEED=0), memory addresses (id(), a "
    "set of objects), files that change, threads that the script starts, and, with deterministic=False, operators that "
    "are not deterministic"
)
# Between two numbers of ranks:
OF_RANKS = EVERYWHERE | {
    "initial": "{name} differs before the first step: its initial value must not depend on the rank or their number",
    "input": f"{INPUT}: a sample must depend only on its index and on torch, numpy.random and random, which samestep "
    "seeds before each: not on the rank, and not on earlier reads",
    "losses": f"the same inputs of {{name}} give a different loss: {CARRIED}",
    "gradient": f"the same losses give a different gradient of {{name}}: {CARRIED}",
    "state": f"the same gradients give a different {{name}}: {CARRIED}; a buffer must get its value from the whole "
    "step (step.num_samples, step.loss), not from this rank's micro-batches",
    "value": f"the same gradients give a different {{name}}: {CARRIED}",
    "loss": f"the loss of the step differs: {CARRIED}",
}
# Between a whole state and one that is divided among the ranks:
OF_SHARD = OF_RANKS | {
    "initial": "{name} differs before the first step: set initial values before run.prepare, because values that are "
    "drawn for the slices of a tensor depend on its division",
    "losses": "the same inputs of {name} give a different loss: the forward pass computes from a slice of a tensor"
    f"{OR_CARRIED}",
    "gradient": "the same losses give a different gradient of {name}: something changes the sums over the ranks, such "
    f"as a mean in place of a sum, or +0.0 in place of the neutral -0.0{OR_CARRIED}",
    "state": "the same gradients give a different {name}: the update computes from the slices of tensors that a rank "
    "has, such as a norm of its gradients (for clipping, use run.clip_grad_norm_), or fused=True, whose kernel "
    f"rounds the last elements of a slice differently{OR_CARRIED}",
}


def explain(one: Trial, other: Trial, difference: Difference) -> str:
    """Return the likely cause.

    Args:
        one: the reference run.
        other: the run that differs: on the same number of ranks, on another number, with another shard, or resumed.
    """
    if begin := other.settings["begin"]:  # uninterrupted runs were equal, otherwise none would have been interrupted
        return (
            f"it differs from step {difference.step} on, after a resume at step {begin}: state that "
            "the script keeps from step to step, such as a generator of its own, is in no snapshot; pass it to "
            "run.prepare, or use run.state"
        )
    if all(one.settings[name] == other.settings[name] for name in ("world_size", "pipeline_ranks", "shard")):
        sentence = OF_REPETITION.get(difference.what, UNREPEATABLE)
    else:
        sentence = (OF_SHARD if other.settings["shard"] else OF_RANKS)[difference.what]
    return sentence.format(name=difference.name, step=difference.step)


# --- all runs ---------------------------------------------------------------------------------------------------------


class _Verification:
    """Runs and compares, and prints a row per run.

    Attributes:
        lines: the explanations, for the end.
        rows: of the table.
    """

    def __init__(self, target: Target, values: Values, home: Path) -> None:
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
            "compare_every": 1,
        }
        self._target = target
        self._home = home
        self._chance = random.Random(values.get("kill_seed"))

    def compare_all(self, world_sizes: Sequence[int], modes: Sequence[str | None]) -> None:
        """Train on all numbers of ranks and in all modes. If all is the same, also with deaths and interruptions."""
        setup = Setup(world_sizes[0], modes[0])
        self._reference = self._run_reference(setup)
        most, stages = (self._reference.settings[name] for name in ("most_replicas", "pipeline"))
        # The first map of each number of ranks is the default.
        maps = [
            (size, ranks)
            for size in world_sizes
            for ranks in range(min(size, stages or 1), 0, -1)
            if size % ranks == 0 and size // ranks <= most
        ]
        allowed = [*dict(maps)]
        if len(world_sizes) > 1 and len(allowed) == 1:
            size = self._reference.settings["micro_batch_size"]
            check_numbers(most * size, size, min(max(world_sizes), most * size), format_flags)
        # Equal runs must not depend on Python's hash seed either: plain python uses a new one at each start.
        if not self._run_and_compare("again", setup, hash_seed="1"):
            return  # a difference between two equal runs would appear in all comparisons
        if skipped := ", ".join(str(size) for size in world_sizes if size not in allowed):
            self.lines.append(f"skipped: {skipped} ranks, because a step has work for {most} at most")
        setups = [
            Setup(size, mode, None if stages is None else ranks)
            for mode in modes
            for size, ranks in maps
            if size > 1 or mode == modes[0]
        ]
        for other in setups[1:]:
            self._run_and_compare("train", other)
        if self.is_same and "heal" in self._values:
            size = max(allowed)
            ranks = max((ranks for each, ranks in maps if each == size and ranks < size), default=1)
            self._heal(Setup(size, modes[0], None if stages is None else ranks))
        if self.is_same and self._num_kills:
            self._interrupt(setups)

    # --- the runs ---------------------------------------------------------------------------------------------

    def _run(
        self,
        name: str,
        setup: Setup,
        *,
        run_dir: Path | None = None,
        interceptor: str = TRACE,
        flags: Sequence[str] = (),
        **options: Any,
    ) -> Trial:
        """Start the script in new processes and wait for its end.

        Args:
            name: of the run.
            run_dir: the directory of an earlier start; None: a new one.
            interceptor: "module:class". `Trace` and its subclasses write the traces.
            flags: options of the launcher.
            options: of the interceptor; `hash_seed`, as for `run_traced`.
        """
        show_activity(f"{name} on {setup} ...")
        directory = self._home / f"{len(self.rows):02}-on-{setup.world_size}"
        directory.mkdir()
        run_dir = run_dir or directory / "run"
        own = {name: value for name, value in setup._asdict().items() if name in OPTIONS and value is not None}
        if setup.shard == "fsdp2":
            own["shard_copies"] = 1  # it permits no other value
        overrides = {**self._overrides, **own, "run_dir": run_dir}
        command = self._target.to_full_command(setup.world_size, *flags)
        began_s = time.monotonic()
        code = run_traced(command, directory, interceptor, overrides, **options)
        seconds = time.monotonic() - began_s
        settings, steps = read_traces(directory)
        store = Store(run_dir)
        final = store.find("latest", warn=lambda _: None)
        return Trial(
            setup=setup,
            code=code,
            seconds=seconds,
            output=read_tail(directory / "output"),
            settings=settings,
            steps=steps,
            final=None if final is None else store.read_digest(final),
            ledger=tuple(read_records(run_dir / LEDGER)),
            num_lost=sum(len(row["lost"]) for row in read_rows(run_dir / HEALS)),
        )

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
        """Train with --heal while ranks die, each in its own step, until one replica is left. Compare all steps."""
        size = setup.world_size
        num_ranks = setup.pipeline_ranks or 1  # of a replica
        computed = self._reference.count_micro_batches()
        kills = {}  # rank -> a step, and how many of its micro-batches in this step it computes
        for replica in self._chance.sample(range(size // num_ranks), size // num_ranks - 1):
            step = self._chance.randrange(len(computed))
            rank = replica * num_ranks + self._chance.randrange(num_ranks)
            kills[str(rank)] = step, self._chance.randrange(max(computed[step] * num_ranks // size, 1))
        flags = ("--heal", "--max-restarts", str(size))
        trial = self._run("healed", setup, interceptor=KILLER, flags=flags, kills=kills)
        result = self._judge(trial)
        if result != "same":
            self.lines.append(REPEATED)
        elif not trial.num_lost:
            self.lines.append("with --heal, the ranks did not continue without the one that died: see docs/running.md")
        self._print_row("healed", trial, f"{result}, {trial.num_lost} of {size} lost")

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
