"""A small training run in which one rank stops moving, or all only seem to."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samestep

AT_STEP = 6
NUM_SAMPLES, BATCH_SIZE, MICRO_BATCH_SIZE = 48, 8, 2
LONG_S = 60.0  # by when a test that does not see the fault has failed


class Samples(torch.utils.data.Dataset[Tensor]):
    """Ones; `on_read` is called before each."""

    def __init__(self, on_read: Callable[[], None] = lambda: None) -> None:
        self._on_read = on_read

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        self._on_read()
        return torch.ones(4)


def train(run_dir: Path, fault: str, guilty: int = 1) -> None:
    """Trains; rank `guilty` has the fault at step AT_STEP: a function of this module, with _ for each blank."""
    run = samestep.Run(run_dir, batch_size=BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE, device="cpu")
    is_guilty = run.rank == guilty
    strike = FAULTS[fault]
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run.prepare(model=model, optimizer=optimizer)
    begun = False

    def on_read() -> None:
        if fault == "data set asleep" and is_guilty and run.steps_done == AT_STEP:
            time.sleep(LONG_S)
        if fault == "link dropped":  # by the test, while the run goes on
            time.sleep(0.01)

    def loop() -> None:
        nonlocal begun
        for step in run.steps(Samples(on_read), 12 if fault != "link dropped" else 10_000):
            for x in step:
                if not begun:
                    begun = True
                    (run_dir / f"pid-{run.rank}").write_text(str(os.getpid()))
                if fault == "exception swallowed" and is_guilty and step.number == AT_STEP:
                    raise ValueError("swallowed")
                step.backward(model(x).mean())
            if step.number == AT_STEP:
                strike(is_guilty)
            optimizer.step()

    with suppress(ValueError):
        loop()
    if fault == "exception swallowed" and is_guilty:
        threading.Event().wait(LONG_S)  # it serves, say, what it has trained


def stop_itself(is_guilty: bool) -> None:
    if is_guilty:
        os.kill(os.getpid(), signal.SIGSTOP)


def skip_a_collective(is_guilty: bool) -> None:
    if not is_guilty:
        dist.all_reduce(torch.ones(1))


def fill_a_pipe(is_guilty: bool) -> None:
    if is_guilty:
        _, end = os.pipe()
        os.write(end, bytes(1 << 20))


def lock_twice(is_guilty: bool) -> None:
    if is_guilty:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


def do_nothing(is_guilty: bool) -> None:
    pass


FAULTS: dict[str, Callable[[bool], None]] = {
    "link dropped": do_nothing,  # it is not in here
    "data set asleep": do_nothing,  # it is in the data set
    "exception swallowed": do_nothing,  # it is in the loop
    "SIGSTOP": stop_itself,
    "collective skipped": skip_a_collective,
    "pipe full": fill_a_pipe,
    "locked out": lock_twice,
}


def train_unevenly(run_dir: Path) -> None:
    """Trains to the end; rank 1 takes longer for each forward, and rank 0 waits for it, in its backward as well."""
    run = samestep.Run(run_dir, batch_size=2, micro_batch_size=1, device="cpu", bucket_cap_mb=4)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(2)])  # a bucket each, too large for one message
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    run.prepare(model=model, optimizer=optimizer)
    for step in run.steps([torch.ones(1024)] * 8, 80):
        for x in step:
            if run.rank == 1:
                time.sleep(0.05)
            step.backward(model(x).mean())
        optimizer.step()


def train_slowly(run_dir: Path, what: str) -> None:
    """Trains to the end; something takes long, and is no fault."""
    run = samestep.Run(run_dir, batch_size=BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE, device="cpu")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run.prepare(model=model, optimizer=optimizer)
    if what == "snapshot":
        write_slowly(run)

    def score(x: Tensor) -> dict[str, Any]:
        time.sleep(0.4)
        return {"loss": model(x).mean()}

    for epoch in run.epochs(Samples(), 1):
        for step in epoch:
            for x in step:
                if what == "first step" and step.number == 0:
                    time.sleep(1.2)
                step.backward(model(x).mean())
            optimizer.step()
        if what == "validation":
            run.evaluate(score, Samples())


def write_slowly(run: samestep.Run) -> None:
    """Has each snapshot take 5 s, in which its bytes grow."""
    write: Any = run._snapshotter._write

    def slow(*arguments: Any) -> None:
        with open(
            run._snapshotter.directory.path / "slow.tmp" if run._snapshotter.directory else os.devnull, "wb", 0
        ) as file:
            for _ in range(50):
                time.sleep(0.1)
                file.write(bytes(1 << 18))
        write(*arguments)

    run._snapshotter._write = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
