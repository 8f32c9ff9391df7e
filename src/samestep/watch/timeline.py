"""A run's timeline: how long every rank spent in each phase, sampled while the run trains."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.watch.records import add_line
from samestep.watch.stall_diagnosis import Beat

# An interval grows with the time since the start, so that a day has 3,100 rows and a month 4,800.
FIRST_INTERVAL_S = 1.0
FINEST_PART = 500
FEW_RANKS = 64  # with more ranks, whose rows are longer, there are fewer rows


class Timeline:
    """Appends rows to `timeline.jsonl`: time, the step that each rank has reached, and seconds since the last row.

    A row is `{"time_s": ..., "steps": [...], "spent_s": {phase: [...]}}`, with a value per rank in each list. Beats of
    ranks are up to a second apart, so each rank's seconds belong to its own steps. Rows of earlier loops and starts
    remain. The first row of a loop has its `"first_step"`.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        self._path = path
        self._first_step = first_step
        self._began_s = self._written_s = time.monotonic()
        self._before: list[dict[str, float]] = []

    def add(self, ranks: Sequence[Beat], *, is_last: bool = False) -> None:
        """Append a row if one is due, or if it is the last one. Does not raise OSError."""
        now_s = time.monotonic()
        part_s = (now_s - self._began_s) / FINEST_PART * max(1.0, len(ranks) / FEW_RANKS)
        if now_s - self._written_s < max(FIRST_INTERVAL_S, part_s) and not is_last:
            return
        self._written_s = now_s
        before = self._before or [{} for _ in ranks]
        spent_s = {}
        for phase in dict.fromkeys(phase for beat in ranks for phase in beat.spent_s):
            pairs = zip(ranks, before, strict=True)
            seconds = [round(beat.spent_s.get(phase, 0.0) - was.get(phase, 0.0), 4) for beat, was in pairs]
            if any(seconds):
                spent_s[phase] = seconds
        is_first = not self._before
        self._before = [dict(beat.spent_s) for beat in ranks]
        if not spent_s and not is_first:
            return
        row: dict[str, Any] = {"time_s": round(time.time(), 3), "steps": [beat.step for beat in ranks]}
        row |= {"first_step": self._first_step} if is_first else {}
        row["spent_s"] = spent_s
        with suppress(OSError):
            add_line(self._path, json.dumps(row))
