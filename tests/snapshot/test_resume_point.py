"""The choice of the point at which a run continues, from what its copies hold."""

from pathlib import Path

import pytest

from samestep.errors import RunDirectoryError
from samestep.snapshot.resume_point import Holding, ResumePoint, choose
from samestep.snapshot.store import Snapshot


def snapshot(step: int, rewinds: int = 0) -> Snapshot:
    meta = {"metrics_bytes": 10 * step, "numbers": {}, "rewinds": rewinds}
    manifest = {"step": step, "digest": f"{step:064x}", "meta": meta, "files": {}}
    return Snapshot(Path(f"step-{step:08d}"), step, None, manifest, None)


def hold(step: int | None, newest_step: int | None = None, problem: str = "", num_recorded: int = 0) -> Holding:
    found = None if step is None else snapshot(step)
    return Holding(found, problem, (step or 0) if newest_step is None else newest_step, num_recorded)


@pytest.mark.parametrize(
    ("held", "source", "step", "rewinds"),
    [
        ([hold(None)], 0, 0, [4]),
        ([hold(6)], 0, 6, [4]),
        ([hold(6), hold(9), hold(9)], 1, 9, [4]),
        ([hold(None), hold(0)], 1, 0, [4]),
        ([hold(6, newest_step=8)], 0, 6, [4, 6]),  # it was asked for, or the one of step 8 is damaged
        ([hold(6), hold(3, newest_step=9)], 0, 6, [4, 6]),
        ([hold(6), hold(None, problem="all are damaged")], 0, 6, [4]),
        ([hold(0, newest_step=5)], 0, 0, [4, 0]),
    ],
)
def test_the_newest_sound_snapshot_of_all_copies(
    held: list[Holding], source: int, step: int, rewinds: list[int]
) -> None:
    found, point = choose(held, [4])
    assert (found, point.step, point.rewinds) == (source, step, rewinds)
    assert point.is_beginning is (held[source].found is None)
    assert point.metrics_bytes == 10 * step


def test_rows_after_the_point_are_lost() -> None:
    _, point = choose([hold(3, num_recorded=4), hold(3, num_recorded=8)], [])
    assert point.num_recorded == 8


def test_a_run_does_not_begin_again_if_its_snapshots_are_damaged() -> None:
    with pytest.raises(RunDirectoryError, match="all are damaged"):
        choose([hold(None), hold(None, problem="all are damaged")], [])
    assert choose([hold(None), hold(None)], []) == (0, ResumePoint(rewinds=[]))


def test_a_holding_is_sent_to_other_ranks() -> None:
    holding = Holding(snapshot(3), "", 7, 5)
    assert Holding.from_plain(holding.to_plain()) == holding
