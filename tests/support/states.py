"""The state of a run, as its snapshots hold it."""

from collections.abc import Mapping
from typing import Any

import samestep


def build_state(run: samestep.Run, position: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state for a snapshot at `position`. With `shard`, call it on all ranks: only rank 0 gets the whole."""
    assert run._prepared is not None
    return run._prepared.contents.build(
        {**position, **run._state.list_ends()}, run.state, run._prepared.collect_states()
    )
