"""The model of a step in `samestep scale`: its messages are those of the routes, and its limits are as expected."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.engine import routes
from samestep.engine.buckets import pad_to_chunks
from samestep.plan.tree import build_layout
from samestep.tools.scale.message_plan import plan_exchange, plan_rounds
from samestep.tools.scale.step_model import LinkSpeed, StepModel, fit_model

FAST = LinkSpeed(0.0, 0.0)
MODEL = StepModel(
    micro_batch_s=0.01,
    last_backward=0.6,
    extra_s=0.001,
    rest_s=(0.002, 0.003),
    jitter=0.0,
    elements=(1000, 500_000, 2_000_000, 3_000_000),
    element_bytes=4,
    cap_bytes=None,
    local=LinkSpeed(5e-5, 1e-9),
    socket=LinkSpeed(2e-5, 1e-9),
    remote=LinkSpeed(1e-4, 8e-9),
)
ranks = st.integers(1, 40)


class Recorder:
    """Replaces torch.distributed, and sends nothing."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, Any]] = []

    def begin(self) -> None:
        self.rounds.append({"isend": defaultdict(list), "irecv": defaultdict(list)})

    def note(self, kind: str, tensor: torch.Tensor, peer: int) -> "Recorder":
        self.rounds[-1][kind][peer].append(tensor.numel() * tensor.element_size())
        return self

    def isend(self, tensor: torch.Tensor, peer: int, tag: int) -> "Recorder":
        return self.note("isend", tensor, peer)

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int) -> "Recorder":
        return self.note("irecv", tensor, peer)

    def wait(self) -> None:
        pass


def record(route: str, n: int, world_size: int, num_elements: int, rank: int) -> list[dict[str, Any]]:
    """Return the messages of a rank's route, by round."""
    layout, recorder = build_layout(n, world_size), Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "dist", recorder)
        padded = pad_to_chunks(num_elements, world_size)
        if route == "direct":
            rows = torch.zeros(world_size, layout.max_parts * num_elements)
            run = routes.run_direct(rows, rank, 0)
        elif route == "butterfly":
            run = routes.run_butterfly(torch.zeros(num_elements), torch.zeros(num_elements), rank, world_size, 0)
        else:
            whole = torch.zeros(layout.max_parts, padded)
            chunks = torch.zeros(world_size, layout.max_parts, padded // world_size)
            run = routes.run_chunks(whole, chunks, rank, layout, 0)
        recorder.begin()
        for _ in run:
            recorder.begin()
    return recorder.rounds[:-1]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(0, 9), st.integers(1, 300), st.sampled_from(["direct", "butterfly", "chunks"]))
def test_the_messages_are_those_of_the_routes(world_size: int, more: int, num_elements: int, route: str) -> None:
    """The model counts exactly the bytes that are sent, and each rank receives what is sent to it."""
    n = world_size + more
    layout = build_layout(n, world_size)
    if route == "butterfly" and not layout.butterfly:
        return
    planned = plan_rounds(layout, route, num_elements, 4)
    sent = [record(route, n, world_size, num_elements, rank) for rank in range(world_size)]
    for number, messages in enumerate(planned):
        for rank in range(world_size):
            peers = [rank ^ messages.distance] if messages.distance else [r for r in range(world_size) if r != rank]
            found = sent[rank][number]["isend"]
            assert sorted(found) == sorted(peers)
            for peer in peers:
                assert len(found[peer]) == messages.num_messages[rank]
                assert sum(found[peer]) == messages.num_bytes[rank]
                assert found[peer] == sent[peer][number]["irecv"][rank]
    assert all(len(rounds) == len(planned) for rounds in sent)


@given(st.integers(1, 50), st.floats(0, 0.5))
def test_one_rank_only_computes(num: int, jitter: float) -> None:
    assert replace(MODEL, jitter=jitter).predict(num, 1) == pytest.approx(num * 0.01 + 0.002)


