"""A rank that takes the place of the writer makes the run's files what it would have written itself."""

from pathlib import Path

import pytest

from samestep.errors import NotHealed
from samestep.plan.ledger import RECORD, Entry
from samestep.snapshot.append_log import AppendLog, format_row
from samestep.snapshot.kept_logs import MAX_KEPT, TAIL_BYTES, Heal, KeptLogs
from samestep.snapshot.run_directory import RunDirectory
from samestep.watch.records import HEALS, read_rows

ROWS = [
    {"step": step, name: step / 3}
    for step in (1, 2, 3, 4)
    for name in (["train/loss"] if step % 2 else ["train/loss", "validation/loss", "validation/accuracy"])
]
LINES = [format_row(row) for row in ROWS]
RECORDS = [Entry(step, 0, 8, step, 2 * step, 3 * step).pack() for step in range(4)]


def keep(num_rows: int = len(ROWS), num_steps: int = 4, first_step: int = 0) -> KeptLogs:
    kept = KeptLogs()
    for row in ROWS[:num_rows]:
        kept.write_row(row)
    for step in range(first_step, num_steps):
        kept.enter(lambda step=step: Entry(step, 0, 8, step, 2 * step, 3 * step), is_late=True)
    return kept


def complete(kept: KeptLogs, directory: Path, metrics: bytes, ledger: bytes, steps_done: int) -> tuple[bytes, bytes]:
    rows_path, ledger_path = directory / "metrics.jsonl", directory / "ledger.bin"
    rows_path.write_bytes(metrics)
    ledger_path.write_bytes(ledger)
    logs = AppendLog(rows_path, flush_s=1), AppendLog(ledger_path, flush_s=1, record_bytes=RECORD.size)
    kept.complete(*logs, steps_done)
    for log in logs:
        log.append(b"more\n")
        log.close()
    return rows_path.read_bytes().removesuffix(b"more\n"), ledger_path.read_bytes().removesuffix(b"more\n")


@pytest.mark.parametrize("num_written", range(len(ROWS) + 1))
@pytest.mark.parametrize("part", [0, 7])
def test_rows_are_completed(tmp_path: Path, num_written: int, part: int) -> None:
    """Whatever number of them the file has, and with a part of the next one."""
    written = b"".join(LINES[:num_written]) + b"".join(LINES[num_written:])[:part]
    assert complete(keep(), tmp_path, written, b"".join(RECORDS), 4)[0] == b"".join(LINES)


@pytest.mark.parametrize("num_kept", range(4, len(ROWS) + 1))
def test_rows_that_this_rank_has_not_reached_are_cut(tmp_path: Path, num_kept: int) -> None:
    """It writes them later, once."""
    steps_done = ROWS[num_kept - 1]["step"]
    found, _ = complete(keep(num_kept), tmp_path, b"".join(LINES), b"".join(RECORDS), int(steps_done))
    assert found == b"".join(LINES[:num_kept])


@pytest.mark.parametrize("num_bytes", [0, 5, RECORD.size, 3 * RECORD.size, 4 * RECORD.size])
@pytest.mark.parametrize("steps_done", [3, 4])
def test_the_ledger_is_completed_or_cut(tmp_path: Path, num_bytes: int, steps_done: int) -> None:
    written = b"".join(RECORDS)[:num_bytes]
    _, found = complete(keep(num_steps=steps_done), tmp_path, b"".join(LINES), written, steps_done)
    assert found == b"".join(RECORDS[:steps_done])


def test_a_gap_in_the_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotHealed, match="the ledger lacks steps"):
        complete(keep(first_step=2), tmp_path, b"", RECORDS[0], 4)


def test_rows_of_an_earlier_start(tmp_path: Path) -> None:
    """The file may be longer than what is read of it."""
    before = b"".join(format_row({"step": step, "train/loss": 0.5}) for step in range(-TAIL_BYTES // 30, 1))
    assert len(before) > TAIL_BYTES
    kept = keep()
    assert kept.get_rows(3) == [row for row in ROWS if row["step"] > 3]
    assert complete(kept, tmp_path, before + LINES[0], b"".join(RECORDS), 4)[0] == before + b"".join(LINES)
    for steps_done in (0, 4):  # the earlier start may have ended with rows of the step that this one has reached
        kept = keep()
        kept.resume(len(before + LINES[0]))
        kept.write_row(ROWS[1])
        found, _ = complete(kept, tmp_path, before + LINES[0], b"".join(RECORDS), steps_done)
        assert found == before + LINES[0] + LINES[1]


@pytest.mark.parametrize("num_written", range(5))
def test_rows_can_be_long(tmp_path: Path, num_written: int) -> None:
    """Longer than what is read of the file at first; alone, or together with others of the same step."""
    for rows in ([{"step": 0, "text": "x" * TAIL_BYTES * 3}] * 4, [{"step": 0, "text": "x" * (TAIL_BYTES // 2)}] * 4):
        kept = KeptLogs()
        for row in rows:
            kept.write_row(row)
        whole = b"".join(map(format_row, rows))
        written = b"".join(map(format_row, rows[:num_written]))
        assert complete(kept, tmp_path, written, b"", 0)[0] == whole


def test_a_gap_in_the_rows_is_refused(tmp_path: Path) -> None:
    kept = KeptLogs()
    for k in range(MAX_KEPT + 10):
        kept.write_row({"step": 0, "k": k})
    with pytest.raises(NotHealed, match="the metrics lack rows"):
        complete(kept, tmp_path, format_row({"step": 0, "k": 0}), b"", 0)


@pytest.mark.parametrize("num_recorded", [0, 1, 2])
def test_each_death_is_recorded_once(tmp_path: Path, num_recorded: int) -> None:
    """Ranks 0 and 1 have died in turn. Rank 1 may have recorded one death, or both, before its own."""
    heals = [Heal(4, [0], 3, 0.1), Heal(5, [2], 2, 0.1)]
    (tmp_path / "run").mkdir()
    earlier = RunDirectory(tmp_path / "run", warn=pytest.fail)
    for heal in heals:
        earlier.write_heal(heal)  # of an earlier start, with the same ranks
    kept = keep()
    kept.heals += heals
    dying = RunDirectory(tmp_path / "run", warn=pytest.fail)
    dying.continue_start(1, KeptLogs(), 0, is_in_loop=False)
    for heal in heals[:num_recorded]:
        dying.write_heal(heal)
    for directory in (earlier, dying):
        directory.close()
    directory = RunDirectory(tmp_path / "run", warn=pytest.fail)
    directory.continue_start(1, kept, 4, is_in_loop=False)
    directory.write_heal(Heal(6, [0, 1], 1, 0.1))  # it saw both deaths together
    directory.close()
    rows = [(row["start"], row["step"], row["lost"]) for row in read_rows(tmp_path / "run" / HEALS)]
    assert rows[:2] == [(0, 4, [0]), (0, 5, [2])]
    assert rows[2:] == [(1, 4, [0]), (1, 5, [2]), (1, 6, [1])]
