"""The report of the doctor: a line per finding, or one JSON object at the end."""

import json
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from samestep.tools.doctor.context import Participants
from samestep.tools.doctor.findings import FAIL, PASS, WARN, Finding

COLOURS = {PASS: "\x1b[32m", WARN: "\x1b[33m", FAIL: "\x1b[1;31m"}
CLEAR, PLAIN = "\r\x1b[2K", "\x1b[0m"
WIDTH = 100  # of the text after status and name
INDENT = 22


class Report:
    """Collects findings, and prints them unless `as_json`. Another thread can close it."""

    def __init__(self, *, as_json: bool) -> None:
        self.findings: list[Finding] = []
        self._as_json = as_json
        self._members = Participants(("?",), (0,))
        self._began_s = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._check, self._check_s = "", 0.0
        self._is_terminal = not as_json and sys.stdout.isatty()
        self._closing, self._is_closed = threading.Lock(), False

    def open(self, participants: Participants) -> None:
        """Print the participants."""
        self._members = participants
        if not self._as_json:
            print(f"samestep doctor: {participants.describe()}", flush=True)

    def begin(self, check: str) -> None:
        """Start a check."""
        self._check, self._check_s = check, time.monotonic()
        if self._is_terminal:
            print(f"{CLEAR}  ...   {check}", end="", flush=True)

    def add(self, *findings: Finding) -> None:
        """Add the findings of the current check."""
        self._seconds[self._check] = round(time.monotonic() - self._check_s, 3)
        for finding in findings:
            self.findings.append(finding)
            if not self._as_json:
                print(self._format(finding), flush=True)

    def _format(self, finding: Finding) -> str:
        status = finding.status.upper() if finding.status == FAIL else finding.status
        clear = ""
        if self._is_terminal:
            status, clear = f"{COLOURS[finding.status]}{status}{PLAIN}", CLEAR
        lines = textwrap.wrap(finding.found, WIDTH)
        if finding.advice:
            lines += [
                f"-> {line}" if i == 0 else f"   {line}"
                for i, line in enumerate(textwrap.wrap(finding.advice, WIDTH - 3))
            ]
        text = ("\n" + " " * INDENT).join(lines)
        return f"{clear}  {status}  {finding.check:<{INDENT - 8}}{text}"

    @property
    def code(self) -> int:
        """The exit code: 1 if a check has failed."""
        return int(any(finding.status == FAIL for finding in self.findings))

    def close(self) -> int:
        """Print the summary, once. Returns the exit code."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                seconds = time.monotonic() - self._began_s
                print(json.dumps(self._build_record(seconds), indent=1) if self._as_json else self._sum_up(seconds))
                sys.stdout.flush()
        return self.code

    def _sum_up(self, seconds: float) -> str:
        counts = Counter(finding.status for finding in self.findings)
        parts = [f"{counts[PASS]} passed"]
        for status, word in ((WARN, "warning"), (FAIL, "failure")):
            if counts[status]:
                parts.append(f"{counts[status]} {word}{'s' if counts[status] > 1 else ''}")
        clear = CLEAR if self._is_terminal else ""
        return f"{clear}{', '.join(reversed(parts))}, in {seconds:.1f} s"

    def _build_record(self, seconds: float) -> Mapping[str, Any]:
        worst = next((s for s in (FAIL, WARN) if any(f.status == s for f in self.findings)), PASS)
        return {
            "status": worst,
            "world_size": len(self._members.hosts),
            "hosts": [self._members.name_node(node) for node in range(len(self._members.leaders))],
            "seconds": round(seconds, 3),
            "seconds_by_check": self._seconds,
            "findings": [
                {"check": f.check, "status": f.status, "found": f.found, "advice": f.advice, "measured": f.measured}
                for f in self.findings
            ],
        }
