"""What the doctor finds: the ranks that take part, and the findings about them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from samestep.console import describe_ranks

PASS = "pass"
WARN = "warn"
FAIL = "FAIL"
MAX_NAMED = 6


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
