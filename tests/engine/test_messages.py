"""What `benchmarks/messages.py` counts is what ranks send."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.engine import routes
from samestep.plan.tree import build_layout

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Sent = list[tuple[int, int, int]]


def build_routes(new: Callable[..., torch.Tensor], rank: int, world_size: int) -> list[routes.Route]:
    """Return each route, with one part per rank and with several."""
    built = []
    for n in (world_size, 11):
        layout = build_layout(n, world_size)
        for kind in (routes.AllGather, routes.Butterfly, routes.Chunks, routes.ToOwner):
            owner = world_size - 1 if kind is routes.ToOwner else None
            if layout.butterfly or kind is not routes.Butterfly:
                built.append(kind(routes.Space(new, 1003, torch.float32, layout, rank, owner=owner)))
    return built


def build_ring(new: Callable[..., torch.Tensor], world_size: int) -> Sequence[torch.Tensor]:
    return [new(size, dtype=torch.uint8) for size in range(world_size)]  # the first rank has nothing


def send(world_size: int) -> list[Sent]:
    """Return the messages, bytes and rounds of each rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    isend = dist.isend
    counts: Sent = []
    sizes: list[int] = []

    def note_and_send(tensor: torch.Tensor, peer: int, tag: int = 0) -> Any:
        sizes.append(tensor.nbytes)
        return isend(tensor, peer, tag=tag)

    with patch.object(dist, "isend", note_and_send):
        for route in build_routes(torch.zeros, rank, world_size):
            num_rounds = 0
            for works in route.run(0):
                num_rounds += 1
                for work in works:
                    work.wait()
            counts.append((len(sizes), sum(sizes), num_rounds))
            sizes.clear()
        num_rounds = len([*routes.pass_along_ring(build_ring(torch.zeros, world_size), rank)])
        counts.append((len(sizes), sum(sizes), num_rounds))
    everywhere: list[Any] = [None] * world_size
    dist.all_gather_object(everywhere, counts)
    return everywhere


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_counts_are_those_of_ranks(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    messages = import_module("messages")
    expected = []
    for rank in range(world_size):
        counts = [messages.count_route(route) for route in build_routes(messages.NEW, rank, world_size)]
        ring = build_ring(messages.NEW, world_size)
        counts.append(messages.count(world_size, lambda rank=rank, ring=ring: routes.pass_along_ring(ring, rank)))
        expected.append([(count.messages, count.num_bytes, count.rounds) for count in counts])
    assert samestep.spawn(send, world_size, (world_size,)) == expected


def test_an_all_gather_takes_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    messages = import_module("messages")
    for world_size in range(2, 34):
        route = routes.AllGather(routes.Space(messages.NEW, 1, torch.float32, build_layout(64, world_size), 1))
        counts = messages.count_route(route)
        assert counts.messages == counts.rounds == (world_size - 1).bit_length()