@settings(deadline=None)
@given(ranks, ranks, st.sampled_from([None, 1, 4]))
def test_with_infinite_bandwidth_the_longest_rank_decides(one: int, other: int, per_host: int | None) -> None:
    world_size, num = sorted((one, other))
    fast = replace(MODEL, local=FAST, socket=FAST, remote=FAST, ranks_per_host=per_host)
    most = -(-num // world_size)
    rest_s = 0.002 if world_size == 1 else 0.003 + 0.001
    assert fast.predict(num, world_size) == pytest.approx(most * 0.01 + rest_s)


@settings(max_examples=40, deadline=None)
@given(ranks, st.integers(0, 9), st.floats(1, 9), st.sampled_from(["message_s", "byte_s"]), st.sampled_from([None, 4]))
def test_slower_links_never_help(size: int, more: int, factor: float, what: str, per_host: int | None) -> None:
    model = replace(MODEL, ranks_per_host=per_host)

    def slow(link: LinkSpeed) -> LinkSpeed:
        return replace(link, **{what: getattr(link, what) * factor})

    slower = replace(model, local=slow(model.local), socket=slow(model.socket), remote=slow(model.remote))
    assert slower.predict(size + more, size) >= model.predict(size + more, size) - 1e-12


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 12), st.integers(2_100_000, 9_000_000), st.integers(2_100_000, 9_000_000))
def test_more_bytes_never_help(size: int, one: int, other: int) -> None:
    """For the same route: above 4 MiB, another route sends fewer bytes."""
    few, many = (replace(MODEL, elements=(num,), cap_bytes=1 << 40).predict(16, size) for num in sorted((one, other)))
    assert few <= many + 1e-12


# The exchanges of 4,096 ranks are computed: 15 s, and 18 s on a busy machine.
def test_four_thousand_ranks() -> None:
    """Stragglers and a shared link cost time, and buckets are smaller between hosts."""
    model = replace(MODEL, ranks_per_host=8, elements=(100_000,) * 40)
    calm = model.predict(4096, 4096)
    assert calm > 0.01
    fast = replace(model, local=FAST, socket=FAST, remote=FAST)
    slowest_s = replace(fast, jitter=0.1).predict(4096, 4096) - fast.predict(4096, 4096)
    assert 3 < slowest_s / (0.1 * 0.011) < 4.5  # standard deviations of the slowest of 4,096
    layout = build_layout(8, 4)
    assert len(plan_exchange(layout, model.elements, 4, one_host=False)) > len(
        plan_exchange(layout, model.elements, 4, one_host=True)
    )
    with pytest.raises(ValueError, match="4 micro-batches on 5 ranks"):
        model.predict(4, 5)


def test_work_for_messages_cannot_be_hidden() -> None:
    """Without a free core, the work delays the backward."""
    model = replace(MODEL, local=FAST, socket=FAST, busy_byte_s=1e-9)
    layout = build_layout(8, 2)
    plans = plan_exchange(layout, MODEL.elements, 4, one_host=True)
    num_bytes = sum(int(messages.num_bytes[0]) for plan in plans for messages in plan.rounds)
    assert num_bytes >= 4 * sum(MODEL.elements)
    assert model.predict(8, 2) == pytest.approx(replace(model, busy_byte_s=0.0).predict(8, 2) + 1e-9 * num_bytes)


def test_the_fit_gives_what_was_measured() -> None:
    facts = {
        "micro_batch_size": 8, "elements": [100, 10], "element_bytes": 4, "bucket_cap_bytes": None, "is_one_host": True,
        "links": {"message_s": 1e-4, "byte_s": 1e-9, "socket_message_s": 2e-5, "cpu_byte_s": 1e-9},
    }  # fmt: skip
    rest = {"exchange": 0.004, "waiting": 0.001, "update": 0.005, "other": 0.0}
    phases = {"data": 0.002, "compute": 0.038, "backward": 0.024, **rest}
    alone = {"world_size": 1, "batch_size": 32, "step_s": 0.05, "jitter": 0.1, "facts": facts, "phases_s": phases}
    half = {"data": 0.001, "compute": 0.02, "backward": 0.012, **rest}
    pair = {**alone, "world_size": 2, "step_s": 0.03, "phases_s": half}
    model = fit_model(alone, pair, 0.5)
    assert model.busy_byte_s == 2e-9
    assert fit_model(alone, pair, 2.0).busy_byte_s == 0
    assert model.predict(4, 1) == pytest.approx(0.05)
    assert model.predict(4, 2) == pytest.approx(0.03)
    assert model.micro_batch_s == pytest.approx(0.01)
    assert 0.015 < model.predict(4, 4) < model.predict(4, 3)
