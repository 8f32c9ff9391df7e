"""Snapshots are written completely or not at all, and incomplete ones are skipped."""

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
from states import assert_same, make_state
from support.snapshots import read_snapshot, write_snapshot

from samestep.errors import RunDirectoryError
from samestep.files import replace_file
from samestep.snapshot.manifest import FORMAT
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.serialization import digest
from samestep.snapshot.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def found_steps(store: Store) -> list[tuple[int, str | None]]:
    assert all(snapshot.problem is None for snapshot in store.snapshots())
    return [(snapshot.step, snapshot.name) for snapshot in store.snapshots()]


def read(store: Store, which: int | str = "latest") -> dict[str, Any]:
    found = store.find(which, warn=lambda sentence: pytest.fail(sentence))
    assert found is not None
    return read_snapshot(store, found)


def test_what_is_written_is_found_and_read(store: Store, tmp_path: Path) -> None:
    assert store.snapshots() == []
    assert store.find("latest") is None
    assert list(tmp_path.iterdir()) == []
    state = make_state(0.5)
    path = write_snapshot(store, state, step=7, meta={"epoch": 1, "loss": 0.25, 3: [1, (2,)]})
    assert path == tmp_path / "snapshots" / "step-00000007"
    assert sorted(entry.name for entry in path.iterdir()) == FILES
    found = store.find("latest")
    assert found is not None
    assert (found.path, found.step, found.name, found.problem) == (path, 7, None, None)
    assert found.manifest["meta"] == {"epoch": 1, "loss": 0.25, "3": [1, [2]]}
    assert found.manifest["versions"]["torch"] == torch.__version__
    assert found.size_bytes == sum((path / file).stat().st_size for file in ("state.json", "tensors-00000.safetensors"))
    assert_same(read_snapshot(store, found), state)
    assert found.manifest["digest"] == digest(state)


def test_the_newest_is_the_one_of_most_steps(store: Store) -> None:
    for step, name in [(30, None), (40, "best"), (40, None), (100_000_000, None), (20, "last_good"), (9, None)]:
        write_snapshot(store, make_state(step + len(name or "")), step=step, name=name, meta={})
    assert found_steps(store) == [
        (9, None), (20, "last_good"), (30, None), (40, "best"), (40, None), (100_000_000, None)
    ]  # fmt: skip
    assert read(store)["state"]["best"] == 100_000_000
    assert read(store, 40)["state"]["best"] == 40
    assert read(store, "best")["state"]["best"] == 44
    assert read(store, 20)["state"]["best"] == 29
    shutil.rmtree(store.path / "step-100000000")
    assert read(store)["state"]["best"] == 40
    shutil.rmtree(store.path / "step-00000040")
    assert read(store)["state"]["best"] == 44


def test_one_of_the_same_step_is_replaced(store: Store) -> None:
    for mark in (1.0, 2.0):
        write_snapshot(store, make_state(mark), step=5)
    assert read(store)["state"]["best"] == 2.0
    assert [entry.name for entry in store.path.iterdir()] == ["step-00000005"]


# --- asked for what is not there -------------------------------------------------------------------------------------


def test_an_absent_snapshot_is_reported_with_those_that_exist(store: Store) -> None:
    with pytest.raises(RunDirectoryError, match=r"there is no snapshot named best in .*: there is no other"):
        store.find("best")
    write_snapshot(store, {}, step=1)
    write_snapshot(store, {}, step=3, name="best")
    with pytest.raises(RunDirectoryError, match=r"there is no snapshot of step 2 in .*: there is step 1, best"):
        store.find(2)


def test_a_requested_snapshot_that_is_not_sound(store: Store) -> None:
    for step in (1, 2):
        write_snapshot(store, make_state(step), step=step)
    flip(store.path / "step-00000002" / "tensors-00000.safetensors", -1)
    warnings: list[str] = []
    with pytest.raises(
        RunDirectoryError,
        match=r"the snapshot of step 2 cannot be used \(.*damaged \(somewhere in bytes .*\)\) in .*: there is step 1$",
    ):
        store.find(2, warn=warnings.append)
    assert not warnings, "the error says it"


def test_none_sound_is_an_error_and_no_fresh_start(store: Store) -> None:
    write_snapshot(store, make_state(1), step=1)
    flip(store.path / "step-00000001" / "state.json", 3)
    warnings: list[str] = []
    words = r"no snapshot in .* can be used \(.*state\.json is damaged.*start with SAMESTEP_FRESH=1 "
    with pytest.raises(RunDirectoryError, match=words):
        store.find("latest", warn=warnings.append)
    assert not warnings, "the error says it"


