"""The order in which the ranks of a pipeline compute: complete, in bounded memory, and without a deadlock."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from samestep.pipeline.messages import MAX_UNDER_WAY
from samestep.pipeline.schedule import Kind, build_schedule, choose_ranks, find_held


@given(st.integers(1, 8), st.integers(0, 20), st.integers(0, 5))
def test_each_micro_batch_once_in_order(num_ranks: int, num_micro_batches: int, first: int) -> None:
    micro_batches = range(first, first + num_micro_batches)
    for position in range(num_ranks):
        order = build_schedule(position, num_ranks, micro_batches)
        for kind in Kind:
            assert [v for each, v in order if each is kind] == [*micro_batches]
        in_flight = set[int]()
        for kind, v in order:
            if kind is Kind.FORWARD:
                in_flight.add(v)
            else:
                in_flight.remove(v)
            assert len(in_flight) <= num_ranks - position


@given(st.integers(1, 8), st.integers(0, 20))
def test_no_deadlock(num_ranks: int, num_micro_batches: int) -> None:
    """Ranks wait for what they receive, and until fewer than `MAX_UNDER_WAY` of their messages are under way."""
    orders = [deque(build_schedule(position, num_ranks, range(num_micro_batches))) for position in range(num_ranks)]
    messages: dict[tuple[int, int], deque[int]] = {}  # sender and receiver -> micro-batches that have not been received

    def can_advance(position: int) -> bool:
        kind, _ = orders[position][0]
        step = 1 if kind is Kind.FORWARD else -1
        source, target = position - step, position + step
        if 0 <= source < num_ranks and not messages.get((source, position)):
            return False
        return not 0 <= target < num_ranks or len(messages.get((position, target), ())) < MAX_UNDER_WAY

    while any(orders):
        able = [position for position in range(num_ranks) if orders[position] and can_advance(position)]
        assert able, orders
        for position in able:
            kind, v = orders[position].popleft()
            step = 1 if kind is Kind.FORWARD else -1
            if 0 <= position - step < num_ranks:
                assert messages[position - step, position].popleft() == v
            if 0 <= position + step < num_ranks:
                messages.setdefault((position, position + step), deque()).append(v)


@given(st.integers(1, 12), st.integers(1, 12))
def test_each_stage_is_on_one_rank_of_a_pipeline(world_size: int, num_stages: int) -> None:
    num_ranks = choose_ranks(world_size, num_stages)
    assert world_size % num_ranks == 0
    held = [find_held(position, num_ranks, num_stages) for position in range(num_ranks)]
    assert [stage for each in held for stage in each] == [*range(num_stages)]
    assert 0 < min(map(len, held)) <= max(map(len, held)) <= min(map(len, held)) + 1
