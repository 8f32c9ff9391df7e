"""The report of the doctor: a line per finding, or one JSON object at the end."""

import json
import textwrap
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from samestep.console import print_result, show_activity
from samestep.tools.doctor.facts import FAIL, PASS, WARN, Finding, Participants
from samestep.units import format_count

COLOURS = {PASS: "green", WARN: "yellow", FAIL: "red"}
WIDTH = 100  # of the text after status and name
INDENT = 22


class FindingsReport:
    """Collects findings, and prints them unless `as_json`."""

    def __init__(self, *, as_json: bool) -> None:
        self.findings: list[Finding] = []
        self._as_json = as_json
        self._participants = Participants(("?",), (0,))
        self._began_s = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._check = ""
        self._check_s = 0.0

    def open(self, participants: Participants) -> None:
        """Print the participants."""
        self._participants = participants
        if not self._as_json:
            print(f"samestep doctor: {participants.summarize()}", flush=True)

    def begin(self, check: str) -> None:
        """Start a check."""
        self._check = check
        self._check_s = time.monotonic()
        if not self._as_json:
            show_activity(f"  ...   {check}")

    def add(self, *findings: Finding) -> None:
        """Add the findings of the current check."""
        self._seconds[self._check] = round(time.monotonic() - self._check_s, 3)
        self.findings += findings
        for finding in findings if not self._as_json else ():
            status = finding.status.upper() if finding.status == FAIL else finding.status
            lines = textwrap.wrap(finding.found, WIDTH)
            lines += textwrap.wrap(finding.advice, WIDTH, initial_indent="-> ", subsequent_indent="   ")
            text = ("\n" + " " * INDENT).join(lines)
            print_result(f"  {status}  {finding.check:<{INDENT - 8}}{text}", status, COLOURS[finding.status])

    def close(self) -> int:
        """Print the summary. Returns the exit code: 1 if a check has failed."""
        seconds = time.monotonic() - self._began_s
        counts = Counter(finding.status for finding in self.findings)
        if self._as_json:
            print(json.dumps(self._build_record(seconds, counts), indent=1), flush=True)
        else:
            parts = [format_count(counts[FAIL], "failure")] if counts[FAIL] else []
            parts += [format_count(counts[WARN], "warning")] if counts[WARN] else []
            show_activity("")
            print(f"{', '.join([*parts, f'{counts[PASS]} passed'])}, in {seconds:.1f} s", flush=True)
        return int(counts[FAIL] > 0)

    def _build_record(self, seconds: float, counts: Counter[str]) -> dict[str, Any]:
        participants = self._participants
        return {
            "status": next((status for status in (FAIL, WARN) if counts[status]), PASS),
            "world_size": len(participants.hosts),
            "hosts": [participants.name_node(node) for node in range(len(participants.leaders))],
            "seconds": round(seconds, 3),
            "seconds_by_check": self._seconds,
            "findings": [asdict(finding) for finding in self.findings],
        }
