"""What starting costs: `samestep --help`, and from the command to the first step, against torchrun.

1, 2 and 4 ranks, and a rank on each of two hosts, which need root (left out otherwise, or with --no-hosts). The
commands run in turns, each alone. The recipe's first step is done when it prints its closing table: that is a little
late, as the run has been saved by then. `spawn` is timed in this process, after a first call.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist
from common import Times, build_parser, compute_ratio, judge, print_json, print_machine, print_table
from two_hosts import INTERFACE, Host, open_two_hosts, start_on, why_not

import samestep

HELP, TRAIN, TORCHRUN = "samestep --help", "samestep train mlp", "torchrun, the tutorials' script"
HELP_TARGET_S = 0.3
TARGET = 0.7
SCRIPT = str(Path(__file__).with_name("seeds_ddp.py"))
HOSTS = "2 hosts"
PORT = 29400


def time_commands(commands: list[list[str]], mark: str, hosts: list[Host], tries: int = 3) -> tuple[float, float]:
    """Seconds until one of them prints a line with `mark`, and until all have ended.

    Commands that fail are timed again: under torchrun, torch 2.13 now and then aborts while it takes gloo down.

    Args:
        commands: of `python -m`; one, or one for each of the hosts.
        hosts: where they run; empty: here.
    """
    reading, writing = os.pipe()
    words = [[sys.executable, "-m", *command] for command in commands]
    said, first_s = "", None
    with ExitStack() as stack, open(reading) as lines:
        began = time.perf_counter()
        if hosts:
            started = stack.enter_context(start_on(hosts, words, writing, {"GLOO_SOCKET_IFNAME": INTERFACE}))
        else:
            started = [stack.enter_context(subprocess.Popen(words[0], stdout=writing, stderr=writing, text=True))]
        os.close(writing)
        for line in lines:
            said += line
            if first_s is None and mark in line:
                first_s = time.perf_counter() - began
        codes = [process.wait() for process in started]
        whole_s = time.perf_counter() - began
    if any(codes) or first_s is None:
        if tries == 1:
            sys.exit(f"{' '.join(commands[0])} ended with {codes}:\n{said}")
        return time_commands(commands, mark, hosts, tries - 1)
    return first_s, whole_s


def build_commands(where: str, hosts: list[Host], run_dir: str) -> dict[str, tuple[list[list[str]], str]]:
    """Name -> its command, or one per host, and the mark of the first step. `where`: a key of the results."""
    num_ranks = "1" if where == HOSTS else where
    train = ["samestep", "train", "mlp", "--max-steps", "1", "--device", "cpu", "--run-dir", run_dir]
    torchrun = ["torch.distributed.run"]
    script = [SCRIPT, "1", "1", "--max_steps", "1"]
    both = ["--nproc-per-node", num_ranks]
    ours: list[list[str]] = [[*train, *both]]
    theirs: list[list[str]] = [[*torchrun, *both, *script]]
    if where == HOSTS:
        meet = ["--nnodes", "2", "--rdzv-endpoint", f"{hosts[0].address}:{PORT}"]
        c10d = ["--rdzv-backend", "c10d", "--rdzv-id", Path(run_dir).name]
        ours = [[*train, *both, *meet, "--node-rank", str(rank)] for rank in (0, 1)]
        own = [["--local-addr", host.address, "--rdzv-conf", f"is_host={host.number == 1}"] for host in hosts]
        theirs = [[*torchrun, *both, *meet, *c10d, *words, *script] for words in own]
    return {TRAIN: (ours, "steps"), TORCHRUN: (theirs, "first step")}


def measure(where: str, hosts: list[Host], num_rounds: int) -> tuple[Times, Times]:
    """Seconds to the first step, and to the end, per command and round. The first round warms up the disk's cache."""
    first: Times = {TRAIN: [], TORCHRUN: []}
    whole: Times = {TRAIN: [], TORCHRUN: []}
    there = hosts if where == HOSTS else []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_rounds + 1):
            commands = build_commands(where, hosts, f"{folder}/{number}")
            for name in list(commands)[:: 1 if number % 2 else -1]:
                first_s, whole_s = time_commands(*commands[name], there)
                if number:
                    first[name].append(first_s)
                    whole[name].append(whole_s)
    return first, whole


def join() -> None:
    dist.init_process_group("gloo")


def time_spawn(num_ranks: int, num_rounds: int) -> float:
    """Median seconds of a spawn of ranks that form a group, by a server that is warm."""
    samestep.spawn(join, num_ranks, device="cpu")
    times = []
    for _ in range(num_rounds):
        began = time.perf_counter()
        samestep.spawn(join, num_ranks, device="cpu")
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks on this machine")
    parser.add_argument("--no-hosts", action="store_true", help="leave out the two hosts")
    parser.add_argument("--rounds", type=int, default=5, help="times that each command is run")
    args = parser.parse_args()
    num_rounds = 1 if args.quick else args.rounds
    ranks = [2] if args.quick else args.ranks
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not args.json:
        print_machine()
    spawn_s = {num_ranks: time_spawn(num_ranks, num_rounds) for num_ranks in ranks}
    help_s = statistics.median(time_commands([["samestep", "--help"]], "samestep", [])[1] for _ in range(num_rounds))
    first: dict[str, Times] = {}
    whole: dict[str, Times] = {}
    with ExitStack() as stack:
        hosts = [] if args.no_hosts or why_not() else stack.enter_context(open_two_hosts())
        for where in [*map(str, ranks), *([HOSTS] if hosts else [])]:
            first[where], whole[where] = measure(where, hosts, num_rounds)
    ratios = {where: compute_ratio(times, TRAIN, TORCHRUN) for where, times in first.items()}
    if args.json:
        print_json(first_step_s=first, whole_command_s=whole, spawn_s=spawn_s, help_s=help_s, ratios=ratios)
        return
    rows = []
    for where in first:
        for name in (TRAIN, TORCHRUN):
            medians = [f"{statistics.median(times[where][name]):.2f}" for times in (first, whole)]
            ratio = judge(ratios[where], TARGET) if name == TRAIN else ""
            rows.append([f"{where if where == HOSTS else f'ranks: {where}'}, {name}", *medians, ratio])
    print_table(["gloo, seconds", "to the first step", "whole command", "first step, of torchrun's"], rows)
    if not hosts:
        print(f"{HOSTS}: left out{'' if args.no_hosts else f': {why_not()}'}")
    print(f"samestep --help: {help_s:.3f} s (<= {HELP_TARGET_S} s {'met' if help_s <= HELP_TARGET_S else 'MISSED'})")
    spawns = ", ".join(f"{seconds:.2f} s for {num_ranks}" for num_ranks, seconds in spawn_s.items())
    print(f"a further samestep.spawn of ranks that form a group: {spawns}")


if __name__ == "__main__":
    main()
