"""Random faults on a small run, for minutes or hours: `make chaos`, or `python tests/chaos.py --help`.

A sequence is one run that is started several times. Each start ("round") has its own number of ranks and nodes, random
faults (see promises/faulty.py), and perhaps a snapshot that is damaged beforehand. The last round has no faults. Then
the run must have the digest, the metrics and the ledger of a run without faults. Every choice follows from the
sequence's seed, so a failing sequence can be repeated.
"""

import argparse
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from promises.faulty import (
    IN_BODY,
    IN_SAVING,
    IN_STEP,
    KINDS,
    NUM_MICRO_BATCHES,
    NUM_STEPS,
    SECOND_PASS,
    STEPS_PER_EPOCH,
    train,
)  # fmt: skip
from promises.trial import Outcome, Started, Trial, read_outcome
from support.disks import open_disk
from support.ports import reserve_port

import samestep

ACTIONS = ("kill", "kill", "kill", "raise", "exit", "exhaust", "freeze", "preempt", "remove", "backdate")
LAUNCHER_SIGNALS = ("SIGKILL", "SIGTERM", "SIGUSR1", "SIGINT")
DAMAGES = ("flip a byte", "cut", "empty", "delete")
HOWS = ("spawn", "launch", "nodes")
HEALING = ("heal", "heal-nodes", "heal-3-nodes")
MAX_ROUNDS = 5
ROUND_DEADLINE_S = 240.0


@dataclass(frozen=True)
class Round:
    """One start of the run.

    Attributes:
        nodes: the number of ranks on each node; one node is a `spawn` or a `launch`.
        how: "spawn", "launch", "nodes" (as many launchers on this machine as there are nodes), "heal", "heal-nodes" or
            "heal-3-nodes" (the same with `--heal`).
        faults: in the grammar of promises/faulty.py.
        struck_node, sent: the launcher that receives a signal while the last fault holds a rank, and the signal.
        snapshot_every: steps.
        num_workers: loader workers of each rank.
        damage: what happens to a file of the newest snapshot before this start; "" for nothing.
    """

    nodes: tuple[int, ...]
    how: str
    faults: tuple[str, ...] = ()
    struck_node: int = 0
    sent: str = ""
    snapshot_every: int = 5
    num_workers: int = 0
    damage: str = ""

    def __str__(self) -> str:
        words = [f"{self.how} {'+'.join(map(str, self.nodes))}", *self.faults]
        if self.sent:
            words.append(f"{self.sent} to launcher {self.struck_node}")
        return ", ".join([*([f"{self.damage} in the newest snapshot"] if self.damage else []), *words])


