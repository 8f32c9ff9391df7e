"""A certificate for this machine: the same bits on 1, 2, 4 and 8 ranks, and what a step costs. At most 15 minutes.

It starts the recipes `gpt` and `images` by the commands that a user would give: on several numbers of ranks, with
shards, bf16 and torch.compile, and with a rank that is killed in the middle of a step. All runs of a group must end
with one digest; the exit code is 1 if a group has two, or if a run fails. Beside the runs in bf16 it times DDP and
FSDP2 by hand (`ddp_and_fsdp2.py`). It writes `certificate.json` and `certificate.md`. A row that this machine cannot
run says what it needs.

Ranks use one GPU each, over NCCL. Without a GPU they use the CPU, over gloo, with a small model.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import count_flops_per_token, describe_machine, look_up_peak, print_table
from ddp_and_fsdp2 import read_arguments

import samestep
from samestep.console import format_count
from samestep.processes import running
from samestep.recipes.gpt import GPT2
from samestep.snapshot.logs import count_records
from samestep.tools.traced_script import find_errors, open_workdir
from samestep.watch.records import LEDGER, read_status

WORLD_SIZES = (1, 2, 4, 8)
ROW_LIMIT_S = 240.0  # a run that takes longer has failed
LEAST_S = 20.0  # a run is not started if less time is left
GRACE_S = 15.0  # for a run to end after SIGTERM
POLL_S = 0.003
OUTPUT_SIZE = 4000  # characters of a failed run in `certificate.json`
NO_TIME = "no time was left"

# What the recipes train. All steps have 8 micro-batches, one for each of 8 ranks. Validation is at the end only.
GPT = "gpt --validate-every 1000000 --validate-samples 8"
SMALL_GPT = f"{GPT} --layers 2 --width 64 --heads 2 --context 64 --batch-size 16 --micro-batch-size 2"
TINY_GPT = f"{GPT} --layers 1 --width 32 --heads 2 --context 32 --batch-size 8 --micro-batch-size 1"
IMAGES = "images --epochs 1 --batch-size 32 --micro-batch-size 4"
RECIPES = {
    "cuda": {
        "gpt": f"{GPT} --preset small --batch-size 64 --micro-batch-size 8 --steps 100",
        "gpt2": f"{GPT} --preset gpt2 --vocabulary-size 50304 --batch-size 64 --micro-batch-size 8 --steps 40",
        "images": f"{IMAGES} --model resnet18 --image-size 64 --num-workers 2",
    },
    "cpu": {"gpt": f"{SMALL_GPT} --steps 100", "gpt2": f"{SMALL_GPT} --steps 40", "images": IMAGES},
    "quick": {"gpt": f"{TINY_GPT} --steps 60", "gpt2": f"{TINY_GPT} --steps 20", "images": IMAGES},
}
NUM_STEPS_OF_IMAGES = 44

OPTIMIZER, FSDP2 = ("--shard", "optimizer"), ("--shard", "fsdp2")
RESTARTED, HEALED = ("--max-restarts", "1"), ("--heal",)


@dataclass(frozen=True)
class Group:
    """Runs that must end with one digest.

    Attributes:
        name: in the table.
        recipe: a key of `RECIPES`.
        words: further arguments of the recipe.
        on_most: options of `samestep launch`, each for a run on the most ranks. (One without any is on all numbers.)
        on_several: the same, each for runs on all numbers of ranks but 1.
        has_baselines: whether DDP and FSDP2 train the same, too.
    """

    name: str
    recipe: str
    words: tuple[str, ...] = ()
    on_most: tuple[tuple[str, ...], ...] = ()
    on_several: tuple[tuple[str, ...], ...] = ()
    has_baselines: bool = False


BF16, COMPILE = ("--precision", "bf16"), ("--compile",)
GROUPS = [
    Group("gpt", "gpt", on_most=(HEALED, RESTARTED, RESTARTED + FSDP2), on_several=(OPTIMIZER, FSDP2)),
    Group("gpt, bf16", "gpt2", BF16, on_most=(FSDP2, RESTARTED), has_baselines=True),
    Group("images", "images", on_most=(OPTIMIZER, FSDP2, RESTARTED, HEALED)),
    Group("gpt, bf16, compiled", "gpt2", BF16 + COMPILE),
]


@dataclass(frozen=True)
class Row:
    """A row of the certificate. What was not measured is None.

    Attributes:
        group, ranks: the name of its group, and the number of ranks.
        run: options of `samestep launch`, or the name of a baseline.
        outcome: "first" of its group, "same" bits as the first, "DIFFERENT", "FAILED", "not run", or "baseline".
        note: why it failed or was not run.
        digest: the SHA-256 of the run's last state.
        step_s: seconds per step, without the first ones and the last one.
        mfu: the share of the GPUs' peak that the model's operations are.
        recovery_s: seconds from the SIGKILL until the run has recorded a further step.
        output: the end of what a failed run has printed.
    """

    group: str
    ranks: int
    run: str
    outcome: str = "not run"
    note: str = ""
    digest: str | None = None
    step_s: float | None = None
    mfu: float | None = None
    recovery_s: float | None = None
    output: str = ""


class Failed(Exception):
    """A run ended with an error, or took too long.

    Args:
        output: the file with what it printed.
    """

    def __init__(self, reason: str, output: Path) -> None:
        super().__init__(reason)
        self.output = output.read_text()[-OUTPUT_SIZE:]


class OutOfTime(Exception):
    """A run was ended at the deadline."""


@dataclass(frozen=True)
class Machine:
    """Where and how the rows run.

    Attributes:
        device: "cuda" or "cpu".
        recipes: an entry of `RECIPES`.
        num_ranks: the most ranks.
        peak_flops: of one GPU with 16 bits; None: not known.
        home: a directory for the runs.
        deadline_s: when the last run must have ended, by time.monotonic().
    """

    device: str
    recipes: dict[str, str]
    num_ranks: int
    peak_flops: float | None
    home: Path
    deadline_s: float

    def build_words(self, group: Group) -> list[str]:
        return [*self.recipes[group.recipe].split(), *group.words]

    def find_obstacle(self, group: Group, ranks: int, flags: Sequence[str]) -> str:
        """Return what this machine lacks for a run; "" if nothing."""
        if ranks > self.num_ranks:
            return f"needs {ranks} GPUs"
        if "--heal" in flags and ranks < 2:
            return "needs 2 GPUs" if self.device == "cuda" else "needs 2 ranks"
        if "--compile" in group.words and not shutil.which(os.environ.get("CXX", "g++")):
            return "needs a C++ compiler"
        if group.recipe == "images" and not all(map(importlib.util.find_spec, ("PIL", "sklearn"))):
            return "needs pip install 'samestep[recipes]'"
        if self.deadline_s - time.monotonic() < LEAST_S:
            return NO_TIME
        return ""

    def compute_mfu(self, group: Group, ranks: int, step_s: float | None) -> float | None:
        """Return it for the groups in bf16, if the peak is known."""
        if step_s is None or self.peak_flops is None or "bf16" not in group.words:
            return None
        args, config = read_arguments(self.build_words(group)[1:])
        with torch.device("meta"):
            model = GPT2(config)
        flops: float = args.batch_size * config.context * count_flops_per_token(model, config.context)
        return flops / (step_s * ranks * self.peak_flops)


def execute(machine: Machine, command: Sequence[str], output: Path, follow: Callable[[], None] | None = None) -> None:
    """Run a command to its end.

    Args:
        follow: called again and again while it runs.

    Raises:
        Failed: it ended with an error, or took too long.
        OutOfTime: the deadline of the whole program has come.
    """
    end_s = time.monotonic() + ROW_LIMIT_S
    # Deterministic kernels need the variable, which `samestep launch` sets itself.
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}
    with running(command, variables, output, directory=machine.home) as process:
        try:
            while (code := process.poll()) is None:
                if time.monotonic() > machine.deadline_s:
                    raise OutOfTime
                if time.monotonic() > end_s:
                    raise Failed(f"took more than {ROW_LIMIT_S:.0f} s", output)
                if follow is not None:
                    follow()
                time.sleep(POLL_S)
        finally:
            process.send_signal(signal.SIGTERM)  # if it runs; torchrun passes it on to the ranks
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    if code:
        said = output.read_text().rstrip()
        reason = (find_errors(said) or said.splitlines() or ["it printed nothing"])[-1]
        raise Failed(f"exit code {code}: {reason}", output)


class Follower:
    """Follows a run by its ledger, which has a record for each finished step. May kill rank 0 in the middle of a step.

    Args:
        num_steps: of the run.
        kills: whether to kill rank 0, after a quarter of the steps.

    Attributes:
        recovery_s: see `Row`; None as long as there was no kill, and no further step after it.
    """

    def __init__(self, run_dir: Path, num_steps: int, *, kills: bool) -> None:
        self._run_dir = run_dir
        self._num_steps = num_steps
        self._kills = kills
        self._killed: tuple[int, float] | None = None  # number of recorded steps, and time
        self._times: list[tuple[int, float]] = []  # the same, whenever there are more
        self.recovery_s: float | None = None

    def follow(self) -> None:
        num, now_s = count_records(self._run_dir / LEDGER), time.monotonic()
        if not self._times or num != self._times[-1][0]:
            self._times.append((num, now_s))
        if self._killed is None:
            if self._kills and num > self._num_steps // 4:
                time.sleep((self.compute_step_s() or 0.0) / 2)
                with suppress(ProcessLookupError):  # the run has just ended
                    os.kill(read_status(self._run_dir)["process"], signal.SIGKILL)
                self._killed = count_records(self._run_dir / LEDGER), time.monotonic()
        elif self.recovery_s is None and num > self._killed[0]:
            self.recovery_s = now_s - self._killed[1]

    def compute_step_s(self) -> float | None:
        """Return the seconds per step, after a fifth of the steps and before the last one; None: too short to tell."""
        times = [each for each in self._times if self._num_steps / 5 <= each[0] < self._num_steps]
        if len(times) < 2:
            return None
        (first, began_s), (last, ended_s) = times[0], times[-1]
        return (ended_s - began_s) / (last - first)


def kills(flags: Sequence[str]) -> bool:
    """Return whether rank 0 of a run with these options is killed."""
    return RESTARTED[0] in flags or HEALED[0] in flags


def run_recipe(machine: Machine, group: Group, row: Row, flags: Sequence[str]) -> Row:
    """Train, and return the row with what was found. Raises Failed if the run fails."""
    run_dir = machine.home / "-".join([group.name, str(row.ranks), *flags]).replace(", ", "-")
    words = machine.build_words(group)
    is_killed = kills(flags)
    num_steps = int(words[words.index("--steps") + 1]) if "--steps" in words else NUM_STEPS_OF_IMAGES
    follower = Follower(run_dir, num_steps, kills=is_killed)
    command = [sys.executable, "-m", "samestep", "launch", "--nproc-per-node", str(row.ranks), *flags]
    command += ["--device", machine.device, "--run-dir", str(run_dir)]
    command += ["--snapshot-every", str(num_steps // 5), "--keep-last", "1"] if is_killed else []
    output = run_dir.with_suffix(".txt")
    execute(machine, [*command, *words], output, follower.follow)
    if is_killed and follower.recovery_s is None:
        raise Failed("the run ended before rank 0 was killed", output)
    inspect = [sys.executable, "-m", "samestep", "inspect", str(run_dir), "--digest"]
    inspected = subprocess.run(inspect, capture_output=True, text=True)
    shutil.rmtree(run_dir)  # the snapshots of GPT-2 are large
    if inspected.returncode:
        raise Failed(f"its digest cannot be read: {inspected.stderr.strip()}", output)
    step_s = None if is_killed else follower.compute_step_s()
    mfu = machine.compute_mfu(group, row.ranks, step_s)
    return replace(row, digest=inspected.stdout.strip(), step_s=step_s, mfu=mfu, recovery_s=follower.recovery_s)


def run_row(machine: Machine, group: Group, ranks: int, flags: Sequence[str]) -> Row:
    row = Row(group.name, ranks, f"{'SIGKILL, ' if kills(flags) else ''}{' '.join(flags)}")
    if obstacle := machine.find_obstacle(group, ranks, flags):
        return replace(row, note=obstacle)
    try:
        return run_recipe(machine, group, row, flags)
    except OutOfTime:
        return replace(row, note=NO_TIME)
    except Failed as failure:
        return replace(row, outcome="FAILED", note=str(failure), output=failure.output)


def run_baselines(machine: Machine, group: Group, ranks: int) -> list[Row]:
    """Return a row for each baseline, or one with the reason why they were not run."""
    row = Row(group.name, ranks, "DDP and FSDP2 by hand")
    if obstacle := machine.find_obstacle(group, ranks, ()):
        return [replace(row, note=obstacle)]
    script, found = Path(__file__).with_name("ddp_and_fsdp2.py"), machine.home / f"baselines-{ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(script), str(found), machine.device, *machine.build_words(group)[1:]]
    try:
        execute(machine, command, found.with_suffix(".txt"))
    except OutOfTime:
        return [replace(row, note=NO_TIME)]
    except Failed as failure:
        return [replace(row, outcome="FAILED", note=str(failure), output=failure.output)]
    return [
        replace(row, run=name, outcome="baseline", step_s=step_s, mfu=machine.compute_mfu(group, ranks, step_s))
        for name, step_s in json.loads(found.read_text()).items()
    ]


def judge(rows: Sequence[Row]) -> list[Row]:
    """Compare the digests of a group with that of its first run."""
    first = next((row for row in rows if row.digest), None)
    judged = []
    for row in rows:
        outcome = row.outcome
        if first is not None and row.digest:
            outcome = "first" if row is first else "same" if row.digest == first.digest else "DIFFERENT"
        judged.append(replace(row, outcome=outcome))
    return judged


def run_group(machine: Machine, group: Group, world_sizes: Sequence[int]) -> list[Row]:
    """Return the rows of a group."""
    most = max(ranks for ranks in world_sizes if ranks <= machine.num_ranks)
    runs: list[tuple[int, tuple[str, ...]]] = [(ranks, ()) for ranks in world_sizes]
    runs += [(most, flags) for flags in group.on_most]
    runs += [(ranks, flags) for flags in group.on_several for ranks in world_sizes if ranks > 1]
    rows = []
    for ranks, flags in runs:
        rows.append(run_row(machine, group, ranks, flags))
        print(describe(rows[-1]), file=sys.stderr, flush=True)
    for ranks in world_sizes if group.has_baselines else ():
        rows += run_baselines(machine, group, ranks)
        print(describe(rows[-1]), file=sys.stderr, flush=True)
    return judge(rows)


# --- output -----------------------------------------------------------------------------------------------------------


def describe(row: Row) -> str:
    what = f"{row.group}, {format_count(row.ranks, 'rank')} {row.run}".rstrip()
    return f"{what}: {row.note or row.digest or 'done'}"


# In a process of its own, which leaves no memory of the GPU in use.
LIST_GPUS = "import torch\nfor i in range(torch.cuda.device_count()): print(torch.cuda.get_device_name(i))"


def ask(*command: str) -> list[str]:
    """Return the lines that a program prints; none if it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return []
    return subprocess.run(command, capture_output=True, text=True).stdout.strip().splitlines()


