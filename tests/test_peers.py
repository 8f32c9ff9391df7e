"""benchmarks/peers: what the comparison with other trainers counts. `make peers` runs the other trainers."""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from support import commands

FOLDER = Path(__file__).parents[1] / "benchmarks" / "peers"


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(FOLDER)
    names = runpy.run_path(str(FOLDER / "compare.py"))
    monkeypatch.delitem(sys.modules, "task")
    return names


def write_steps(directory: Path, rank: int, *steps: tuple[str, str, range]) -> None:
    lines = [f"{before} {after} {','.join(map(str, samples))}\n" for before, after, samples in steps]
    (directory / f"steps-{rank}").write_text("".join(lines))


def test_steps_are_followed_from_the_final_weights(tmp_path: Path, compare: dict[str, Any]) -> None:
    """An epoch has one step. The second process resumed at `b`, so that the step to `c` was lost."""
    halves = range(320), range(320, 640)
    steps = ("a", "b"), ("b", "c"), ("b", "d"), ("d", "e")
    for rank, half in enumerate(halves):
        write_steps(tmp_path, rank, *((*step, half) for step in steps))
    (tmp_path / "digest").write_text("e")
    outcome = compare["evaluate"](tmp_path, 2, 1.0)
    assert (outcome.num_steps, outcome.steps_lost) == (3, 1)
    assert (outcome.samples_skipped, outcome.samples_repeated) == (2 * 640, 0)  # 3 of 5 epochs


def test_samples_count_by_their_uses(tmp_path: Path, compare: dict[str, Any]) -> None:
    """The first process uses its half in each of 6 steps, the second one the first half in the last two."""
    write_steps(tmp_path, 0, *((str(i), str(i + 1), range(320)) for i in range(6)))
    write_steps(tmp_path, 1, *((str(i), str(i + 1), range(320, 640) if i < 4 else range(320)) for i in range(6)))
    (tmp_path / "digest").write_text("6")
    outcome = compare["evaluate"](tmp_path, 2, 1.0)
    assert (outcome.num_steps, outcome.steps_lost) == (6, 0)
    assert (outcome.samples_skipped, outcome.samples_repeated) == (320, 3 * 320)


@pytest.mark.soak
def test_samestep_loses_no_sample_in_the_comparison() -> None:
    """With one kill; the other trainers are not installed here."""
    command = [sys.executable, FOLDER / "compare.py", "--quick", "--forked", "--json"]
    env = os.environ | {"PEERS_STEP_S": "0"}
    done = commands.run(command, env=env, check=True, capture_output=True, text=True)
    (row,) = json.loads(done.stdout)
    assert row["same bits on 1 process"]
    assert row["same bits after the kills"]
    assert (row["steps in the final weights"], row["samples skipped"], row["samples repeated"]) == (100, 0, 0)
    assert row["steps lost"] == 7  # the first snapshot comes later
