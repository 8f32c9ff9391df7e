"""A small training run in which one rank makes no progress, or seems to make none."""

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
from support.tiny import Tiny, update
from torch import Tensor
from torch.optim import SGD

import samestep

AT_STEP = 6
NUM_SAMPLES = 48
LONG_S = 60.0  # a test that does not see the fault fails before


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
    """Trains; rank `guilty` has the fault of that name in FAULTS at step AT_STEP."""
    tiny = Tiny(run_dir, optimizer=lambda params: SGD(params, 0.01))
    run, is_guilty = tiny.run, tiny.run.rank == guilty

    def on_read() -> None:
        if fault == "data set asleep" and is_guilty and run.steps_done == AT_STEP:
            time.sleep(LONG_S)
        if fault == "link dropped":  # by the test, while the run trains
            time.sleep(0.01)

    def body(t: Tiny, x: Tensor) -> None:
        pid_file = run_dir / f"pid-{run.rank}"
        if not pid_file.exists():
            pid_file.write_text(str(os.getpid()))
        if fault == "exception swallowed" and is_guilty and t.step.number == AT_STEP:
            raise ValueError("swallowed")
        t.step.backward(t.model(x).mean())

    def then(t: Tiny) -> None:
        if t.step.number == AT_STEP:
            FAULTS[fault](is_guilty)
        update(t)

    with suppress(ValueError):
        num_steps = 12 if fault != "link dropped" else 10_000
        tiny.train(data=Samples(on_read), num_steps=num_steps, body=body, then=then)
    if fault == "exception swallowed" and is_guilty:
        threading.Event().wait(LONG_S)  # as a server of the trained model would


def stop_itself(is_guilty: bool) -> None:
    if is_guilty:
        os.kill(os.getpid(), signal.SIGSTOP)


def skip_a_collective(is_guilty: bool) -> None:
    if not is_guilty:
        dist.all_reduce(torch.ones(1))


def lock_twice(is_guilty: bool) -> None:
    if is_guilty:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


def do_nothing(is_guilty: bool) -> None:
    pass


FAULTS: dict[str, Callable[[bool], None]] = {
    "link dropped": do_nothing,  # the test drops it
    "data set asleep": do_nothing,  # in the data set
    "exception swallowed": do_nothing,  # in the loop
    "SIGSTOP": stop_itself,
    "collective skipped": skip_a_collective,
    "locked out": lock_twice,
}


def train_slowly(run_dir: Path, what: str) -> None:
    """Trains to the end; something takes long, and is no fault."""

    def score(x: Tensor) -> dict[str, Any]:
        time.sleep(0.4)
        return {"loss": tiny.model(x).mean()}

    def body(t: Tiny, x: Tensor) -> None:
        if what == "first step" and t.step.number == 0:
            time.sleep(1.2)
        t.step.backward(t.model(x).mean())

    tiny = Tiny(run_dir, optimizer=lambda params: SGD(params, 0.01))
    if what == "snapshot":
        write_slowly(tiny.run)
    validate = (lambda t: t.run.evaluate(score, Samples())) if what == "validation" else (lambda t: None)
    tiny.train(1, data=Samples(), body=body, after_epoch=validate)


def write_slowly(run: samestep.Run) -> None:
    """Makes each snapshot take 5 s, while its file grows."""
    prepare: Any = run._context.location.prepare

    def slow(*arguments: Any) -> Any:
        directory = run._context.location.directory
        with open(directory.path / "slow.tmp" if directory else os.devnull, "wb", 0) as file:
            for _ in range(50):
                time.sleep(0.1)
                file.write(bytes(1 << 18))
        return prepare(*arguments)

    run._context.location.prepare = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