# --- damage -------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


FILES = ["manifest.json", "state.json", "tensors-00000.safetensors"]
DAMAGE: dict[str, Callable[[Path], object]] = {
    "removed": lambda path: path.unlink(),
    "emptied": lambda path: os.truncate(path, 0),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "first bit flipped": lambda path: flip(path, 0),
    "last bit flipped": lambda path: flip(path, -1, 7),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), file=st.sampled_from(FILES))
def test_any_flipped_bit_is_seen(place: float, bit: int, file: str, store: Store) -> None:
    if not store.path.exists():
        for step in (1, 2):
            write_snapshot(store, make_state(step), step=step, meta={"x": 0.5})
    path = store.path / "step-00000002" / file
    sound = path.read_bytes()
    warnings: list[str] = []
    try:
        flip(path, int(place * len(sound)), bit)
        found = Store(store.path.parent).find("latest", warn=warnings.append)  # it knows of no damage yet
        assert found is not None
        assert found.step == 1
        assert_same(read_snapshot(store, found), make_state(1))
        assert f"step-00000002: {file}" in warnings[0]
    finally:
        path.write_bytes(sound)


def test_other_directories_are_skipped(store: Store) -> None:
    for step in (1, 2):
        write_snapshot(store, make_state(step), step=step)
    newer = store.path / "step-00000002" / "manifest.json"
    newer.write_text(json.dumps(json.loads(newer.read_text()) | {"format": FORMAT + 1}))
    shutil.copytree(store.path / "step-00000001", store.path / "step-00000009")
    shutil.copytree(store.path / "step-00000001", store.path / "kept.step-00000001")
    (store.path / "step-00000003").mkdir()
    (store.path / "notes.txt").write_text("mine")
    (store.path / "strange").mkdir()
    warnings: list[str] = []
    found = store.find("latest", warn=warnings.append)
    assert found is not None
    assert (found.step, found.name) == (1, None)
    said = ["manifest.json is of step 1", "manifest.json cannot be read", f"manifest.json has format {FORMAT + 1} of a"]
    assert all(problem in warning for problem, warning in zip(said, warnings, strict=True))
    assert read(store, "kept")["state"]["best"] == 1


def test_a_snapshot_that_goes_bad_after_it_was_found(store: Store) -> None:
    write_snapshot(store, make_state(1), step=1)
    found = store.find("latest")
    assert found is not None
    (found.path / "tensors-00000.safetensors").unlink()
    with pytest.raises(RunDirectoryError, match=r"can no longer be used: tensors-00000.safetensors is missing"):
        read_snapshot(store, found)


# --- pruning and cleaning -----------------------------------------------------------------------------------------


def test_pruning_keeps_the_newest_of_each_name(store: Store) -> None:
    for step in range(1, 6):
        write_snapshot(store, {}, step=step)
    for step in (1, 2):
        write_snapshot(store, {}, step=step, name="best")
    store.prune(2)
    assert found_steps(store) == [(2, "best"), (4, None), (5, None)]
    assert len(list(store.path.iterdir())) == 3


@pytest.mark.parametrize("file", FILES)
def test_pruning_never_removes_the_newest_sound_one(file: str, store: Store) -> None:
    for step in (1, 2, 3):
        write_snapshot(store, make_state(step), step=step)
    flip(store.path / "step-00000003" / file, 5)
    os.truncate(store.path / "step-00000002" / file, 3)
    found = store.find("latest", warn=lambda _: None)
    assert found is not None
    assert found.step == 1
    store.prune(1)
    assert read_whatever(store) == 1
    write_snapshot(store, make_state(2), step=2)
    store.prune(1)
    assert read_whatever(store) == 2
    write_snapshot(store, make_state(3), step=3)
    store.prune(1)
    assert found_steps(store) == [(3, None)]


def read_whatever(store: Store) -> int:
    """Read the newest sound snapshot as a new process does, which has detected no damage yet."""
    store = Store(store.path.parent)
    found = store.find("latest", warn=lambda _: None)
    assert found is not None
    assert_same(read_snapshot(store, found), make_state(found.step))
    return found.step


def test_names_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a new run directory and of its new parents, and that of a file that is replaced."""
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
    RunDirectory(tmp_path / "runs" / "new", warn=print).close()
    assert synced == [tmp_path / "runs", tmp_path]
    synced.clear()
    replace_file(tmp_path / "file", b"content", sync=True)
    assert [path.parent for path in synced] == [tmp_path, tmp_path.parent]
