"""What ranks report to their launcher."""

import os
from collections.abc import Iterator
from multiprocessing import get_context

import pytest

from samestep.errors import InvalidValue, PeerFailed
from samestep.launch import rank_reports
from samestep.launch.rank_reports import LoopState, Reports, Result, build_failure, report
from samestep.world.environment import BegunRun, Outcome


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reports]:
    """The reports of this process, which is a rank."""
    found = Reports()
    monkeypatch.setattr(rank_reports, "_file", found.file)
    yield found
    os.close(found.file)


def test_the_newest_report_counts(launcher: Reports) -> None:
    run = BegunRun("runs/\udcff", 0, is_done=True)
    report(LoopState(Outcome.FINISHED, run))
    report(Result(0, b"value"))
    report(LoopState(Outcome.UNKNOWN, None))
    report(build_failure(1, PeerFailed("no"), 1))
    report(build_failure(1, InvalidValue("a\nb", code="SS101"), 2))
    launcher.read()
    assert launcher.run == run
    assert launcher.outcome is Outcome.UNKNOWN, "a further loop has begun"
    assert launcher.results == {0: b"value"}
    assert str(launcher.failures[1]) == "rank 1 failed: a\nb [SS101]"
    launcher.clear()
    launcher.read()
    assert (launcher.failures, launcher.results) == ({}, {})
    assert launcher.run is not None


def report_many(first: int) -> None:
    for number in range(first, first + 1000):
        report(Result(number, b"value"))


def test_ranks_that_report_at_the_same_time(launcher: Reports) -> None:
    """No report overwrites another one."""
    with get_context("fork").Pool(4) as ranks:
        ranks.map(report_many, range(0, 4000, 1000), chunksize=1)
    launcher.read()
    assert len(launcher.results) == 4000


def test_a_rank_that_is_killed_while_it_reports(launcher: Reports) -> None:
    os.write(launcher.file, b'\n{"type": "Result", "ra')
    launcher.read()
    report(Result(1, b""))
    launcher.read()
    assert launcher.results == {1: b""}
