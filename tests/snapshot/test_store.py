"""Snapshots are written completely or not at all, by one rank or by several, and damaged ones are skipped."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from states import assert_same, make_state, take_rows, write_divided
from support.snapshots import flip, read_snapshot, write_snapshot

from samestep.errors import Error, InvalidValue, RunDirectoryError
from samestep.snapshot.manifest import FORMAT, Snapshot, find_damage, name_part, read_manifest
from samestep.snapshot.run_record import CopyContent, ResumePoint, choose
from samestep.snapshot.serialization import digest, encode
from samestep.snapshot.store import Store

PARTS = [name_part(rank) for rank in range(3)]
FILES = ["manifest.json", "state.json", *PARTS]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def list_steps(store: Store) -> list[tuple[int, str | None]]:
    assert all(snapshot.problem is None for snapshot in store.snapshots())
    return [(snapshot.step, snapshot.name) for snapshot in store.snapshots()]


def find(store: Store, warnings: list[str] | None = None, which: int | str = "latest") -> Snapshot:
    return store.find(which, warn=pytest.fail if warnings is None else warnings.append)


def read_mark(store: Store, which: int | str = "latest") -> Any:
    return read_snapshot(store, find(store, which=which))["state"]["best"]


def write(store: Store, *steps: int, name: str | None = None) -> None:
    for step in steps:
        write_snapshot(store, make_state(step), step=step, name=name)


def test_each_rank_writes_a_file(store: Store) -> None:
    path = write_divided(store, make_state(0.5), step=7)
    assert sorted(os.listdir(path)) == FILES
    assert os.listdir(store.path) == ["step-00000007"]
    found = find(store)
    assert found.manifest["digest"] is None
    assert_same(read_snapshot(store, found), make_state(0.5))
    assert store.read_digest(found) == digest(make_state(0.5))
    assert max((path / part).stat().st_size for part in PARTS) < 4000 / 3 + 300


@settings(max_examples=60, deadline=None)
@given(num_rows=st.integers(0, 12), num_ranks=st.integers(2, 5), data=st.data())
def test_any_rows_are_read(num_rows: int, num_ranks: int, data: st.DataObject, tmp_path_factory: Any) -> None:
    tensor = torch.arange(num_rows * 3, dtype=torch.float64).view(num_rows, 3)
    store = Store(tmp_path_factory.mktemp("rows"))
    write_divided(store, {"objects": tensor}, step=1, num_ranks=num_ranks)
    first = data.draw(st.integers(0, num_rows))
    count = data.draw(st.integers(0, num_rows - first))
    saved = store.open(find(store))
    assert saved.contents["objects"].is_meta
    assert_same(saved.read_rows(saved.contents["objects"], first, count), tensor[first : first + count])
    assert_same(saved.fill(saved.contents["objects"]), tensor)


def test_the_newest_is_the_one_of_most_steps(store: Store) -> None:
    for step, name in [(30, None), (40, "best"), (40, None), (100_000_000, None), (20, "last_good"), (9, None)]:
        write_snapshot(store, make_state(step + len(name or "")), step=step, name=name, meta={})
    assert list_steps(store) == [
        (9, None), (20, "last_good"), (30, None), (40, "best"), (40, None), (100_000_000, None)
    ]  # fmt: skip
    assert [read_mark(store, which) for which in ("latest", 40, "best", 20)] == [100_000_000, 40, 44, 29]
    for removed, mark in (("step-100000000", 40), ("step-00000040", 44)):
        shutil.rmtree(store.path / removed)
        assert read_mark(store) == mark


# --- asked for what is not there -------------------------------------------------------------------------------------


def test_what_cannot_be_found_is_reported_with_what_can(store: Store) -> None:
    with pytest.raises(RunDirectoryError, match=r"there is no snapshot named best in .*: there is no other"):
        store.find("best")
    write(store, 1, 2)
    write(store, 3, name="best")
    with pytest.raises(RunDirectoryError, match=r"there is no snapshot of step 4 in .*: there is step 1, step 2, best"):
        store.find(4)
    flip(store.path / "step-00000002" / PARTS[0], -1)
    said = r"the snapshot of step 2 cannot be used \(.*damaged \(somewhere in .*\)\) in .*: there is step 1, best$"
    with pytest.raises(RunDirectoryError, match=said):
        store.find(2, warn=pytest.fail)
    for directory in store.path.iterdir():
        flip(directory / "state.json", 3)
    said = r"no snapshot in .* can be used \(.*state\.json is damaged.*start with SAMESTEP_FRESH=1 "
    with pytest.raises(RunDirectoryError, match=said):
        store.find("latest", warn=lambda sentence: None)


# --- damage -------------------------------------------------------------------------------------------------------


DAMAGE: dict[str, Callable[[Path], object]] = {
    "removed": lambda path: path.unlink(),
    "emptied": lambda path: os.truncate(path, 0),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "of another snapshot": lambda path: shutil.copy(path.parents[1] / "step-00000001" / path.name, path),
}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    file=st.sampled_from(FILES),
    num_ranks=st.integers(1, 5),
)
def test_any_flipped_bit_is_seen(place: float, bit: int, file: str, num_ranks: int, store: Store) -> None:
    """Also if several ranks check the files: one of them finds it."""
    if not store.path.exists():
        for step in (1, 2):
            write_divided(store, make_state(step), step=step)
    path = store.path / "step-00000002" / file
    manifest = json.loads((path.parent / "manifest.json").read_bytes())
    sound = path.read_bytes()
    warnings: list[str] = []
    try:
        flip(path, int(place * len(sound)), bit)
        store = Store(store.path.parent)  # it knows of no damage yet
        assert_same(read_snapshot(store, find(store, warnings)), make_state(1))
        assert f"step-00000002: {file}" in warnings[0]
        found = [find_damage(path.parent, manifest, rank, num_ranks) for rank in range(num_ranks)]
        assert len([*filter(None, found)]) == (file != "manifest.json")
    finally:
        path.write_bytes(sound)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_snapshot_is_skipped_and_the_sound_one_kept(damage: str, file: str, store: Store) -> None:
    for step in (1, 2):
        write_divided(store, make_state(step), step=step)
    DAMAGE[damage](store.path / "step-00000002" / file)
    warnings: list[str] = []
    assert_same(read_snapshot(store, find(store, warnings)), make_state(1))
    [warning] = warnings
    assert f"step-00000002: {file}" in warning
    store.prune(1)
    assert find(store, warnings).step == 1


def test_other_directories_are_skipped(store: Store) -> None:
    write(store, 1, 2)
    newer = store.path / "step-00000002" / "manifest.json"
    newer.write_text(json.dumps(json.loads(newer.read_text()) | {"format": FORMAT + 1}))
    shutil.copytree(store.path / "step-00000001", store.path / "step-00000009")
    shutil.copytree(store.path / "step-00000001", store.path / "kept.step-00000001")
    (store.path / "step-00000003").mkdir()
    (store.path / "notes.txt").write_text("mine")
    (store.path / "strange").mkdir()
    warnings: list[str] = []
    found = find(store, warnings)
    assert (found.step, found.name) == (1, None)
    said = ["manifest.json is of step 1", "manifest.json cannot be read", f"manifest.json has format {FORMAT + 1} of a"]
    assert all(problem in warning for problem, warning in zip(said, warnings, strict=True))
    assert read_mark(store, "kept") == 1


def test_a_snapshot_that_goes_bad_after_it_was_found(store: Store) -> None:
    write(store, 1)
    found = find(store)
    (found.path / PARTS[0]).unlink()
    with pytest.raises(RunDirectoryError, match=r"can no longer be used: tensors-00000.safetensors is missing"):
        read_snapshot(store, found)


# --- parts that do not come ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [1, 2])
def test_a_part_that_is_missing(missing: int, store: Store) -> None:
    write(store, 1)
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


# --- pruning and cleaning -----------------------------------------------------------------------------------------


def test_pruning_never_removes_the_newest_sound_one(store: Store) -> None:
    write(store, 1, 2, 3)
    flip(store.path / "step-00000003" / PARTS[0], 5)
    os.truncate(store.path / "step-00000002" / PARTS[0], 3)
    for step in (1, 2, 3):
        assert find(store, []).step == step
        store.prune(1)
        assert find(Store(store.path.parent), []).step == step  # as in a new process, which knows of no damage yet
        write(store, step + 1)
    store.prune(1)
    assert list_steps(store) == [(4, None)]


def test_pruning_reads_only_what_another_process_has_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write(Store(store.path.parent), 1)
    write(store, 2, 3, 4)
    read: list[str] = []

    def read_and_note(path: Path) -> tuple[dict[str, Any], str | None]:
        read.append(path.name)
        return read_manifest(path)

    monkeypatch.setattr("samestep.snapshot.store.read_manifest", read_and_note)
    store.prune(2)
    assert read == ["step-00000001"]
    assert list_steps(store) == [(3, None), (4, None)]


# --- the point at which a run continues -------------------------------------------------------------------------------


DAMAGED = RunDirectoryError("all are damaged")


def snapshot(step: int) -> Snapshot:
    meta = {"metrics_bytes": 10 * step, "numbers": {}, "rewinds": 0}
    manifest = {"step": step, "digest": f"{step:064x}", "meta": meta, "files": {}}
    return Snapshot(Path(f"step-{step:08d}"), step, None, manifest, None)


def content(
    step: int | None, newest_step: int | None = None, error: Error | None = None, num_recorded: int = 0
) -> CopyContent:
    found = None if step is None else snapshot(step)
    return CopyContent((step or 0) if newest_step is None else newest_step, num_recorded, found, error)


@pytest.mark.parametrize(
    ("contents", "source", "step", "rewinds"),
    [
        ([content(None)], 0, 0, [4]),
        ([content(6)], 0, 6, [4]),
        ([content(6), content(9), content(9)], 1, 9, [4]),
        ([content(None), content(0)], 1, 0, [4]),
        ([content(6, newest_step=8)], 0, 6, [4, 6]),  # it was asked for, or the one of step 8 is damaged
        ([content(6), content(3, newest_step=9)], 0, 6, [4, 6]),
        ([content(6), content(None, error=DAMAGED)], 0, 6, [4]),
        ([content(0, newest_step=5)], 0, 0, [4, 0]),
        ([content(3, num_recorded=4), content(3, num_recorded=8)], 0, 3, [4]),
    ],
)
def test_the_newest_sound_snapshot_of_all_copies(
    contents: list[CopyContent], source: int, step: int, rewinds: list[int]
) -> None:
    found, point = choose(contents, [4])
    assert (found, point.step, point.rewinds) == (source, step, rewinds)
    assert point.is_beginning is (contents[source].found is None)
    assert point.metrics_bytes == 10 * step
    assert point.num_recorded == max(each.num_recorded for each in contents), "later rows are lost"


def test_a_run_does_not_begin_again_if_its_snapshots_are_damaged() -> None:
    with pytest.raises(RunDirectoryError, match="all are damaged"):
        choose([content(None), content(None, error=DAMAGED)], [])
    assert choose([content(None), content(None)], []) == (0, ResumePoint(rewinds=[]))
