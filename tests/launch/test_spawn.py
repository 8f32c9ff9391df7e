"""`samestep.spawn`: any function on several ranks, what it returns and raises. (conftest.py: no process remains.)"""

import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.waiting import wait_until

import samestep
from samestep.launch.launcher import Agent


def sum_ranks(scale: int = 1) -> tuple[torch.Tensor, int]:
    dist.init_process_group("gloo")
    x = torch.tensor([dist.get_rank() + 1]) * scale
    dist.all_reduce(x)
    return x, os.getpid()


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"rank 1 was killed by SIGKILL \(out of memory\?\)"),
        (lambda: os._exit(3), "rank 1 ended with exit code 3"),
        (lambda: sys.exit(4), "rank 1 exited with code 4"),
    ],
)
def test_a_rank_that_dies(end: Any, said: str) -> None:
    def die() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            print("my last words")
            end()
        dist.barrier()

    with pytest.raises(RuntimeError, match=said) as caught:
        samestep.spawn(die, 2)
    assert caught.value.__notes__ == ["rank 1 printed at the end:\nmy last words"]


def test_sys_exit_0_returns_none() -> None:
    assert samestep.spawn(lambda: sys.exit(0), 2) is None


@pytest.mark.parametrize("num_ranks", [0, -1, "2"])
def test_a_wrong_number_of_ranks(num_ranks: Any) -> None:
    with pytest.raises(samestep.InvalidValue, match="at least 1"):
        samestep.spawn(os.getpid, num_ranks)


# Two new servers import torch: 8 s, and far more on a busy machine.
def test_a_killed_server_is_replaced() -> None:
    def kill_server() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(samestep.Error, match="the process that starts the ranks has died or was killed"):
        samestep.spawn(kill_server)
    assert samestep.spawn(sum_ranks, 1)[0].item() == 1


@pytest.mark.parametrize(("heeds", "is_early"), [(True, False), (False, False), (True, True)])
def test_keyboard_interrupt_stops_all(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, heeds: bool, is_early: bool
) -> None:
    """`is_early`: before the ranks have reported their start."""

    def wait(heeds: bool) -> None:
        def leave(*_: object) -> None:
            (tmp_path / f"saved{os.environ['RANK']}").touch()
            sys.exit(0)

        if heeds:
            signal.signal(signal.SIGTERM, leave)
        (tmp_path / f"ready{os.environ['RANK']}").touch()
        time.sleep(600)

    def interrupt() -> None:
        wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, "two ranks")
        os.kill(os.getpid(), signal.SIGINT)

    def poll(agent: Agent) -> None:
        monkeypatch.undo()
        interrupt()

    if is_early:
        monkeypatch.setattr(Agent, "poll", poll)
    thread = threading.Thread(target=(lambda: None) if is_early else interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        samestep.spawn(wait, 2, (heeds,))
    thread.join()
    assert len(list(tmp_path.glob("saved*"))) == (2 if heeds else 0)


class NotPicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("I stay")


class NeedsTwo(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize("kind", [NotPicklable, NeedsTwo])
def test_errors_that_cannot_be_pickled(kind: type[Exception]) -> None:
    def fail() -> None:
        raise kind(1, 2)

    with pytest.raises(RuntimeError, match=f"rank 0 raised {kind.__name__}: ") as caught:
        samestep.spawn(fail)
    assert f"{kind.__name__}: " in caught.value.__notes__[0]
