"""A writer of snapshots that dies at a chosen moment: `python dying_writer.py DIRECTORY`.

For every scenario and point = 0, 1, 2 ... it makes DIRECTORY/scenario/point with the scenario's older snapshots, and
forks a child that does the scenario's work there and is killed by SIGKILL just before its point-th call of the
operating system (open, write, fsync, rename ...), until a child has lived to the end.
"""

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from states import make_state, write_divided

from samestep.snapshot.store import Store

# 1.5 MB for each tensor, so that the files' buffers are written in several calls.
LARGE = 400_000
CALLS = {"open", "write", "flush", "fsync", "close", "mkdir", "rename", "unlink", "rmdir", "scandir", "submit"}


def write(store: Store, mark: float, step: int, name: str | None = None, num_values: int = 1000) -> None:
    store.write(make_state(mark, num_values), step=step, name=name, meta={"mark": mark})


def make_one(store: Store) -> None:
    write(store, 1, step=1)


def make_three(store: Store) -> None:
    for step in (1, 2, 3):
        write(store, step, step=step)


def make_named(store: Store) -> None:
    write(store, 1, step=1, name="best")


def leave_remains(store: Store) -> None:
    make_one(store)
    write(store, 2, step=2)
    os.rename(store.path / "step-00000002", store.path / ".old-step-00000002")
    (store.path / ".tmp-step-00000003").mkdir()
    (store.path / ".tmp-step-00000003" / "state.json").write_text("{")


def clean_and_write(store: Store) -> None:
    store.clean()
    write(store, 2, step=2)


# The snapshots before, the work, and the marks that the newest sound snapshot may have afterwards.
SCENARIOS: dict[str, tuple[Callable[[Store], object], Callable[[Store], object], set[int]]] = {
    "first": (lambda store: None, lambda store: write(store, 1, step=1), {1}),
    "next": (make_one, lambda store: write(store, 2, step=2, num_values=LARGE), {1, 2}),
    "divided": (make_one, lambda store: write_divided(store, 2, step=2, num_values=LARGE), {1, 2}),
    "replace": (make_one, lambda store: write(store, 2, step=1), {1, 2}),
    "replace named": (make_named, lambda store: write(store, 2, step=2, name="best"), {1, 2}),
    "prune": (make_three, lambda store: store.prune(1), {3}),
    "clean": (leave_remains, clean_and_write, {2}),
}


def die_at(point: int) -> None:
    """Kill this process just before the point-th call of the operating system from here on."""
    num_calls = 0

    def see(frame: object, event: str, function: Any) -> None:
        nonlocal num_calls
        if event == "c_call" and getattr(function, "__name__", "") in CALLS:
            if num_calls == point:
                os.kill(os.getpid(), signal.SIGKILL)
            num_calls += 1

    sys.setprofile(see)


def run(scenario: str, directory: Path) -> None:
    prepare, work, _ = SCENARIOS[scenario]
    for point in count():
        run_dir = directory / scenario / str(point)
        run_dir.mkdir(parents=True)
        store = Store(run_dir)
        prepare(store)
        child = os.fork()
        if child == 0:
            try:
                die_at(point)
                work(store)
                sys.setprofile(None)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        assert os.WIFSIGNALED(status), f"the child of point {point} failed with status {status}"


if __name__ == "__main__":
    for scenario in SCENARIOS:
        run(scenario, Path(sys.argv[1]))
