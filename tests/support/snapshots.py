"""The states of runs, and snapshots of any state, written and read without a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import samestep
from samestep.decoding import Object
from samestep.snapshot.manifest import Snapshot
from samestep.snapshot.serialization import encode
from samestep.snapshot.store import Store


def write_snapshot(
    store: Store, state: Mapping[str, Any], *, step: int, name: str | None = None, meta: Mapping[str, Any] = {}
) -> Path:
    """Write a snapshot of a state, and return its directory."""
    structure, tensors = encode(state)
    draft = store.begin(step, name)
    return store.commit(draft, store.prepare(draft, tensors), structure, step=step, name=name, meta=meta)


def read_snapshot(store: Store, snapshot: Snapshot, kind: Any = Object) -> dict[str, Any]:
    """Return the state in a snapshot, with its tensors."""
    saved = store.open(snapshot, kind)
    state: dict[str, Any] = saved.fill(saved.contents)
    return state


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Flip a bit of a file. `place`: of its byte; negative: from the end."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def list_steps(run_dir: Path) -> list[int]:
    """Return the steps of a run's snapshots, oldest first."""
    return [snapshot.step for snapshot in Store(run_dir).snapshots()]


def build_state(run: samestep.Run, position: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state for a snapshot at `position`. With `shard`, call it on all ranks: only rank 0 gets the whole."""
    assert run._prepared is not None
    return run._prepared.contents.build(
        {**position, **run._state.list_ends()}, run.state, run._prepared.collect_states()
    )
