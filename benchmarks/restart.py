"""What a rank's death costs in time: from SIGKILL to the next finished step, by `samestep launch --max-restarts`, by
`--heal`, with which the others continue, and by torchrun with DDP and snapshots as in the tutorials.

Against the floor: the same command started by a person, which resumes from the same snapshot, from the command to its
first finished step. That starts processes, imports torch, and reads the snapshot; whoever dies has to be noticed, too,
and the others ended. Gloo ranks of 1 thread on one machine, or with `--hosts` on two hosts (network namespaces; needs
root); the ways in turns. A rank of the last host dies in a step that comes some steps after the snapshot; the last
column is the time until that step is done, which a restart computes again.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from common import Times, build_parser, compute_ratio, judge, print_json, print_machine, print_table
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from two_hosts import INTERFACE, Host, open_two_hosts, start_on

import samestep

WIDTH = 1024
SAVED, LOST = 4, 3  # steps until the snapshot, and from there until the kill
RESTART, HEAL, FLOOR = "SIGKILL, --max-restarts 1", "SIGKILL, --heal", "a fresh samestep launch"
TORCHRUN = "SIGKILL, torchrun --max-restarts 1, the tutorials' script"
PORT = 29400
TARGET = 1.3
HEAL_TARGET = 0.3  # of a restart's time


def build_model(num_mb: int) -> nn.Module:
    depth = max(1, round(num_mb * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def build_mark(marks: Path) -> Callable[[str, int], None]:
    def mark(what: str, step: int) -> None:
        with open(marks, "a") as file:
            print(what, step, time.monotonic(), file=file)  # of one clock in all processes

    if os.environ["RANK"] == "0":
        mark("start", -1)
    return mark


def die_if_due(mark: Callable[[str, int], None], step: int, kills: bool) -> None:
    """Kill the last rank of the first start."""
    is_last = int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"])
    if kills and is_last and step == SAVED + LOST and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        mark("kill", step)
        os.kill(os.getpid(), signal.SIGKILL)


def train(run_dir: Path, marks: Path, num_mb: int, num_steps: int, kills: bool) -> None:
    """A rank of the run that is timed: leaves in `marks` when it began, when it was killed, when each step was done."""
    mark = build_mark(marks)
    run = samestep.Run(run_dir, batch_size=16, micro_batch_size=4, snapshot_every="never", device="cpu")
    model = build_model(num_mb)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    run.prepare(model=model, optimizer=optimizer)
    for step in run.steps(torch.randn(64, WIDTH), num_steps):
        for x in step:
            die_if_due(mark, step.number, kills)
            step.backward((model(x) ** 2).mean())
        optimizer.step()
        if run.rank == 0:
            mark("step", step.number)
        if step.number + 1 == SAVED:
            run.snapshot("saved")


def train_as_tutorials_do(run_dir: Path, marks: Path, num_mb: int, num_steps: int, kills: bool) -> None:
    """The same with DDP, and a snapshot of the model as in the tutorial on fault tolerance with torchrun."""
    mark = build_mark(marks)
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    model = build_model(num_mb)
    path = run_dir / "snapshot.pt"
    first = 0
    if path.exists():
        snapshot = torch.load(path)
        model.load_state_dict(snapshot["MODEL_STATE"])
        first = snapshot["STEPS_RUN"]
    replica = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    data = torch.randn(64, WIDTH)
    sampler = DistributedSampler(data)  # type: ignore[arg-type, var-annotated]
    loader = DataLoader(data, batch_size=16 // world_size, sampler=sampler)  # type: ignore[arg-type, var-annotated]
    step = 0
    while step < num_steps:
        for x in loader:
            if first <= step < num_steps:
                die_if_due(mark, step, kills)
                optimizer.zero_grad()
                (replica(x) ** 2).mean().backward()
                optimizer.step()
                if dist.get_rank() == 0:
                    mark("step", step)
                    if step + 1 == SAVED:
                        run_dir.mkdir(exist_ok=True)
                        torch.save({"MODEL_STATE": model.state_dict(), "STEPS_RUN": step + 1}, path)
            step += 1
    dist.destroy_process_group()


class Mark(NamedTuple):
    """What a rank, or the launch itself as "command", left at a time."""

    what: str
    step: int
    at_s: float


FLAGS = {RESTART: ("--max-restarts", "1"), HEAL: ("--heal",), FLOOR: (), TORCHRUN: ("--max-restarts", "1")}


def build_commands(way: str, num_ranks: int, hosts: list[Host]) -> list[list[str]]:
    """The launcher's command for each host; without `hosts`, for this machine."""
    module = ["torch.distributed.run"] if way == TORCHRUN else ["samestep", "launch"]
    both = [sys.executable, "-m", *module, "--nproc-per-node", str(num_ranks // max(1, len(hosts))), *FLAGS[way]]
    if not hosts:
        return [both]
    meet = ["--nnodes", str(len(hosts)), "--rdzv-endpoint", f"{hosts[0].address}:{PORT}"]
    if way != TORCHRUN:
        return [[*both, *meet, "--node-rank", str(rank)] for rank in range(len(hosts))]
    c10d = ["--rdzv-backend", "c10d", "--rdzv-id", str(time.monotonic_ns())]
    own = [["--local-addr", host.address, "--rdzv-conf", f"is_host={host is hosts[0]}"] for host in hosts]
    return [[*both, *meet, *c10d, *words] for words in own]


def launch(
    way: str, run_dir: Path, num_mb: int, num_steps: int, *, num_ranks: int, hosts: list[Host], kills: bool
) -> list[Mark]:
    """Run the command to its end. Returns what was marked, in the order of time."""
    marks = run_dir.with_name(f"{run_dir.name}-marks")
    words = [__file__, "--train", str(run_dir), "--marks", str(marks), "--mb", str(num_mb), "--steps", str(num_steps)]
    words += [*(["--kill"] if kills else []), *(["--tutorial"] if way == TORCHRUN else [])]
    commands = [[*command, *words] for command in build_commands(way, num_ranks, hosts)]
    env = {"OMP_NUM_THREADS": "1"}
    if way == TORCHRUN:  # else gloo finds the addresses of the ranks before the restart
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **({"GLOO_SOCKET_IFNAME": INTERFACE} if hosts else {})}
    with tempfile.TemporaryFile("w+") as said, ExitStack() as stack:
        began_s = time.monotonic()
        if hosts:
            started = stack.enter_context(start_on(hosts, commands, said, env))
        else:
            started = [subprocess.Popen(commands[0], stdout=said, stderr=said, text=True, env=os.environ | env)]
        codes = [process.wait() for process in started]
        if any(codes):
            said.seek(0)
            sys.exit(f"{' '.join(commands[0])} ended with {codes}:\n{said.read()}")
    lines = [line.split() for line in marks.read_text().splitlines()]
    found = [Mark(what, int(step), float(at_s)) for what, step, at_s in lines]
    return sorted([Mark("command", -1, began_s), *found], key=lambda mark: mark.at_s)


class Seconds(NamedTuple):
    """From the death, or the command, until a step is done, and until the step in which the rank died is done."""

    to_next: float
    to_same: float


def read_times(marks: list[Mark], way: str) -> Seconds:
    since_s = next(mark.at_s for mark in marks if mark.what == ("command" if way == FLOOR else "kill"))
    steps = [mark for mark in marks if mark.what == "step" and mark.at_s > since_s]
    if way != HEAL:
        start_s = next(mark.at_s for mark in marks if mark.what == "start" and mark.at_s > since_s)
        steps = [mark for mark in steps if mark.at_s > start_s]
    else:  # rank 0 may still end the step before
        steps = [mark for mark in steps if mark.step >= SAVED + LOST]
    same_s = next(mark.at_s for mark in steps if mark.step == SAVED + LOST)
    return Seconds(steps[0].at_s - since_s, same_s - since_s)


def measure(num_mb: int, num_ranks: int, num_rounds: int, hosts: list[Host]) -> tuple[Times, Times]:
    """Seconds until a step is done, and until that step is. The first round warms up the disk's cache."""
    to_next: Times = {way: [] for way in FLAGS}
    to_same: Times = {way: [] for way in FLAGS}
    with tempfile.TemporaryDirectory() as folder:
        bases = {way: Path(folder) / f"base-{way == TORCHRUN}" for way in FLAGS}
        for way in (FLOOR, TORCHRUN):
            launch(way, bases[way], num_mb, SAVED, num_ranks=num_ranks, hosts=hosts, kills=False)
        for number in range(num_rounds + 1):
            for place, way in enumerate([*FLAGS][:: 1 if number % 2 else -1]):
                run_dir = Path(folder) / f"{number}-{place}"
                shutil.copytree(bases[way], run_dir)
                steps = SAVED + LOST + 1
                kills = way != FLOOR
                marks = launch(way, run_dir, num_mb, steps, num_ranks=num_ranks, hosts=hosts, kills=kills)
                seconds = read_times(marks, way)
                if number:
                    to_next[way].append(seconds.to_next)
                    to_same[way].append(seconds.to_same)
                shutil.rmtree(run_dir)
    return to_next, to_same


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--mb", type=int, default=100, help="of weights and optimizer state")
    parser.add_argument("--ranks", type=int, default=2, help="2 to 4")
    parser.add_argument("--rounds", type=int, default=9, help="times that each way is run")
    parser.add_argument("--hosts", action="store_true", help="on two hosts, with half of the ranks each")
    for words in (["--train"], ["--marks"]):
        parser.add_argument(*words, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    for word in ("--kill", "--tutorial"):
        parser.add_argument(word, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train_rank = train_as_tutorials_do if args.tutorial else train
        train_rank(args.train, args.marks, args.mb, args.steps, args.kill)
        return
    if args.quick:
        args.mb, args.rounds = 12, 1
    with ExitStack() as stack:
        hosts = stack.enter_context(open_two_hosts()) if args.hosts else []
        to_next, to_same = measure(args.mb, args.ranks, args.rounds, hosts)
    ratio = compute_ratio(to_next, RESTART, FLOOR)
    heal_ratio = compute_ratio(to_same, HEAL, RESTART)
    torchrun_ratio = compute_ratio(to_same, HEAL, TORCHRUN)
    if args.json:
        print_json(
            until_next_step_s=to_next,
            until_same_step_s=to_same,
            ratio=ratio,
            heal_ratio=heal_ratio,
            torchrun_ratio=torchrun_ratio,
        )
        return
    print_machine()
    rows = [
        [
            way,
            f"{statistics.median(to_next[way]):.2f}",
            f"{max(to_next[way]):.2f}",
            f"{statistics.median(to_same[way]):.2f}",
        ]
        for way in FLAGS
    ]
    title = f"{args.mb} MB of state, {args.ranks} ranks{' on 2 hosts' if args.hosts else ''}, seconds"
    print_table([title, "next step done", "slowest", "the same step done"], rows)
    print(f"a restart to the next step, of the floor's time: {judge(ratio, TARGET)}")
    print(f"healing to the same step, of a restart's time: {judge(heal_ratio, HEAL_TARGET)}")
    print(f"the same, of the time of torchrun with the tutorials' script: {judge(torchrun_ratio, None)}")


if __name__ == "__main__":
    main()
