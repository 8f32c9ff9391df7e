"""Snapshots of any state, written and read without a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
