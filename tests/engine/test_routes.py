"""Which route a sum takes, and how. (`test_exchange.py` compares the sums of all routes.)"""

from typing import Any

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


notes: list[str] = []  # what is queued on which stream


class Stream:
    """Takes the place of a stream of a GPU."""

    current: "Stream"

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: "Stream") -> None:
        notes.append(f"{self.name}: wait for {other.name}")

    def __enter__(self) -> None:
        self.before, Stream.current = Stream.current, self

    def __exit__(self, *_: object) -> None:
        Stream.current = self.before


class Message:
    def __init__(self, name: str) -> None:
        self.name = name
        notes.append(f"{Stream.current.name}: send {name}")

    def wait(self) -> None:
        notes.append(f"{Stream.current.name}: wait for {self.name}")


class TwoRounds(routes.Route):
    def run(self, tag: int) -> Any:
        yield [Message(f"{tag}a")]
        yield [Message(f"{tag}b")]


def start(number: int) -> routes.PendingOp:
    space = routes.Space(torch.zeros, 8, torch.float32, build_layout(4, 4), rank=0)
    side: Any = Stream(f"side {number}")
    return routes.PendingOp(routes.Aside(TwoRounds(space, [], torch.zeros(8)), side).run(tag=number))


@pytest.fixture(autouse=True)
def _streams_that_take_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    notes.clear()
    Stream.current = Stream("compute")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)


def test_on_a_gpu_a_bucket_is_queued_at_once_beside_the_backward() -> None:
    """The stream of the backward waits for none of its messages, until the sums are needed."""
    pending = [start(0), start(1)]
    notes.append("the rest of the backward")
    routes.wait_all(pending)
    steps = ["wait for compute", "send {0}a", "wait for {0}a", "send {0}b", "wait for {0}b"]
    expected = [f"side {n}: {step.format(n)}" for n in range(2) for step in steps]
    waits = ["compute: wait for side 0", "compute: wait for side 1"]
    assert notes == [*expected, "the rest of the backward", *waits]


def test_memory_is_not_used_again_before_a_failed_exchange_has_ended() -> None:
    op = start(0)
    assert "compute: wait for side 0" not in notes
    del op
    assert notes[-1] == "compute: wait for side 0"
