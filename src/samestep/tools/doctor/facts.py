"""A check of the doctor: facts that every rank collects, and the findings that rank 0 derives from them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from samestep.units import format_ranks
from samestep.world.environment import Environment

if TYPE_CHECKING:
    from samestep.world.rendezvous_store import StoreExchange

PASS = "pass"
WARN = "warn"
FAIL = "fail"
MAX_NAMED = 6


@dataclass(frozen=True)
class DoctorOptions:
    """The options for every rank, as in RANK_FLAGS. `script`: the words after --script."""

    json: bool = False
    run_dir: str | None = None
    device: str | None = None
    num_threads: int | None = None
    batch_size: int | None = None
    micro_batch_size: int | None = None
    script: tuple[str, ...] = ()


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
        return _list([self.name_node(node) for node in sorted(nodes)])

    def name_ranks(self, ranks: Iterable[int]) -> str:
        """Format ranks by node, such as "h2" (all ranks of a node) or "rank 3 (h2)"."""
        some = sorted(ranks)
        if len(some) == len(self.nodes):
            return "all ranks" if len(some) > 1 else self.name_node(0)
        parts = []
        for node in sorted({self.nodes[rank] for rank in some}):
            there = [rank for rank in some if self.nodes[rank] == node]
            if there == self.of_node(node) and len(self.leaders) > 1:
                parts.append(self.name_node(node))
            else:
                parts.append(f"rank{'s' if len(there) > 1 else ''} {_list(there)} ({self.name_node(node)})")
        return _list(parts)

    def summarize(self) -> str:
        """Return a summary, such as "4 ranks on 2 hosts (h1, h2)"."""
        num_nodes = len(self.leaders)
        names = self.name_nodes(range(num_nodes))
        ranks = format_ranks(len(self.hosts))
        return f"{ranks} on {names}" if num_nodes == 1 else f"{ranks} on {num_nodes} hosts ({names})"


def _list(names: Sequence[object]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(map(str, names[:MAX_NAMED])) + more


@dataclass
class Context:
    """What a check can use on this rank.

    Attributes:
        exchange: exchanges values with the other ranks while there is no process group.
        doing: the current activity, reported when a check hangs.
    """

    environment: Environment
    options: DoctorOptions
    exchange: "StoreExchange"
    participants: Participants
    doing: str = ""

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.environment.rank in self.participants.leaders


@dataclass(frozen=True)
class CheckFacts:
    """The facts of one check by rank, without the ranks that failed to collect them or have nothing to check."""

    participants: Participants
    by_rank: Mapping[int, Any]

    @cached_property
    def by_node(self) -> dict[int, Any]:
        """The facts of the first rank of each node."""
        leaders = enumerate(self.participants.leaders)
        return {node: self.by_rank[leader] for node, leader in leaders if leader in self.by_rank}


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        status: PASS, WARN or FAIL.
        found: the result, as text.
        advice: what to do, or "".
        measured: the measurements, as plain JSON.
        check: the name of the line.
    """

    status: str
    found: str
    advice: str = ""
    measured: Any = None
    check: str = ""


def well(found: str, measured: Any = None) -> Finding:
    """A result without a problem. It is left out if the same check finds problems, which then get `measured`."""
    return Finding(PASS, found, measured=measured)


def warning(found: str, advice: str) -> Finding:
    """A problem with which training can run."""
    return Finding(WARN, found, advice)


def failure(found: str, advice: str) -> Finding:
    """A problem that prevents training."""
    return Finding(FAIL, found, advice)


Judge = Callable[[CheckFacts], Iterable[Finding]]


@dataclass(frozen=True)
class DoctorCheck:
    """A check.

    Attributes:
        look: collects facts on every rank, as plain JSON; None if there is nothing to check.
        judges: name of a line in the report -> derives its findings from the facts of all ranks, on rank 0. Pure:
            yields the problems, then `well`.
        limit_s: time limit of `look`, which runs in a thread; None: it runs in the main thread and limits itself.
        advice: what to do if `look` fails.
    """

    look: Callable[[Context], Any]
    judges: Mapping[str, Judge]
    limit_s: float | None = 10.0
    advice: str = "correct that, and run the doctor again"

    @property
    def name(self) -> str:
        """The name of the first line."""
        return next(iter(self.judges))


def judge_answers(
    check: DoctorCheck, participants: Participants, answers: Mapping[int, Mapping[str, Any]]
) -> list[Finding]:
    """Return the findings of a check, including one per error of `look`.

    Args:
        answers: rank -> `{"facts": ...}` or `{"error": reason}`; ranks that did not answer are missing.
    """
    looked = {rank: answer["facts"] for rank, answer in answers.items() if "facts" in answer}
    facts = CheckFacts(participants, {rank: fact for rank, fact in looked.items() if fact is not None})
    reasons = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
    reasons |= {rank: "it did not answer" for rank in range(len(participants.hosts)) if rank not in answers}
    findings = []
    for reason in Counter(reasons.values()):
        ranks = [rank for rank, other in reasons.items() if other == reason]
        where = "" if len(participants.hosts) == 1 else f" on {participants.name_ranks(ranks)}"
        findings.append(Finding(FAIL, f"could not be checked{where}: {reason}", check.advice, check=check.name))
    for name, judge in check.judges.items() if looked else ():
        try:
            findings += run_judge(name, judge, facts)
        except Exception as error:
            found = f"could not be judged: {type(error).__name__}: {error}"
            findings.append(Finding(FAIL, found, "this is a bug of samestep: report it", check=name))
    return findings


def run_judge(name: str, judge: Judge, facts: CheckFacts) -> list[Finding]:
    """Return the problems that a judge finds, or else its `well`, each with the measurements."""
    findings = [replace(finding, check=name) for finding in judge(facts)]
    measured = next((finding.measured for finding in findings if finding.measured is not None), None)
    problems = [replace(finding, measured=measured) for finding in findings if finding.status != PASS]
    return problems or findings


def format_s(seconds: float) -> str:
    """Format a duration, such as "21 us", "3.4 ms" or "1.2 s"."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.3g} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
