"""Rows and records that a rank keeps in memory, so that it can take the place of the rank that writes the run."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.decoding import parse_json
from samestep.errors import NotHealed
from samestep.files import read_last_bytes
from samestep.plan.ledger import RECORD, Entry
from samestep.snapshot.append_log import AppendLog, StepRecords, format_row

MAX_KEPT = 10_000  # rows, and records: the writer's files are at most a second old
TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Heal:
    """A death of ranks after which the others have continued without a new start.

    Attributes:
        step: in which ranks were lost.
        lost: these ranks, as numbered at the start.
        world_size: number of ranks that continue.
        seconds: the time until they were a group.
    """

    step: int
    lost: Sequence[int]
    world_size: int
    seconds: float


class KeptLogs(StepRecords):
    """The last rows of metrics and records of the ledger, as the writer of the run appends them.

    Every rank computes the same rows and records, so whoever lives can complete the files of a writer that has died.
    """

    def __init__(self) -> None:
        self.heals: list[Heal] = []  # of this start: the writer may not record the last ones before it dies
        self._rows: deque[tuple[int, bytes]] = deque(maxlen=MAX_KEPT)  # step, line
        self._records: deque[tuple[int, bytes]] = deque(maxlen=MAX_KEPT)
        self._has_dropped = False
        self._num_earlier_bytes = 0

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Keep a row. It has a "step"."""
        self._has_dropped = self._has_dropped or len(self._rows) == MAX_KEPT
        self._rows.append((row["step"], format_row(row)))

    def _record(self, entry: Entry) -> None:
        self._records.append((entry.step, entry.pack()))

    def resume(self, num_bytes: int) -> None:
        """Forget the rows so far, because an earlier start has written them.

        Args:
            num_bytes: size of the rows that earlier starts have written.
        """
        self._rows.clear()
        self._has_dropped = False
        self._num_earlier_bytes = num_bytes

    def get_rows(self, after_step: int) -> list[dict[str, Any]]:
        """Return the rows after a step."""
        return [parse_json(line) for step, line in self._rows if step > after_step]

    def complete(self, metrics: AppendLog, ledger: AppendLog, steps_done: int) -> None:
        """Make the writer's files what this rank would have written.

        They may lack what the writer had not written yet, end with a part of it, or be ahead by a step.

        Args:
            metrics, ledger: the files.
            steps_done: the number of steps that this rank has finished.

        Raises:
            NotHealed: a file ends before what is kept begins.
            OSError: they cannot be written.
        """
        self.record_last()
        num_recorded = min(ledger.flush() // RECORD.size, steps_done)
        missing = [record for step, record in self._records if num_recorded <= step < steps_done]
        if len(missing) != steps_done - num_recorded:
            raise NotHealed("the ledger lacks steps that no other rank has kept")
        ledger.cut(num_recorded * RECORD.size)
        ledger.append(b"".join(missing))
        ledger.flush()
        last_step = max([steps_done, *(step for step, _ in self._rows)])
        num_last = sum(step == last_step for step, _ in self._rows)
        written, end = _read_end(metrics, self._num_earlier_bytes, last_step, num_last)
        newest = written[-1] if written else -1
        if self._has_dropped and newest <= self._rows[0][0]:
            raise NotHealed("the metrics lack rows that no other rank has kept")
        metrics.cut(end)
        rows = [line for step, line in self._rows if step == newest][written.count(newest) :]
        metrics.append(b"".join([*rows, *(line for step, line in self._rows if step > newest)]))
        metrics.flush()


def _read_end(metrics: AppendLog, begin: int, last_step: int, num_last: int) -> tuple[list[int], int]:
    """Return the steps of the last rows of a file, with all rows of the newest one, and where they end.

    Reads nothing before the byte `begin`. Does not count a row whose end is missing, rows after `last_step`, and more
    than `num_last` rows of it.
    """
    size = metrics.flush()
    num_bytes = TAIL_BYTES
    while True:
        tail = read_last_bytes(metrics.path, min(num_bytes, max(size - begin, 0)))
        start = size - len(tail)
        end = tail.find(b"\n") + 1 if start > begin else 0
        steps: list[int] = []
        for line in tail[end : tail.rfind(b"\n") + 1].splitlines(keepends=True):
            step = parse_json(line)["step"]
            if step > last_step or (step == last_step and steps.count(step) == num_last):
                break
            steps.append(step)
            end += len(line)
        if start <= begin or (steps and steps[0] < steps[-1]):
            return steps, start + end
        num_bytes *= 2