def plan_sequence(seed: int, hows: Sequence[str] = HOWS) -> list[Round]:
    """The rounds of the sequence with this seed; the last one has no faults. `hows`: as `Round.how`."""
    choose = random.Random(seed)
    kind = choose_kind(seed)
    num_rounds = choose.randint(1, MAX_ROUNDS)
    # Faults come later from round to round, so that an early round seldom finishes the run.
    edges = [i * NUM_STEPS // num_rounds for i in range(num_rounds + 1)]
    rounds = [_plan_round(choose, hows, range(*pair)) for pair in pairwise(edges)]
    if kind == "adversary":  # some in its second pass
        moved = [tuple(fault.replace("in update", f"in {SECOND_PASS}") for fault in each.faults) for each in rounds]
        rounds = [replace(each, faults=faults) for each, faults in zip(rounds, moved, strict=True)]
    return [*rounds, Round((choose.randint(1, NUM_MICRO_BATCHES),), "spawn")]


def choose_kind(seed: int) -> str:
    """The model of the sequence with this seed. Apart from the plan, so that a seed keeps its plan."""
    return random.Random(f"{seed}").choice(KINDS)


def _plan_round(choose: random.Random, hows: Sequence[str], steps: range) -> Round:
    how = choose.choice(hows)
    has_nodes = how.endswith("nodes")
    num_nodes = 3 if how == "heal-3-nodes" else 2 if has_nodes else 1
    world_size = choose.randint(num_nodes, NUM_MICRO_BATCHES)
    first = choose.randint(1, world_size - num_nodes + 1) if has_nodes else world_size
    nodes = (first, *(1 for _ in range(num_nodes - 2)), world_size - first - num_nodes + 2)[:num_nodes]
    num_workers = choose.choice([0, 0, 1])
    faults = [_plan_fault(choose, world_size, num_workers, steps) for _ in range(choose.randint(1, 3))]
    sent = choose.choice(LAUNCHER_SIGNALS) if how != "spawn" and choose.random() < 0.4 else ""
    if sent:
        faults.append(f"hold rank {choose.randrange(world_size)} at step {choose.choice(steps)} in forward")
    damage = choose.choice(DAMAGES) if steps[0] and choose.random() < 0.3 else ""
    return Round(
        nodes, how, tuple(dict.fromkeys(faults)), choose.randrange(len(nodes)), sent, choose.choice([1, 2, 3, 5]),
        num_workers, damage,
    )  # fmt: skip


def _plan_fault(choose: random.Random, world_size: int, num_workers: int, steps: range) -> str:
    moment = choose.choice(["start", *IN_STEP, *IN_BODY, *IN_SAVING, *(["worker"] if num_workers else [])])
    action, rank = choose.choice(ACTIONS), choose.randrange(world_size)
    is_of_run = action in ("remove", "backdate")
    if moment in IN_SAVING or is_of_run:
        rank = 0  # which saves
    step = choose.choice(steps)
    if moment in IN_BODY:  # which follow an epoch
        step = STEPS_PER_EPOCH * (step // STEPS_PER_EPOCH + 1)
    if moment == "worker" and is_of_run:
        moment = "forward"
    who = "all ranks" if choose.random() < 0.2 and moment not in IN_SAVING and not is_of_run else f"rank {rank}"
    return f"{action} {who} at step {step} in {moment}"


def run_sequence(
    rounds: Sequence[Round], reference: Outcome, directory: Path, *, on_small_disk: bool, kind: str = KINDS[0]
) -> None:
    """Run the rounds in a new directory.

    Raises:
        AssertionError: a round does not end, succeeds before the run has finished, or leaves a process; or the run
            does not end as one without faults.
    """
    run_dir = directory / "run"
    with ExitStack() as stack:
        stack.enter_context(_printing_to(directory / "output"))
        if on_small_disk:
            stack.enter_context(open_disk(run_dir))
        trial = Trial(run_dir, [])
        stack.callback(trial.close)
        for round_ in rounds:
            # A run whose only snapshot is damaged is refused.
            if round_.damage and sum(name.startswith("step-") for name in trial.snapshots) > 1:
                _damage(trial, round_.damage)
            _run_round(trial, round_, kind)
        found = trial.outcome()
        for name in ("digest", "digest_of_best", "metrics", "ledger"):
            assert getattr(found, name) == getattr(reference, name), f"{name} differs from the run without faults"


@contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Redirect the output of this process and of the ranks that it spawns."""
    sys.stdout.flush()
    with open(path, "wb") as file:
        kept = [os.dup(1), os.dup(2)]
        try:
            for fd in (1, 2):
                os.dup2(file.fileno(), fd)
            yield
        finally:
            for fd in (1, 2):
                os.dup2(kept[fd - 1], fd)
                os.close(kept[fd - 1])


def _run_round(trial: Trial, round_: Round, kind: str) -> None:
    flags = ["--snapshot-every", str(round_.snapshot_every)]
    for name in ("go", "launcher"):
        (trial.faults / name).unlink(missing_ok=True)
    for held in trial.faults.glob("held-*"):
        held.unlink()
    with trial.killing_the_frozen(), ExitStack() as stack:
        if round_.how == "spawn":
            _spawn(trial, round_, kind)
            return
        arguments = [word for fault in round_.faults for word in ("--fault", fault)]
        arguments += ["--num-workers", str(round_.num_workers), "--kind", kind]
        flags += ["--heal"] if round_.how in HEALING else []
        if len(round_.nodes) > 1:
            port = stack.enter_context(reserve_port())
            flags += ["--nnodes", str(len(round_.nodes)), "--rdzv-endpoint", f"127.0.0.1:{port}"]
        started = [
            trial.start("launch", num_ranks, "", *flags, *_node_rank(round_, node), arguments=arguments)
            for node, num_ranks in enumerate(round_.nodes)
        ]
        if round_.sent:
            _strike_launcher(trial, started, round_)
        codes = [one.wait(ROUND_DEADLINE_S) for one in started]
    assert any(codes) or trial.num_ends, f"exit code 0 before the run has finished:\n{started[0].output}"


def _node_rank(round_: Round, node: int) -> list[str]:
    return ["--node-rank", str(node)] if len(round_.nodes) > 1 else []


def _spawn(trial: Trial, round_: Round, kind: str) -> None:
    try:
        trial.spawn(
            sum(round_.nodes), round_.faults, snapshot_every=round_.snapshot_every, num_workers=round_.num_workers,
            kind=kind,
        )  # fmt: skip
    except Exception:
        if not round_.faults:
            raise


def _strike_launcher(trial: Trial, started: list[Started], round_: Round) -> None:
    """Send a signal to a launcher while a rank is held in a step, unless another fault ends the round first."""
    deadline_s = time.monotonic() + ROUND_DEADLINE_S
    while not any(trial.faults.glob("held-*")) and all(one.process.poll() is None for one in started):
        assert time.monotonic() < deadline_s, f"no rank is held, and no launcher ends:\n{started[0].output}"
        time.sleep(0.01)
    struck = started[round_.struck_node].process
    if struck.poll() is None:
        struck.send_signal(signal.Signals[round_.sent])
        (trial.faults / "launcher").touch()
    trial.go_on()


def _damage(trial: Trial, how: str) -> None:
    snapshot = trial.dir / "snapshots" / trial.snapshots[-1]
    files = sorted(path for path in snapshot.iterdir() if path.is_file() and path.name != "manifest.json")
    path = files[len(trial.snapshots) % len(files)]
    data = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
        return
    if how == "flip a byte":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[: {"cut": len(data) // 2, "empty": 0}.get(how, len(data))])


def main() -> int:
    """Run sequences until the time is over. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="of the first sequence; the next ones count up; default: random")
    parser.add_argument("--sequences", type=int, help="stop after this many")
    parser.add_argument("--minutes", type=float, default=10.0, help="start no new sequence after this; default: 10")
    known = ", ".join((*HOWS, *HEALING))
    parser.add_argument("--hows", default=",".join(HOWS), help=f"how rounds start: {known}; default: the first 3")
    parser.add_argument(
        "--heal", action="store_const", dest="hows", const=",".join(HEALING), help="start all by launch --heal"
    )
    parser.add_argument("--plan", action="store_true", help="print the rounds of the sequences and run nothing")
    args = parser.parse_args()
    first = secrets.randbelow(10**6) if args.seed is None else args.seed
    count = args.sequences or (1 if args.plan else 10**9)
    end_s, failed, num_done = time.monotonic() + 60 * args.minutes, [], 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as reference_dir:
        references: dict[str, Outcome] = {}  # by the kind of model
        for seed in range(first, first + count):
            rounds = plan_sequence(seed, args.hows.split(","))
            kind = choose_kind(seed)
            title = f"seed {seed}, {kind}: " + " | ".join(map(str, rounds))
            if args.plan:
                print(title)
                continue
            if time.monotonic() > end_s:
                break
            if kind not in references:
                with _printing_to(Path(reference_dir, "output")):
                    samestep.spawn(train, 1, (Path(reference_dir, kind),), {"kind": kind})
                references[kind] = read_outcome(Path(reference_dir, kind))
            if not _report(seed, title, rounds, references[kind], args.hows):
                failed.append(seed)
            num_done += 1
    if not args.plan:
        print(f"{num_done - len(failed)} of {num_done} sequences ended as the run without faults", flush=True)
    return 1 if failed else 0


def _report(seed: int, title: str, rounds: list[Round], reference: Outcome, hows: str) -> bool:
    """Run one sequence and print a line; if it fails, also the cause and the command that repeats it."""
    directory = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
    kind = choose_kind(seed)
    on_small_disk = seed % 4 == 0 and os.geteuid() == 0 and sys.platform == "linux"
    begin_s = time.monotonic()
    try:
        run_sequence(rounds, reference, directory, on_small_disk=on_small_disk, kind=kind)
    except BaseException as error:
        print(f"FAILED {title}\n  files: {directory}", flush=True)
        print(f"  again: python tests/chaos.py --seed {seed} --sequences 1 --hows {hows}")
        traceback.print_exc()
        if not isinstance(error, Exception):
            raise
        return False
    shutil.rmtree(directory, ignore_errors=True)
    print(f"ok {time.monotonic() - begin_s:5.1f} s  {title}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
