"""SIGKILL of the writer at any system call leaves the older or the newer snapshot, complete."""

import sys
from pathlib import Path

import dying_writer
import pytest
from states import assert_same, make_state
from support.commands import run

from samestep.snapshot.serialization import digest
from samestep.snapshot.store import Store


# 190 writers, each with the waits of a few snapshots for the disk: up to a minute and a half on a busy machine.
@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("killed")
    command = [sys.executable, dying_writer.__file__, str(directory)]
    done = run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.mark.parametrize("scenario", dying_writer.SCENARIOS)
def test_a_writer_that_is_killed(scenario: str, directory: Path) -> None:
    num_runs = len(list((directory / scenario).iterdir()))
    assert num_runs > (6 if scenario == "prune" else 20)
    marks = [check(Store(directory / scenario / str(point)), scenario) for point in range(num_runs)]
    allowed = dying_writer.SCENARIOS[scenario][2] | ({None} if scenario == "first" else set())
    assert set(marks) == allowed  # the older one for early kills, the newer one for late kills
    assert marks[-1] == max(mark for mark in allowed if mark is not None)


def check(store: Store, scenario: str) -> float | None:
    """Check that every snapshot that counts as sound is sound. Returns the mark of the newest, before and after
    cleaning.
    """
    for snapshot in store.snapshots():
        assert snapshot.problem is None, snapshot
        check_exact(store.read(snapshot), snapshot.manifest["meta"]["mark"], store.read_digest(snapshot))
    before = find_newest(store)
    store.clean()
    assert not list(store.path.glob(".*"))
    assert find_newest(store) == before
    if scenario == "prune":
        assert [snapshot.step for snapshot in store.snapshots()] in ([1, 2, 3], [2, 3], [3])
    return before


def find_newest(store: Store) -> float | None:
    found = store.find("latest", warn=pytest.fail)
    return None if found is None else found.manifest["meta"]["mark"]


def check_exact(state: dict[str, object], mark: float, expected_digest: str) -> None:
    assert digest(state) == expected_digest
    num_values = len(state["objects"]["model"]["weight"])  # type: ignore[index]
    if num_values < dying_writer.LARGE:
        assert_same(state, make_state(mark, num_values))
    else:
        assert digest(make_state(mark, num_values)) == expected_digest
