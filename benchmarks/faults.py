"""What a fault costs in time: from a rank's stall to the line that names it, from a host's loss to the next step.

Standing still: 2 ranks of `samestep launch`, one of which falls asleep in its data set, computes without end, or is
stopped (SIGSTOP). Nothing may be said before the limit: 10 s, for steps as short as these. A host lost, of two that
`samestep launch --nnodes 2 --heal` runs on: its processes are killed, or its link goes down without a word. Needs root.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import build_parser, print_json, print_machine, print_table
from torch import Tensor, nn
from two_hosts import Host, kill_tree, open_two_hosts, start_on

import samestep
from samestep.watch.diagnosis import build_limits

AT_STEP = 100
STEP_S = 0.02  # about: each sample takes its part of it to load
BATCH_SIZE = 8
PORT = 29400
DEADLINE_S = 120.0
STANDSTILLS = ("asleep in the data set", "computing without end", "stopped (SIGSTOP)")
LOSSES = ("its processes are killed", "its link goes down")


class Samples(torch.utils.data.Dataset[Tensor]):
    """Ones; `on_read` is called before each."""

    def __init__(self, on_read: Callable[[], None]) -> None:
        self._on_read = on_read

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        self._on_read()
        time.sleep(STEP_S * 2 / BATCH_SIZE)
        return torch.ones(16)


def train(run_dir: Path, marks: Path, stall: str) -> None:
    """A rank of the run that is timed: leaves in `marks` what happened, and when."""

    def mark(what: str) -> None:
        with open(marks, "a") as file:
            print(what, time.monotonic(), file=file)  # of one clock in all processes

    run = samestep.Run(run_dir, batch_size=BATCH_SIZE, micro_batch_size=4, snapshot_every="25", device="cpu")
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run.prepare(model=model, optimizer=optimizer)
    is_guilty = bool(stall) and run.rank == run.world_size - 1
    has_struck = False

    def strike(which: str) -> None:
        nonlocal has_struck
        if has_struck or not is_guilty or stall != which or run.steps_done != AT_STEP:
            return
        has_struck = True
        mark("fault")
        if which == STANDSTILLS[0]:
            time.sleep(DEADLINE_S)
        elif which == STANDSTILLS[1]:
            while True:
                torch.ones(1000).sum()
        else:
            os.kill(os.getpid(), signal.SIGSTOP)

    for step in run.steps(Samples(lambda: strike(STANDSTILLS[0])), 10**6):
        for x in step:
            strike(STANDSTILLS[1])
            strike(STANDSTILLS[2])
            step.backward(model(x).mean())
        optimizer.step()
        if run.rank == 0:
            mark(f"step-{run.world_size}")


def read_marks(marks: Path, what: str) -> list[float]:
    """When it was marked."""
    lines = marks.read_text().split("\n")[:-1] if marks.exists() else []
    return [float(at) for kind, at in (line.split() for line in lines) if kind == what]


def wait_for(condition: Callable[[], bool], what: str, log: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"not within {DEADLINE_S:.0f} s: {what}; the launcher said:\n{log.read_text()}")
        time.sleep(0.01)


def build_words(folder: Path, stall: str, *flags: str) -> list[str]:
    words = [sys.executable, "-m", "samestep", "launch", *flags, __file__]
    return [*words, "--train", str(folder / "run"), "--marks", str(folder / "marks"), "--stall", stall]


def time_stall(stall: str) -> tuple[float, str]:
    """Seconds from the fault to the line that names the rank, and the line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = build_words(folder, stall, "--nproc-per-node", "2")
        launcher = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        clock = threading.Timer(DEADLINE_S, kill_tree, (launcher.pid,))
        clock.start()
        assert launcher.stderr is not None
        said, named_at = "", None
        try:
            for line in launcher.stderr:
                said += line
                if "rank 1 (host" in line:
                    named_at = time.monotonic()
                    break
        finally:
            clock.cancel()
            kill_tree(launcher.pid)
            launcher.communicate()
        struck = read_marks(folder / "marks", "fault")
        if named_at is None or not struck:
            sys.exit(f"rank 1 was not named, {stall}:\n{said}")
        return named_at - struck[0], line.strip()


def time_loss(loss: str, hosts: list[Host]) -> float:
    """Seconds from the loss of the second host to the next step, which the first one finishes alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log, marks = folder / "said", folder / "marks"
        flags = ["--nnodes", "2", "--heal", "--rdzv-endpoint", f"{hosts[0].address}:{PORT}", "--node-rank"]
        words = [build_words(folder, "", *flags, str(node)) for node in range(2)]
        with open(log, "w") as said, start_on(hosts, words, said, {}) as launchers:
            wait_for(lambda: len(read_marks(marks, "step-2")) > AT_STEP, "both hosts train", log)
            lost_at = time.monotonic()
            if loss == LOSSES[0]:
                kill_tree(launchers[1].pid)
            else:
                hosts[1].pull_the_plug()

            def list_steps() -> list[float]:
                return [at for at in read_marks(marks, "step-1") if at > lost_at]

            wait_for(lambda: bool(list_steps()), "a step after the loss", log)
            return min(list_steps()) - lost_at


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times that each fault is planted")
    for word in ("--train", "--marks"):
        parser.add_argument(word, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stall", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train, args.marks, args.stall)
        return
    num_rounds = 1 if args.quick else args.rounds
    stalls, losses = (STANDSTILLS[2:], LOSSES[:1]) if args.quick else (STANDSTILLS, LOSSES)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    limit_s = build_limits(None).floor_s
    if not args.json:
        print_machine()
    named = {what: [time_stall(what) for _ in range(num_rounds)] for what in stalls}
    lost: dict[str, list[float]] = {what: [] for what in losses}
    for _ in range(num_rounds):
        for what, times in lost.items():
            with open_two_hosts() as hosts:
                times.append(time_loss(what, hosts))
    if args.json:
        print_json(limit_s=limit_s, until_named_s=named, until_next_step_s=lost)
        return
    rows = []
    for what, found in named.items():
        seconds = [named_s for named_s, _ in found]
        rows.append([what, f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"])
    print_table([f"a rank, until it is named (limit {limit_s:g} s), seconds", "median", "slowest"], rows)
    rows = [[what, f"{statistics.median(times):.1f}", f"{max(times):.1f}"] for what, times in lost.items()]
    print_table(["one host of two, until the next finished step, seconds", "median", "slowest"], rows)
    for found in named.values():
        print(found[0][1])


if __name__ == "__main__":
    main()
