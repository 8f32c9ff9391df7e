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

from task import BATCH_SIZE, NUM_EPOCHS, NUM_SAMPLES, NUM_STEPS  # noqa: E402

KILLS = (7, 26, 44, 63, 91)
TRAINERS = {
    "ddp": ("DDP + torchrun, the tutorials' script", ()),
    "accelerate": ("Accelerate", ("accelerate",)),
    "lightning": ("Lightning", ("lightning",)),
    "trainer": ("Hugging Face Trainer", ("transformers", "accelerate")),
    "samestep": ("samestep", ("samestep",)),
}
TIMEOUT_S = 900  # a busy machine may need minutes to import torch ten times


@dataclass(frozen=True)
class Outcome:
    """What one training did."""

    digest: str
    wall_s: float
    steps_repeated: int  # executions of a step whose effect was lost, or which took place twice
    samples_skipped: int  # in the steps that led to the final weights, over all epochs
    samples_repeated: int


def launch(trainer: str, num_ranks: int, variables: dict[str, str], directory: str) -> bool:
    """Start a trainer by its launcher. Returns whether it succeeded."""
    module = ["samestep", "launch"] if trainer == "samestep" else ["torch.distributed.run", "--standalone"]
    command = [sys.executable, "-m", *module, "--nproc-per-node", str(num_ranks), str(HERE / f"with_{trainer}.py")]
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
                runpy.run_path(str(HERE / f"with_{trainer}.py"), run_name="__main__")
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
        missing = [step for step in kills if not (Path(directory) / f"kill-{step}").exists()]
        if missing:
            raise SystemExit(f"{trainer} was not killed at the steps {missing}.")
        return evaluate(Path(directory), wall_s)


def evaluate(directory: Path, wall_s: float) -> Outcome:
    """Compare the records of all ranks with what a run without faults does: each sample once in each epoch."""
    executed = 0
    last: dict[int, list[int]] = {}  # step -> the samples of its last execution
    for file in sorted(directory.glob("steps-*")):
        of_rank = {}
        for line in file.read_text().splitlines():
            number, _, indices = line.partition(" ")
            of_rank[int(number)] = [int(index) for index in indices.split(",")]
            executed += file.name == "steps-0"
        for number, samples in of_rank.items():
            last.setdefault(number, []).extend(samples)
    skipped = repeated = 0
    steps_per_epoch = NUM_SAMPLES // BATCH_SIZE
    for epoch in range(NUM_EPOCHS):
        steps = range(epoch * steps_per_epoch + 1, (epoch + 1) * steps_per_epoch + 1)
        used = Counter(index for step in steps for index in last.get(step, []))
        skipped += NUM_SAMPLES - len(used)
        repeated += sum(used.values()) - len(used)
    return Outcome((directory / "digest").read_text(), wall_s, executed - NUM_STEPS, skipped, repeated)


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
                "trainer": " ".join([name, *(version(package) for package in packages[:1])]),
                "same bits on 1 process": alone.digest == undisturbed.digest,
                "same bits after the kills": killed.digest == undisturbed.digest,
                "steps computed twice": killed.steps_repeated,
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
        PAGE.write_text(before + BEGIN + f"\n{words}\n{format_table(rows)}\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
