"""Which route a sum takes, and how. (`test_reducer.py` compares the sums of all routes.)"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

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


@dataclass
class Stream:
    """Takes the place of a stream of a GPU."""

    name: str
    notes: list[str]

    def wait_stream(self, other: "Stream") -> None:
        self.notes.append(f"{self.name}: wait for {other.name}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is queued on which stream, for the streams of a GPU and torch.distributed in routes.py."""
    notes: list[str] = []
    current = [Stream("compute", notes)]

    def note(what: str) -> None:
        notes.append(f"{current[-1].name}: {what}")

    def start(what: str, peer: int, tag: int) -> SimpleNamespace:
        note(f"{what} {tag} {peer}")
        return SimpleNamespace(wait=lambda: note(f"wait for {what} {tag} {peer}"))

    @contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def isend(tensor: torch.Tensor, peer: int, tag: int) -> SimpleNamespace:
        return start("send", peer, tag)

    def irecv(tensor: torch.Tensor, peer: int, tag: int) -> SimpleNamespace:
        return start("receive", peer, tag)

    monkeypatch.setattr(routes, "dist", SimpleNamespace(isend=isend, irecv=irecv))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", enter)
    return notes


def build_aside(number: int, notes: list[str]) -> routes.PendingOp:
    route = routes.Butterfly(routes.Space(torch.zeros, 8, torch.float32, build_layout(4, 4), rank=0))
    aside = routes.Aside(route, Stream(f"side {number}", notes))  # type: ignore[arg-type]
    return routes.PendingOp(aside.run(tag=number))


def test_on_a_gpu_a_bucket_is_queued_at_once_beside_the_backward(notes: list[str]) -> None:
    """The stream of the backward waits for none of its messages, until the sums are needed."""
    pending = [build_aside(number, notes) for number in range(2)]
    notes.append("the rest of the backward")
    routes.wait_all(pending)
    expected = []
    for number in range(2):
        here = f"side {number}"
        expected.append(f"{here}: wait for compute")
        for peer in (1, 2, 2, 1):
            expected += [f"{here}: {what} {number} {peer}" for what in ("receive", "send")]
            expected += [f"{here}: wait for {what} {number} {peer}" for what in ("receive", "send")]
    assert notes == [*expected, "the rest of the backward", "compute: wait for side 0", "compute: wait for side 1"]


def test_memory_is_not_used_again_before_a_failed_exchange_has_ended(notes: list[str]) -> None:
    op = build_aside(0, notes)
    assert "compute: wait for side 0" not in notes
    del op
    assert notes[-1] == "compute: wait for side 0"