def describe_environment(device: str) -> dict[str, Any]:
    """Return versions and hardware."""
    folder = str(Path(__file__).parent)
    facts = describe_machine()
    facts |= {"samestep": samestep.__version__, "commit": "".join(ask("git", "-C", folder, "rev-parse", "HEAD"))}
    facts |= {"device": device, "CPU": read_cpu()}
    if device == "cuda":
        facts["CUDA"] = torch.version.cuda
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["GPUs"] = ask(sys.executable, "-c", LIST_GPUS)
        facts["driver"] = ask("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
        facts["topology"] = ask("nvidia-smi", "topo", "-m")
    return facts


def read_cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def to_cells(row: Row) -> list[str]:
    return [
        row.group,
        str(row.ranks),
        row.run,
        row.outcome,
        (row.digest or "")[:12],
        "" if row.step_s is None else f"{row.step_s:.4f}",
        "" if row.mfu is None else f"{row.mfu:.1%}",
        "" if row.recovery_s is None else f"{row.recovery_s:.1f}",
        row.note,
    ]


def summarize(rows: Sequence[Row]) -> list[str]:
    """Return a line for each group."""
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        digests = [row.digest for row in rows if row.group == group and row.digest]
        lines.append(f"{group}: {format_count(len(digests), 'run')}, {format_count(len({*digests}), 'digest')}")
    return lines


HEADER = ["group", "ranks", "run", "bits", "digest", "s/step", "MFU", "recovery s", "note"]


def format_markdown(facts: dict[str, Any], rows: Sequence[Row]) -> str:
    gpus = facts.get("GPUs", [])
    hardware = f"{len(gpus)} x {gpus[0]}" if gpus else facts["CPU"]
    names = ("samestep", "commit", "torch", "CUDA", "NCCL", "python", "cores", "load_average")
    versions = ", ".join(f"{name} {facts[name]}" for name in names if facts.get(name) not in (None, ""))
    lines = [HEADER, ["---"] * len(HEADER), *map(to_cells, rows)]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    groups = "\n".join(f"- {line}" for line in summarize(rows))
    return f"# Certificate\n\n{hardware}; {versions}\n\n{groups}\n\n{table}\n"


def write_files(folder: Path, facts: dict[str, Any], recipes: dict[str, str], rows: Sequence[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"environment": facts, "recipes": recipes, "rows": [asdict(row) for row in rows]}
    (folder / "certificate.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "certificate.md").write_text(format_markdown(facts, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that it runs: figures mean nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--max-ranks", type=int, default=8, help="no rows on more ranks; default: 8")
    parser.add_argument("--minutes", type=float, default=15.0, help="runs that do not fit are not run; default: 15")
    parser.add_argument("--output", type=Path, default=Path(), help="directory of the two files; default: this one")
    args = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    device = args.device or ("cuda" if num_gpus else "cpu")
    facts = describe_environment(device)
    world_sizes = [ranks for ranks in WORLD_SIZES if ranks <= args.max_ranks]
    rows: list[Row] = []
    with open_workdir("certificate") as home:
        machine = Machine(
            device=device,
            recipes=RECIPES["quick" if args.quick else device],
            num_ranks=num_gpus if device == "cuda" else max(WORLD_SIZES),
            peak_flops=look_up_peak(facts["GPUs"][0]) if facts.get("GPUs") else None,
            home=home,
            deadline_s=time.monotonic() + 60 * args.minutes,
        )
        for group in GROUPS:
            rows += run_group(machine, group, world_sizes)
            write_files(args.output, facts, machine.recipes, rows)
    print_table(HEADER, [to_cells(row) for row in rows])
    print("\n".join(summarize(rows)))
    if any(row.outcome in ("DIFFERENT", "FAILED") for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
