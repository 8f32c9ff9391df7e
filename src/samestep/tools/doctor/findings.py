"""What the doctor finds: the ranks that take part, the findings about them, and the report."""

import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from samestep.command_line import print_json
from samestep.console import describe_ranks, print_result, show_activity
from samestep.units import format_count, format_ranks, format_time

PASS = "pass"
WARN = "warn"
FAIL = "FAIL"
COLOURS = {PASS: "green", WARN: "yellow", FAIL: "red"}
MAX_NAMED = 6
WIDTH = 100  # of the text after status and name
INDENT = 22


@dataclass(frozen=True)
class Participants:
    """The ranks that take part in the examination.

    Attributes:
        hosts: the name of each rank's host.
        nodes: the node number of each rank; a node has one kernel and one network stack.
    """

    hosts: Sequence[str]
    nodes: Sequence[int]

    @cached_property
    def leaders(self) -> list[int]:
        """The first rank of each node, by node."""
        return [list(self.nodes).index(node) for node in range(max(self.nodes) + 1)]

    def name_node(self, node: int) -> str:
        """Return the name of its host, with the node number if several hosts have that name."""
        names = [self.hosts[leader] for leader in self.leaders]
        return names[node] if names.count(names[node]) == 1 else f"{names[node]} (node {node})"

    def name_nodes(self, nodes: Iterable[int]) -> str:
        """Return the names of several nodes, at most MAX_NAMED."""
        names = [self.name_node(node) for node in sorted({*nodes})]
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return ", ".join(names[:MAX_NAMED]) + more

    def name_ranks(self, ranks: Sequence[int]) -> str:
        """Return ranks and their hosts, such as "ranks 2 and 3 on h2"."""
        return f"{describe_ranks(ranks)} on {self.name_nodes(self.nodes[rank] for rank in ranks)}"

    def summarize(self) -> str:
        """Return a summary, such as "4 ranks on h1, h2"."""
        return f"{format_ranks(len(self.hosts))} on {self.name_nodes(self.nodes)}"


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        check: the name of the line.
        status: PASS; WARN, a problem with which training can run; or FAIL, one that prevents it.
        found: the result, as text.
        advice: what to do, or "".
        measured: the measurements, as plain JSON.
    """

    check: str
    status: str
    found: str
    advice: str = ""
    measured: Any = None


class FindingsReport:
    """Collects findings, and prints a line for each, or with `as_json` one JSON object at the end."""

    def __init__(self, *, as_json: bool) -> None:
        self.findings: list[Finding] = []
        self._as_json = as_json
        self._participants = Participants(("?",), (0,))
        self._began_s = time.monotonic()

    def open(self, participants: Participants) -> None:
        """Print the participants."""
        self._participants = participants
        if not self._as_json:
            print(f"samestep doctor: {participants.summarize()}", flush=True)

    def begin(self, check: str) -> None:
        """Show that a check is under way."""
        if not self._as_json:
            show_activity(f"  ...   {check}")

    def add(self, findings: Iterable[Finding]) -> None:
        """Add the findings of a check."""
        for finding in findings:
            self.findings.append(finding)
            if not self._as_json:
                lines = textwrap.wrap(finding.found, WIDTH)
                lines += textwrap.wrap(finding.advice, WIDTH, initial_indent="-> ", subsequent_indent="   ")
                text = ("\n" + " " * INDENT).join(lines)
                line = f"  {finding.status}  {finding.check:<{INDENT - 8}}{text}"
                print_result(line, finding.status, COLOURS[finding.status])

    def close(self) -> int:
        """Print the summary. Returns the exit code: 1 if a check has failed."""
        seconds = time.monotonic() - self._began_s
        counts = Counter(finding.status for finding in self.findings)
        if self._as_json:
            names = [self._participants.name_node(node) for node in range(len(self._participants.leaders))]
            record = {
                "status": next((status for status in (FAIL, WARN) if counts[status]), PASS),
                "world_size": len(self._participants.hosts),
                "hosts": names,
                "seconds": round(seconds, 3),
                "findings": [asdict(finding) for finding in self.findings],
            }
            print_json(record)
        else:
            words = {FAIL: "failure", WARN: "warning"}
            parts = [format_count(counts[status], word) for status, word in words.items() if counts[status]]
            show_activity("")
            print(f"{', '.join([*parts, f'{counts[PASS]} passed'])}, in {format_time(seconds)}", flush=True)
        return int(counts[FAIL] > 0)
