"""Snapshots of which each rank writes its part: every promise of the others holds for each file."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import assert_same, make_state, take_rows, write_divided
from support.snapshots import read_snapshot
from test_store import DAMAGE, flip

from samestep.errors import InvalidValue, RunDirectoryError
from samestep.snapshot.manifest import find_damage, name_part, seal
from samestep.snapshot.serialization import digest, encode
from samestep.snapshot.store import Snapshot, Store

PARTS = [name_part(rank) for rank in range(3)]
FILES = ["manifest.json", "state.json", *PARTS]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def find(store: Store, warnings: list[str] | None = None) -> Snapshot:
    found = store.find("latest", warn=pytest.fail if warnings is None else warnings.append)
    assert found is not None
    return found


def test_each_rank_writes_a_file(store: Store) -> None:
    path = write_divided(store, 0.5, step=7)
    assert sorted(os.listdir(path)) == sorted(FILES)
    assert os.listdir(store.path) == ["step-00000007"]
    found = find(store)
    assert found.manifest["digest"] is None
    assert_same(read_snapshot(store, found), make_state(0.5))
    assert store.read_digest(found) == digest(make_state(0.5))
    sizes = [(path / part).stat().st_size for part in PARTS]
    assert max(sizes) < 4000 / 3 + 300


def test_a_digest_of_whole_tensors_is_in_the_manifest(store: Store) -> None:
    structure, tensors = encode({"objects": {"a": torch.ones(3), "b": torch.zeros(2)}})
    draft = store.begin(1, None)
    store.prepare(draft, {"objects/b": tensors.pop("objects/b")}, 1)
    store.commit(draft, store.prepare(draft, tensors), structure, step=1, name=None, meta={}, num_parts=2)
    assert find(store).manifest["digest"] == digest({"objects": {"a": torch.ones(3), "b": torch.zeros(2)}})


@settings(max_examples=60, deadline=None)
@given(num_rows=st.integers(0, 12), num_ranks=st.integers(2, 5), data=st.data())
def test_any_rows_are_read(num_rows: int, num_ranks: int, data: st.DataObject, tmp_path_factory: Any) -> None:
    tensor = torch.arange(num_rows * 3, dtype=torch.float64).view(num_rows, 3)
    store = Store(tmp_path_factory.mktemp("rows"))
    structure, tensors = encode({"objects": tensor})
    draft = store.begin(1, None)
    parts = [store.prepare(draft, take_rows(tensors, rank, num_ranks), rank) for rank in range(num_ranks)]
    store.commit(draft, parts[0], structure, step=1, name=None, meta={}, num_parts=num_ranks)
    first = data.draw(st.integers(0, num_rows))
    count = data.draw(st.integers(0, num_rows - first))
    saved = store.open(find(store))
    assert saved.contents["objects"].is_meta
    assert_same(saved.read_rows(saved.contents["objects"], first, count), tensor[first : first + count])
    assert_same(saved.fill(saved.contents["objects"]), tensor)


# --- damage -------------------------------------------------------------------------------------------------------

FOREIGN: dict[str, Callable[[Path], object]] = {
    "of another snapshot": lambda path: shutil.copy(path.parents[1] / "step-00000001" / path.name, path),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGE | FOREIGN)
def test_a_snapshot_with_a_damaged_part_is_skipped(damage: str, file: str, store: Store) -> None:
    for step in (1, 2):
        write_divided(store, step, step=step)
    (DAMAGE | FOREIGN)[damage](store.path / "step-00000002" / file)
    warnings: list[str] = []
    found = find(store, warnings)
    assert found.step == 1
    assert_same(read_snapshot(store, found), make_state(1))
    [warning] = warnings
    assert f"step-00000002: {file}" in warning
    store.prune(1)
    assert find(store, warnings).step == 1


def test_no_digest_of_a_manifest_without_a_part(store: Store) -> None:
    """The files that it names are sound, and do not have all rows."""
    path = write_divided(store, 1, step=1)
    found = find(store)
    files = {name: file for name, file in found.manifest["files"].items() if name != PARTS[1]}
    manifest = seal({key: value for key, value in {**found.manifest, "files": files}.items() if key != "sha256"})
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunDirectoryError, match=r"step-00000001 holds no state that can be read"):
        store.read_digest(find(store))


@settings(max_examples=60, deadline=None)
@given(num_ranks=st.integers(1, 5), place=st.floats(0, 1, exclude_max=True), file=st.sampled_from(FILES[1:]))
def test_the_ranks_together_check_every_byte(num_ranks: int, place: float, file: str, tmp_path_factory: Any) -> None:
    store = Store(tmp_path_factory.mktemp("check"))
    path = write_divided(store, 1, step=1)
    manifest = find(store).manifest
    flip(path / file, int(place * (path / file).stat().st_size))
    found = [find_damage(path, manifest, rank, num_ranks) for rank in range(num_ranks)]
    [problem] = filter(None, found)
    assert problem.startswith(f"{file} is damaged")


# --- parts that do not come ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [1, 2])
def test_a_part_that_is_missing(missing: int, store: Store) -> None:
    write_divided(store, 1, step=1)
    structure, tensors = encode(make_state(2))
    draft = store.begin(2, None)
    parts = [store.prepare(draft, take_rows(tensors, rank, 3), rank) for rank in {0, 1, 2} - {missing}]
    with pytest.raises(FileNotFoundError, match=f"receipt-0000{missing}"):
        store.commit(draft, parts[0], structure, step=2, name=None, meta={}, num_parts=3)
    assert find(store).step == 1
    store.abort(draft)
    assert os.listdir(store.path) == ["step-00000001"]


def test_a_part_that_lacks_rows(store: Store) -> None:
    """Such as when the ranks have built different models."""
    structure, tensors = encode(make_state(2))
    draft = store.begin(2, None)
    store.prepare(draft, take_rows(tensors, 2, 3), 1)
    own = store.prepare(draft, take_rows(tensors, 0, 3))
    with pytest.raises(
        InvalidValue, match=r"not written all of the state: objects/model/weight has 2664 of 4000 bytes"
    ):
        store.commit(draft, own, structure, step=2, name=None, meta={}, num_parts=2)
    assert store.snapshots() == []
