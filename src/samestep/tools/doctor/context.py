"""The context of a check: the participating ranks, and this rank's place among them."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from samestep.errors import Error
from samestep.tools.doctor.doctor_options import Options
from samestep.world.environment import Environment
from samestep.world.group import choose_device
from samestep.world.store_exchange import StoreExchange

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

    def of_node(self, node: int) -> list[int]:
        """The ranks of a node."""
        return [rank for rank, other in enumerate(self.nodes) if other == node]

    def name_node(self, node: int) -> str:
        """Return the name of its host, with the node number if several hosts have that name."""
        names = [self.hosts[leader] for leader in self.leaders]
        name = names[node]
        return name if names.count(name) == 1 else f"{name} (node {node})"

    def name_nodes(self, nodes: Iterable[int]) -> str:
        """Return the names of several nodes, at most MAX_NAMED."""
        names = [self.name_node(node) for node in sorted(nodes)]
        return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")

    def name_ranks(self, ranks: Iterable[int]) -> str:
        """Format ranks by node, such as "h2" (all ranks of a node) or "rank 3 (h2)"."""
        some = sorted(ranks)
        if len(some) == len(self.nodes):
            return "all ranks" if len(some) > 1 else self.name_node(0)
        parts = []
        for node in sorted({self.nodes[rank] for rank in some}):
            mine, there = self.of_node(node), [rank for rank in some if self.nodes[rank] == node]
            if there == mine and len(self.leaders) > 1:
                parts.append(self.name_node(node))
            else:
                which = ", ".join(map(str, there[:MAX_NAMED])) + (" ..." if len(there) > MAX_NAMED else "")
                parts.append(f"rank{'s' if len(there) > 1 else ''} {which} ({self.name_node(node)})")
        more = f" and {len(parts) - MAX_NAMED} more" if len(parts) > MAX_NAMED else ""
        return ", ".join(parts[:MAX_NAMED]) + more

    def describe(self) -> str:
        """Return a summary, such as "4 ranks on 2 hosts (h1, h2)"."""
        num_ranks, num_nodes = len(self.hosts), len(self.leaders)
        names, ranks = self.name_nodes(range(num_nodes)), f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
        return f"{ranks} on {names}" if num_nodes == 1 else f"{ranks} on {num_nodes} hosts ({names})"


@dataclass
class Context:
    """What a check can use on this rank.

    Attributes:
        environment: rank, world size and devices of this rank.
        options: the options of the command.
        meeting: exchanges values with the other ranks while there is no process group.
        participants: the ranks and their nodes.
        clock: the wall clock of this host, in seconds.
        doing: the current activity, reported when a check hangs.
    """

    environment: Environment
    options: Options
    exchange: StoreExchange
    participants: Participants
    clock: Callable[[], float] = time.time
    doing: str = ""

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.environment.rank in self.participants.leaders

    @property
    def device(self) -> torch.device:
        """The device of this rank; the CPU where its GPU cannot be used."""
        try:
            return choose_device(self.environment, self.options.device)
        except Error:
            return torch.device("cpu")
