"""A small training run in which one rank makes no progress, or seems to make none."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.tiny import Tiny, nothing, tiny_run, update
from torch import Tensor
from torch.optim import SGD

import samestep

AT_STEP = 6
LONG_S = 60.0  # a test that does not see the fault fails before
DATA = torch.ones(48, 4)


def train(run_dir: Path, fault: str, guilty: int = 1) -> None:
    """Trains; rank `guilty` has the fault of that name in FAULTS at step AT_STEP."""

    def then(t: Tiny) -> None:
        if t.step.number == AT_STEP:
            FAULTS[fault](t.run.rank == guilty)
        update(t)

    optimizer = lambda params: SGD(params, 0.01)  # noqa: E731
    with suppress(ValueError):
        tiny_run(run_dir, optimizer=optimizer, data=DATA, num_steps=12, body=learn_mean, then=then)
        return
    threading.Event().wait(LONG_S)  # as a server of the trained model would


def learn_mean(t: Tiny, x: Tensor) -> None:
    t.step.backward(t.model(x).mean())


def leave_the_loop(is_guilty: bool) -> None:
    if is_guilty:
        raise ValueError


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


FAULTS: dict[str, Callable[[bool], None]] = {
    "exception swallowed": leave_the_loop,
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
        learn_mean(t, x)

    tiny = Tiny(run_dir, optimizer=lambda params: SGD(params, 0.01))
    if what == "snapshot":
        write_slowly(tiny.run)
    validate = (lambda t: t.run.evaluate(score, DATA)) if what == "validation" else nothing
    tiny.train(1, data=DATA, body=body, after_epoch=validate)


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
