"""The examination of `samestep doctor`: all checks on every rank. Rank 0 derives findings and prints the report.

A check is a `look` on each rank, which collects facts as plain JSON, and a pure `judge` on rank 0. The ranks report
through the store of the rendezvous: so a rank that is missing or hangs is named, too.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from samestep.cli import print_json
from samestep.console import describe_ranks, print_result, show_activity
from samestep.errors import Error
from samestep.world.environment import Environment, read_host
from samestep.world.host import read_host_id
from samestep.world.process_group import StoreExchange

PASS = "pass"
WARN = "warn"
FAIL = "FAIL"
JOIN_S = 60.0  # for the other ranks to join
GRACE_S = 5.0  # for the other ranks to finish a check after rank 0
PARTING_S = 2.0
END_S = 600.0  # for rank 0 to finish
MAX_NAMED = 6
MAX_REASON = 300
INDENT = 22
COLOURS = {PASS: "green", WARN: "yellow", FAIL: "red"}
STORE_ADVICE = "see the output of the other ranks; the port of the endpoint must be open to all hosts"


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


@dataclass
class Context:
    """What a check can use on this rank.

    Attributes:
        run_dir, device: the options; None if not given.
        exchange: exchanges values with the other ranks while there is no process group.
        doing: the current activity, reported when a check hangs.
    """

    environment: Environment
    run_dir: str | None
    device: str | None
    exchange: StoreExchange
    participants: Participants
    doing: str = ""

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.environment.rank in self.participants.leaders


@dataclass(frozen=True)
class DoctorCheck:
    """A check.

    Attributes:
        name: of its line in the report.
        look: collects facts on every rank, as plain JSON; None if there is nothing to check.
        judge: derives the findings from rank -> facts, without the None.
        limit_s: time limit of `look`.
        advice: what to do if `look` fails.
    """

    name: str
    look: Callable[[Context], Any]
    judge: Callable[[Participants, Mapping[int, Any]], Iterable[Finding]]
    limit_s: float = 15.0
    advice: str = "correct that, and run the doctor again"


def examine(
    environment: Environment,
    checks: Sequence[DoctorCheck],
    *,
    run_dir: str | None = None,
    device: str | None = None,
    json: bool = False,
) -> int:
    """Run the checks as one of the ranks. Returns the exit code: 1 on rank 0 if a check has failed, else 0.

    Raises:
        Error: the ranks cannot communicate.
    """
    rank = environment.rank
    try:
        exchange = StoreExchange(environment, JOIN_S)
        hellos = exchange.exchange("hello", [read_host(), f"{read_host()}/{read_host_id('net')}"], JOIN_S)
        if missing := sorted(set(range(environment.world_size)) - set(hellos)):
            raise Error(f"{describe_ranks(missing)} did not come within {JOIN_S:g} s: {STORE_ADVICE}", code="SS507")
        hosts, keys = zip(*(hellos[rank] for rank in sorted(hellos)), strict=True)
        nodes = list(dict.fromkeys(keys))
        participants = Participants(hosts, [*map(nodes.index, keys)])
        context = Context(environment, run_dir, device, exchange, participants)
        findings: list[Finding] = []
        has_hung = False
        for check in checks:
            if rank == 0 and not json:
                show_activity(f"  ...   {check.name}")
            hangs = not _look(context, check)
            has_hung |= hangs
            if rank == 0:
                limit_s = GRACE_S if hangs else check.limit_s + GRACE_S
                found = judge_answers(check, participants, exchange.collect(f"check/{check.name}", limit_s))
                findings += found
                if not json:
                    _print(found)
        _wait_for_rank_0(exchange)
    except (OSError, RuntimeError) as error:  # of the store; `look` returns those of a check
        raise Error(
            f"rank {rank} cannot reach the rendezvous store ({describe_error(error)}): {STORE_ADVICE}", code="SS507"
        ) from None
    statuses = {finding.status for finding in findings}
    if rank == 0 and json:
        status = next((each for each in (FAIL, WARN) if each in statuses), PASS)
        print_json(
            {
                "status": status,
                "world_size": environment.world_size,
                "hosts": [participants.name_node(node) for node in range(len(participants.leaders))],
                "findings": [asdict(finding) for finding in findings],
            }
        )
    code = int(FAIL in statuses)
    if has_hung:
        sys.stdout.flush()
        os._exit(code)  # a thread that hangs in a collective would also block the end of the interpreter
    return code


def _print(findings: Iterable[Finding]) -> None:
    for finding in findings:
        advice = f"\n{' ' * INDENT}-> {finding.advice}" if finding.advice else ""
        line = f"  {finding.status}  {finding.check:<{INDENT - 8}}{finding.found}{advice}"
        print_result(line, finding.status, COLOURS[finding.status])


def _look(context: Context, check: DoctorCheck) -> bool:
    """Collect the facts of a check, and post them. Returns False if it hung on this rank."""
    answers: list[dict[str, Any]] = []

    def look() -> None:
        try:
            answers.append({"facts": check.look(context)})
        except Exception as error:
            answers.append({"error": f"{describe_error(error)} ({context.doing})"})

    context.doing = "it had just begun"
    thread = threading.Thread(target=look, daemon=True)  # is abandoned if it hangs
    thread.start()
    thread.join(check.limit_s)
    hung = {"error": f"it hung, and was abandoned after {check.limit_s:g} s ({context.doing})"}
    context.exchange.post(f"check/{check.name}", answers[0] if answers else hung)
    return bool(answers)


def describe_error(error: BaseException) -> str:
    """Format an error in one line, without the C++ stack that torch appends."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])[:MAX_REASON]


def judge_answers(
    check: DoctorCheck, participants: Participants, answers: Mapping[int, Mapping[str, Any]]
) -> list[Finding]:
    """Return the findings of a check, including one per error of `look`.

    Args:
        answers: rank -> `{"facts": ...}` or `{"error": reason}`; ranks that did not answer are missing.
    """
    facts = {rank: answer["facts"] for rank, answer in answers.items() if answer.get("facts") is not None}
    missing = dict.fromkeys(set(range(len(participants.hosts))) - answers.keys(), "it did not answer")
    reasons = missing | {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
    findings = []
    for reason in dict.fromkeys(reasons.values()):
        where = participants.name_ranks([rank for rank, other in reasons.items() if other == reason])
        findings.append(Finding(check.name, FAIL, f"could not be checked on {where}: {reason}", check.advice))
    return findings if reasons and not facts else [*findings, *check.judge(participants, facts)]


def _wait_for_rank_0(exchange: StoreExchange) -> None:
    """Wait for the report. Rank 0, whose process can hold the store, ends last."""
    with suppress(RuntimeError):
        if exchange.rank == 0:
            exchange.post("end", True)
            exchange.collect("bye", PARTING_S, range(1, exchange.world_size))
        else:
            exchange.collect("end", END_S, [0])
            exchange.post("bye", True)
