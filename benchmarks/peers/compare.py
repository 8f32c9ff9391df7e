"""The same training with five trainers, undisturbed and with a rank killed at five fixed steps. `make peers` runs it.

python benchmarks/peers/compare.py prints a table; --write also puts it into docs/peers.md.
"""

import argparse
import datetime
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "peers.md"
BEGIN, END = "<!-- written by benchmarks/peers/compare.py -->\n", "<!-- end -->\n"
sys.path.insert(0, str(HERE))

from task import NUM_EPOCHS, NUM_SAMPLES  # noqa: E402

KILLS = (7, 26, 44, 63, 91)
TRAINERS = {  # SCRIPT or SCRIPT-VARIANT -> name, packages; the version of the first package is shown
    "ddp": ("DDP + torchrun, the tutorials' script", ("torch",)),
    "accelerate": ("Accelerate {}", ("accelerate",)),
    "accelerate-seedable": ("Accelerate {}, seedable sampler", ("accelerate",)),
    "accelerate-generator": ("Accelerate {}, seedable sampler and a generator", ("accelerate",)),
    "accelerate-accumulate": ("Accelerate {}, the same, and 2 x 16 samples on 1 process", ("accelerate",)),
    "lightning": ("Lightning {}", ("lightning",)),
    "lightning-stateful": ("Lightning {}, stateful loader and sampler (1)", ("lightning", "torchdata")),
    "lightning-between": ("Lightning {}, stateful, no checkpoint at an epoch's end (2)", ("lightning", "torchdata")),
    "trainer": ("Hugging Face Trainer {}", ("transformers", "accelerate")),
    "samestep": ("samestep", ("samestep",)),
}
TIMEOUT_S = 900  # a busy machine may need minutes to import torch ten times


@dataclass(frozen=True)
class Outcome:
    """What one training did. The final weights follow from a chain of steps; all other steps were lost."""

    digest: str
    wall_s: float
    num_steps: int  # of the chain
    steps_lost: int
    samples_skipped: int  # uses of samples that the chain lacks, compared with once in each epoch
    samples_repeated: int


def get_script(trainer: str) -> Path:
    return HERE / f"with_{trainer.partition('-')[0]}.py"


def launch(trainer: str, num_ranks: int, variables: dict[str, str], directory: str) -> bool:
    """Start a trainer by its launcher. Returns whether it succeeded."""
    module = ["samestep", "launch"] if trainer == "samestep" else ["torch.distributed.run", "--standalone"]
    command = [sys.executable, "-m", *module, "--nproc-per-node", str(num_ranks), str(get_script(trainer))]
    with (Path(directory) / "output").open("w") as output:
        done = subprocess.run(
            command, cwd=directory, env=os.environ | variables, stdout=output, stderr=output, timeout=TIMEOUT_S
        )
    return done.returncode == 0


