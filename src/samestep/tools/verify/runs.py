"""The runs that `samestep verify` compares: how they start, what their ranks traced, and where and why two differ."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from samestep.config import Overrides
from samestep.console import format_count
from samestep.files import read_tail
from samestep.launch.target import Target
from samestep.plan.ledger import Entry
from samestep.snapshot.logs import read_records
from samestep.snapshot.store import Store
from samestep.tools.traced_script import SHOWN_LINES, find_errors, read_lines, run_traced
from samestep.watch.records import HEALS, LEDGER, read_rows

TRACE = "samestep.tools.interceptors:Trace"

# The facts of a step, on its way from samples to state.
STAGES = ("initial", "samples", "input", "losses", "draws", "gradient", "state", "value")
WHOLE = ("state", "value")  # written by rank 0 alone: one that a run lacks is a difference, too
Line = dict[str, Any]


class Setup(NamedTuple):
    """What differs between the starts of a run.

    Attributes:
        world_size: number of ranks.
        shard: the value of the option `shard`; None: that of the script.
    """

    world_size: int
    shard: str | None

    def __str__(self) -> str:
        """Return it in words, such as "2 ranks with shard=fsdp2". One rank has nothing to divide."""
        is_divided = self.world_size > 1 and self.shard not in (None, "none")
        return format_count(self.world_size, "rank") + (f" with shard={self.shard}" if is_divided else "")


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


def run_trial(
    target: Target,
    setup: Setup,
    overrides: Overrides,
    directory: Path,
    *,
    run_dir: Path | None = None,
    hash_seed: str = "0",
    interceptor: str = TRACE,
    flags: Sequence[str] = (),
    **trace: Any,
) -> Trial:
    """Start a script in new processes and wait for its end.

    Args:
        overrides: options of `Run` that replace those of the script.
        directory: a new one, for the traces.
        run_dir: the directory of an earlier start; None: a new one.
        hash_seed: PYTHONHASHSEED, unless it is set for this process.
        interceptor: an interceptor, "module:class". `Trace` and its subclasses write the traces.
        flags: options of the launcher.
        trace: options of the interceptor.
    """
    directory.mkdir()
    run_dir = run_dir or directory / "run"
    options = {**overrides, "run_dir": run_dir, "compare_every": 1}
    if setup.shard is not None:
        options["shard"] = setup.shard
    command = target.to_full_command(setup.world_size, *flags)
    began_s = time.monotonic()
    code = run_traced(command, directory, interceptor, options, hash_seed=hash_seed, **trace)
    seconds = time.monotonic() - began_s
    settings, steps = read_traces(directory)
    store = Store(run_dir)
    final = store.find("latest", warn=lambda _: None) if run_dir.exists() else None
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
    if all(one.settings[name] == other.settings[name] for name in ("world_size", "shard")):
        sentence = OF_REPETITION.get(difference.what, UNREPEATABLE)
    else:
        sentence = (OF_SHARD if other.settings["shard"] else OF_RANKS)[difference.what]
    return sentence.format(name=difference.name, step=difference.step)
