"""The formulas for the memory of a rank."""

from hypothesis import given
from hypothesis import strategies as st

from samestep.plan.memory import ParamSize, compute_memory


@st.composite
def draw_sizes(draw: st.DrawFn) -> list[ParamSize]:
    sizes = []
    for _ in range(draw(st.integers(1, 6))):
        rows = draw(st.integers(1, 12))
        num_bytes = rows * 4 * draw(st.integers(1, 9))
        is_trained = draw(st.booleans())
        state = draw(st.integers(0, 2)) * num_bytes if is_trained else 0
        small = 4 if state else 0
        block = draw(st.integers(0, 3))
        sizes.append(ParamSize(num_bytes, rows, num_bytes if is_trained else 0, state, small, block))
    return sizes


SIZES = draw_sizes()
WORLD = st.integers(2, 9)


@given(SIZES)
def test_one_rank_divides_nothing(sizes: list[ParamSize]) -> None:
    whole = compute_memory(sizes, None, 1)
    assert whole.total == sum(s.num_bytes + s.gradient_bytes + s.state_bytes + s.small_bytes for s in sizes)
    assert compute_memory(sizes, "optimizer", 1) == compute_memory(sizes, "fsdp2", 1) == whole
    assert compute_memory(sizes, None, 7) == whole


@given(SIZES, WORLD)
def test_an_owner_holds_its_share(sizes: list[ParamSize], world_size: int) -> None:
    """At most the mean and the largest tensor more, if the state is proportional to the parameter."""
    whole, divided = (compute_memory(sizes, shard, world_size) for shard in (None, "optimizer"))
    assert (divided.parameters, divided.gradients) == (whole.parameters, whole.gradients)
    assert whole.optimizer_state <= world_size * divided.optimizer_state
    assert divided.optimizer_state <= whole.optimizer_state
    even = [ParamSize(s.num_bytes, s.num_rows, s.num_bytes, 2 * s.num_bytes) for s in sizes]
    most = compute_memory(even, "optimizer", world_size).optimizer_state
    assert most <= 2 * sum(s.num_bytes for s in even) / world_size + 2 * max(s.num_bytes for s in even)


@given(SIZES, WORLD)
def test_shards_hold_everything_and_at_most_a_row_more(sizes: list[ParamSize], world_size: int) -> None:
    whole, divided = (compute_memory(sizes, shard, world_size) for shard in (None, "fsdp2"))
    rows = sum(s.num_bytes // s.num_rows for s in sizes)
    assert whole.parameters <= world_size * divided.parameters <= whole.parameters + world_size * rows
    assert whole.gradients <= world_size * divided.gradients
    small = sum(s.small_bytes for s in sizes)
    assert whole.optimizer_state - small <= world_size * (divided.optimizer_state - small)
    assert divided.optimizer_state >= small
    more = compute_memory(sizes, "fsdp2", world_size + 1)
    assert more.total <= divided.total
    assert more.gathered_block == divided.gathered_block


@given(SIZES)
def test_what_is_gathered(sizes: list[ParamSize]) -> None:
    """The parameters outside of blocks stay gathered; of the blocks, it is one at a time."""
    found = compute_memory(sizes, "fsdp2", 2).gathered_block
    outside = sum(s.num_bytes for s in sizes if s.block == 0)
    blocks = [sum(s.num_bytes for s in sizes if s.block == k) for k in (1, 2, 3)]
    assert outside + max(blocks) <= found
    assert found <= outside + max(sum(s.gradient_bytes for s in sizes if s.block == 0), 2 * max(blocks))
