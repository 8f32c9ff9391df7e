"""The control block is decoded to what was encoded, for any layout."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from samestep.engine.control import NOT_CALLED, Control, ControlFormat, Vote
from samestep.plan.tree import build_layout

NUMBERS = st.floats(allow_nan=False)


FEW, WORDS = st.integers(0, 5), st.integers(0, 2**64 - 1)


@given(st.data(), st.integers(1, 9), st.integers(1, 5), st.integers(0, 40), FEW, FEW)
def test_round_trip(
    data: st.DataObject, n: int, world_size: int, num_params: int, num_buffers: int, num_names: int
) -> None:
    layout = build_layout(n, world_size)
    form = ControlFormat(layout, num_params, num_buffers, num_names)
    rank = data.draw(st.integers(0, world_size - 1))
    held = len(layout.ranges[rank])
    row = st.lists(NUMBERS, min_size=held, max_size=held)
    named = st.lists(st.lists(NUMBERS, min_size=num_names, max_size=num_names), min_size=held, max_size=held)
    sent = Control(
        vote=Vote(
            data.draw(st.integers(0, 64)),
            *data.draw(st.tuples(*[st.booleans()] * 2, *[WORDS] * 2, st.integers(0, 2**32 - 1))),
        ),
        has_new_names=data.draw(st.booleans()),
        losses=data.draw(row),
        weights=[NOT_CALLED] * held,
        fingerprints=data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=held, max_size=held)),
        used=bytes(data.draw(st.lists(st.integers(0, 1), min_size=num_params, max_size=num_params))),
        buffers=data.draw(st.binary(min_size=4 * num_buffers, max_size=4 * num_buffers)),
        values=data.draw(named),
        counts=data.draw(named),
    )
    assert form.size_bytes % 64 == 0
    block = memoryview(np.full(form.size_bytes, 255, np.uint8))
    form.pack_into(block, sent)
    assert form.unpack_from(block, held) == sent
