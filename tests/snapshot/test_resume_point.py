"""The choice of the point at which a run continues, from the content of its copies."""

from pathlib import Path

import pytest

from samestep.errors import Error, RunDirectoryError
from samestep.snapshot.manifest import Snapshot
from samestep.snapshot.run_record import CopyContent, ResumePoint, choose

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
    ],
)
def test_the_newest_sound_snapshot_of_all_copies(
    contents: list[CopyContent], source: int, step: int, rewinds: list[int]
) -> None:
    found, point = choose(contents, [4])
    assert (found, point.step, point.rewinds) == (source, step, rewinds)
    assert point.is_beginning is (contents[source].found is None)
    assert point.metrics_bytes == 10 * step


def test_rows_after_the_point_are_lost() -> None:
    _, point = choose([content(3, num_recorded=4), content(3, num_recorded=8)], [])
    assert point.num_recorded == 8


def test_a_run_does_not_begin_again_if_its_snapshots_are_damaged() -> None:
    with pytest.raises(RunDirectoryError, match="all are damaged"):
        choose([content(None), content(None, error=DAMAGED)], [])
    assert choose([content(None), content(None)], []) == (0, ResumePoint(rewinds=[]))
