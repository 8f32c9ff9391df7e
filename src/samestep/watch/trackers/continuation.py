"""Continuation of what an earlier process of the run has logged at a tracker's service."""

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from samestep.files import replace_file
from samestep.watch.records import RECORD, TRACKERS, read_or_empty
from samestep.watch.trackers.protocol import TrackerInfo

_writing = threading.Lock()  # each tracker logs on a thread of its own


class ServiceLog:
    """A run's id at a service and the last row that the service got, in `trackers.json` of the run directory.

    A resumed run continues under its id, and computes rows that the service has again, with the same values. Points
    cannot be removed from a service, so a run that went back to an earlier step continues under a new id.

    Attributes:
        run_id: "" if there is none, or the run went back.
        run_name: the name under which the service shows the run.
    """

    def __init__(self, info: TrackerInfo, service: str) -> None:
        self._info = info
        self._service = service
        known = read_or_empty(info.dir / TRACKERS).get(service, {}) if info.dir is not None else {}
        num_rewinds = len(read_or_empty(info.dir / RECORD).get("rewinds", [])) if info.dir is not None else 0
        self._is_rewound = known.get("num_rewinds", num_rewinds) != num_rewinds
        self._entry: dict[str, Any] = {"id": "", "num_rewinds": num_rewinds, "step": -1, "names": []}
        if not self._is_rewound:
            self._entry |= known
        self._earlier = (self._entry["step"], self._entry["names"])  # the last row of earlier processes
        self.run_id = str(self._entry["id"])
        self.run_name = f"{info.name} from step {info.resumed_step}" if self._is_rewound else info.name

    def begin(self, run_id: str, last_step: int | None = None, names: Sequence[str] = ()) -> None:
        """Set the id.

        Args:
            last_step, names: the last row that the service has; None: as in the file, of the run with this id.
        """
        if last_step is not None or run_id != self.run_id:
            self._earlier = (-1 if last_step is None else last_step, [*names])
        self.run_id = run_id
        self._entry |= {"id": run_id, "step": self._earlier[0], "names": self._earlier[1]}
        self._write()

    def drop_known(self, values: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the values that the service does not have from an earlier process."""
        last, names = self._earlier
        return {name: value for name, value in values.items() if step > last or (step == last and name not in names)}

    def keep(self, values: Mapping[str, Any], step: int) -> None:
        """Record that the service has taken values of a step. A process that is killed before logs one row twice."""
        before = self._entry["names"] if step == self._entry["step"] else []
        self._entry |= {"step": step, "names": [*before, *values]}
        with suppress(OSError):  # such as a full disk: values of repeated steps are then logged twice
            self._write()

    def _write(self) -> None:
        if self._info.dir is None:
            return
        with _writing:
            path = self._info.dir / TRACKERS
            replace_file(path, json.dumps({**read_or_empty(path), self._service: self._entry}, indent=2).encode())
