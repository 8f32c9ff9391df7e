"""The thread that waits for large messages."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.errors import PeerFailed
from samestep.world import transport
from samestep.world.group import Group
from samestep.world.process_group import Waiter, wait_for_messages


class Message:
    """A message that is complete when `is_there` is set."""

    def __init__(self, error: str = "") -> None:
        self.is_waited_for = threading.Event()
        self.is_there = threading.Event()
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        self.is_waited_for.set()
        self.is_there.wait()
        if self._error:
            raise RuntimeError(self._error)


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    others = {*threading.enumerate()}
    waiter = Waiter()
    (thread,) = {*threading.enumerate()} - others
    yield waiter
    waiter.close()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "wait",
    [
        lambda group, message: group.wait_for([message]),
        lambda group, message: group._broadcast_tensor(torch.zeros(transport.LARGE_BYTES), source=1),
    ],
    ids=["an exchange", "a large broadcast"],
)
def test_a_wait_is_given_up(monkeypatch: pytest.MonkeyPatch, waiter: Waiter, wait: Callable[..., None]) -> None:
    """Gloo would wait on for the rest of a message of which a rank that has died has sent a part."""
    message, group = Message(), Group(0, 2, torch.device("cpu"))
    monkeypatch.setattr(transport, "_begin", lambda *_: message)
    group.waiter = waiter

    def give_up() -> None:
        message.is_waited_for.wait()
        group._break_connections()

    thread = threading.Thread(target=give_up, daemon=True)
    thread.start()
    with pytest.raises(PeerFailed, match="another rank has died"):
        wait(group, message)
    thread.join()
    message.is_there.set()


def wait_longer_than_the_group_permits() -> float:
    """Return what rank 1 has sent."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=0.5))
    number = torch.zeros(1)
    if dist.get_rank() == 1:
        time.sleep(1)
        wait_for_messages([dist.isend(number + 3, 0)])
    else:
        wait_for_messages([dist.irecv(number, 1)])
    return number.item()


def test_a_message_may_take_longer_than_it_took_to_open_the_group() -> None:
    """After a death, the survivors open a group with a short limit. Gloo applies it to each later message."""
    assert samestep.spawn(wait_longer_than_the_group_permits, 2) == 3


@pytest.mark.parametrize("error", ["", "Connection closed by peer"])
def test_no_message_is_kept(waiter: Waiter, error: str) -> None:
    """It would keep the connections open, and its memory."""
    message = Message(error)
    message.is_there.set()
    with pytest.raises(RuntimeError, match=error) if error else nullcontext():
        waiter.wait([message])
    is_there = weakref.ref(message)
    del message
    assert is_there() is None
