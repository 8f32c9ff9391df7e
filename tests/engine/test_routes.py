"""Which route a sum takes, and how. (`test_reducer.py` compares the sums of all routes.)"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from samestep.engine import routes
from samestep.plan.tree import build_layout


def test_route_follows_from_size_and_layout() -> None:
    def choose(num_bytes: int, world_size: int) -> object:
        space = routes.Space(torch.zeros, num_bytes, torch.uint8, build_layout(8, world_size), 0)
        return type(routes.build_route(space))

    assert choose(1 << 10, 4) is routes.AllGather
    assert choose(64 << 20, 4) is routes.Butterfly
    assert choose(64 << 20, 3) is routes.Chunks


class Streams:
    """Takes the place of the streams of a GPU, and of torch.distributed in routes.py. Notes what is queued where."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.current = [Stream("compute", self)]

    def note(self, what: str) -> None:
        self.notes.append(f"{self.current[-1].name}: {what}")

    @contextmanager
    def enter(self, stream: "Stream") -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def isend(self, tensor: torch.Tensor, peer: int, tag: int) -> "Message":
        self.note(f"send {tag} to {peer}")
        return Message(f"{tag} to {peer}", self)

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int) -> "Message":
        self.note(f"receive {tag} from {peer}")
        return Message(f"{tag} from {peer}", self)


class Stream:
    def __init__(self, name: str, streams: Streams) -> None:
        self.name = name
        self._streams = streams

    def wait_stream(self, other: "Stream") -> None:
        self._streams.notes.append(f"{self.name}: wait for {other.name}")


class Message:
    def __init__(self, name: str, streams: Streams) -> None:
        self._name = name
        self._streams = streams

    def wait(self) -> None:
        self._streams.note(f"wait for {self._name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(routes, "dist", streams)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.current[-1])
    monkeypatch.setattr(torch.cuda, "stream", streams.enter)
    return streams


def build_aside(number: int, streams: Streams) -> routes.Route:
    route = routes.Butterfly(routes.Space(torch.zeros, 8, torch.float32, build_layout(4, 4), rank=0))
    return routes.Aside(route, Stream(f"side {number}", streams))  # type: ignore[arg-type]


def test_on_a_gpu_a_bucket_is_queued_at_once_beside_the_backward(streams: Streams) -> None:
    """The stream of the backward waits for none of its messages, until the sums are needed."""
    pending = []
    for number in range(2):
        streams.note(f"compute {number}")
        pending.append(routes.PendingOp(build_aside(number, streams).run(tag=number)))
    streams.note("compute the rest")
    routes.wait_all(pending)
    expected = []
    for number in range(2):
        expected += [f"compute: compute {number}", f"side {number}: wait for compute"]
        for peer in (1, 2, 2, 1):
            here = f"side {number}"
            expected += [f"{here}: receive {number} from {peer}", f"{here}: send {number} to {peer}"]
            expected += [f"{here}: wait for {number} from {peer}", f"{here}: wait for {number} to {peer}"]
    expected += ["compute: compute the rest", "compute: wait for side 0", "compute: wait for side 1"]
    assert streams.notes == expected


def test_memory_is_not_used_again_before_a_failed_exchange_has_ended(streams: Streams) -> None:
    op = routes.PendingOp(build_aside(0, streams).run(tag=0))
    assert "compute: wait for side 0" not in streams.notes
    del op
    assert streams.notes[-1] == "compute: wait for side 0"
