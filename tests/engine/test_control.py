"""The control block is decoded to what was encoded, for any layout."""

from hypothesis import given
from hypothesis import strategies as st

from samestep.engine.control import Control, ControlFormat, MicroBatchReport, Vote
from samestep.plan.tree import build_layout

NUMBERS = st.floats(allow_nan=False)
FEW, WORDS = st.integers(0, 5), st.integers(0, 2**64 - 1)
VOTES = st.builds(Vote, FEW, st.booleans(), FEW, WORDS, WORDS, st.integers(0, 2**32 - 1))


@given(st.data(), st.integers(1, 9), st.integers(1, 5), st.integers(0, 40), FEW, FEW)
def test_round_trip(
    data: st.DataObject, n: int, world_size: int, num_params: int, num_buffers: int, num_names: int
) -> None:
    layout = build_layout(n, world_size)
    form = ControlFormat(layout, num_params, num_buffers, num_names)
    rank = data.draw(st.integers(0, world_size - 1))
    held = len(layout.ranges[rank])
    logged = st.lists(NUMBERS, min_size=2 * num_names, max_size=2 * num_names)
    reports = st.builds(MicroBatchReport, WORDS, NUMBERS, NUMBERS, logged)
    sent = Control(
        vote=data.draw(VOTES),
        has_new_names=data.draw(st.booleans()),
        reports=data.draw(st.lists(reports, min_size=held, max_size=held)),
        used=bytes(data.draw(st.lists(st.integers(0, 1), min_size=num_params, max_size=num_params))),
        buffers=data.draw(st.binary(min_size=4 * num_buffers, max_size=4 * num_buffers)),
    )
    assert form.size_bytes % 64 == 0
    block = memoryview(bytearray(b"\xff" * form.size_bytes))
    form.pack_into(block, sent)
    assert form.unpack_from(block, held) == sent