def fork(trainer: str, num_ranks: int, variables: dict[str, str], directory: str) -> bool:
    """Start a trainer as forks of this process, which has imported it, with the variables that torchrun sets."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    ranks = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.chdir(directory)
                output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                shares = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
                address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({**variables, **address, **{name: str(value) for name, value in shares.items()}})
                sys.modules.pop("task", None)  # it reads the variables
                runpy.run_path(str(get_script(trainer)), run_name="__main__")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        ranks.append(pid)
    succeeded = True
    while ranks:  # if one rank fails, the others are stopped, as by torchrun
        pid, status = os.wait()
        ranks.remove(pid)
        if status and succeeded:
            succeeded = False
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return succeeded


def train(trainer: str, num_ranks: int, kills: tuple[int, ...], start: Callable[..., bool]) -> Outcome:
    """Run a trainer in a new directory. It is started again after each kill, until it is done."""
    with tempfile.TemporaryDirectory() as directory:
        variables = {
            "PEERS_DIRECTORY": directory,
            "PEERS_VARIANT": trainer.partition("-")[2],
            "PEERS_KILLS": ",".join(map(str, kills)),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        begin = time.perf_counter()
        succeeded = any(start(trainer, num_ranks, variables, directory) for _ in range(len(kills) + 1))
        wall_s = time.perf_counter() - begin
        if not succeeded:
            output = (Path(directory) / "output").read_text()
            raise SystemExit(f"{trainer} failed on {num_ranks} ranks:\n{output[-4000:]}")
        outcome = evaluate(Path(directory), num_ranks, wall_s)
        missed = [step for step in kills if not (Path(directory) / f"kill-{step}").exists()]
        if missed and min(missed) <= outcome.num_steps:  # a trainer that skips steps may not get to the last kill
            raise SystemExit(f"{trainer} was not killed at the steps {missed}.")
        return outcome


def evaluate(directory: Path, num_ranks: int, wall_s: float) -> Outcome:
    """Follow the steps from the final weights back to the first ones."""
    digest = (directory / "digest").read_text()
    samples: dict[str, list[int]] = {}  # weights after a step -> its samples, of all ranks
    before: dict[str, str] = {}  # weights after a step -> weights before it
    num_executed = 0
    for rank in range(num_ranks):
        of_rank: dict[str, list[int]] = {}
        lines = (directory / f"steps-{rank}").read_text().splitlines()
        num_executed = len(lines)  # the last rank is the one that is killed, so it has never started a further step
        for line in lines:
            first, second, indices = line.split(" ")
            before[second] = first
            of_rank[second] = [int(index) for index in indices.split(",")]
        for weights, indices_of_rank in of_rank.items():
            samples.setdefault(weights, []).extend(indices_of_rank)
    uses = Counter[int]()
    num_steps = 0
    weights = digest
    while weights in before:
        uses.update(samples[weights])
        num_steps += 1
        weights = before[weights]
    differences = [uses[index] - NUM_EPOCHS for index in range(NUM_SAMPLES)]
    skipped, repeated = -sum(min(each, 0) for each in differences), sum(max(each, 0) for each in differences)
    return Outcome(digest, wall_s, num_steps, num_executed - num_steps, skipped, repeated)


def is_installed(packages: tuple[str, ...]) -> bool:
    try:
        return all(version(package) for package in packages)
    except PackageNotFoundError:
        return False


def compare(trainers: list[str], kills: tuple[int, ...], forked: bool) -> list[dict[str, object]]:
    start = fork if forked else launch
    rows: list[dict[str, object]] = []
    for trainer in trainers:
        name, packages = TRAINERS[trainer]
        if not is_installed(packages):
            print(f"{name} is not installed and left out.", file=sys.stderr)
            continue
        for package in packages if forked else ():
            import_module(package)
        undisturbed, alone = train(trainer, 2, (), start), train(trainer, 1, (), start)
        killed = train(trainer, 2, kills, start)
        rows.append(
            {
                "trainer": name.format(version(packages[0])),
                "same bits on 1 process": alone.digest == undisturbed.digest,
                "same bits after the kills": killed.digest == undisturbed.digest,
                "steps in the final weights": killed.num_steps,
                "steps lost": killed.steps_lost,
                "samples skipped": killed.samples_skipped,
                "samples repeated": killed.samples_repeated,
            }
        )
        if not forked:
            times = {"undisturbed": undisturbed.wall_s, "with the kills": killed.wall_s}
            rows[-1].update({f"seconds {name}": round(wall_s, 1) for name, wall_s in times.items()})
        print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def format_table(rows: list[dict[str, object]]) -> str:
    def show(value: object) -> str:
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)

    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(show, row.values())) + " |" for row in rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainers", nargs="*", metavar="TRAINER", help=f"of {', '.join(TRAINERS)}; default: all")
    parser.add_argument("--write", action="store_true", help="write the table into docs/peers.md")
    parser.add_argument("--forked", action="store_true", help="start ranks as forks of this process: fast, no times")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="samestep only, with one kill")
    args = parser.parse_args()
    unknown = set(args.trainers) - TRAINERS.keys()
    if unknown:
        parser.error(f"unknown trainers: {', '.join(sorted(unknown))}; known: {', '.join(TRAINERS)}")
    trainers = ["samestep"] if args.quick else args.trainers or list(TRAINERS)
    rows = compare(trainers, KILLS[:1] if args.quick else KILLS, args.forked)
    if not rows:
        raise SystemExit("None of the trainers is installed.")
    print(json.dumps(rows) if args.json else format_table(rows), end="\n" if args.json else "")
    if args.write:
        words = f"Measured on {datetime.date.today()} with torch {version('torch')} on {os.cpu_count()} CPU cores:\n"
        before, _, rest = PAGE.read_text().partition(BEGIN)
        # Times say more about the other load of the machine than about the trainers.
        untimed = [{name: value for name, value in row.items() if not name.startswith("seconds")} for row in rows]
        PAGE.write_text(before + BEGIN + f"\n{words}\n{format_table(untimed)}\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
