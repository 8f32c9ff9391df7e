"""Runs all checks on every rank. Rank 0 collects the facts, derives findings and prints the report.

A check is a `look` on each rank, which collects facts as plain JSON, and a pure `judge` on rank 0. The ranks report
through the store of the rendezvous: so a rank that is missing or hangs is named, too.
"""

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from samestep.console import describe_ranks
from samestep.tools.doctor.findings import FAIL, PASS, Finding, FindingsReport, Participants
from samestep.world.environment import Environment, read_host
from samestep.world.host import read_host_id
from samestep.world.rendezvous_store import StoreExchange

JOIN_S = 60.0  # for the other ranks to join
GRACE_S = 5.0  # for the other ranks to finish a check after rank 0
PARTING_S = 2.0
END_S = 600.0  # for rank 0 to finish
MAX_REASON = 300


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


Judge = Callable[[Participants, Mapping[int, Any]], Iterable[Finding]]


@dataclass(frozen=True)
class DoctorCheck:
    """A check.

    Attributes:
        look: collects facts on every rank, as plain JSON; None if there is nothing to check.
        judges: name of a line in the report -> derives its findings from rank -> facts, without the None. Yields the
            problems, then what holds without them.
        limit_s: time limit of `look`.
        advice: what to do if `look` fails.
    """

    look: Callable[[Context], Any]
    judges: Mapping[str, Judge]
    limit_s: float = 15.0
    advice: str = "correct that, and run the doctor again"

    @property
    def name(self) -> str:
        """The name of the first line."""
        return next(iter(self.judges))


def examine(
    environment: Environment,
    checks: Sequence[DoctorCheck],
    *,
    run_dir: str | None = None,
    device: str | None = None,
    json: bool = False,
) -> int:
    """Run the checks as one of the ranks. Returns the exit code: 1 on rank 0 if a check has failed, else 0."""
    report = FindingsReport(as_json=json) if environment.rank == 0 else None
    problem = "cannot reach"
    try:
        exchange = StoreExchange(environment, JOIN_S)
        problem = "has lost"
        hellos = exchange.exchange("hello", [read_host(), f"{read_host()}/{read_host_id('net')}"], JOIN_S)
        if missing := sorted(set(range(environment.world_size)) - set(hellos)):
            return _end_alone(report, f"{describe_ranks(missing)} did not come within {JOIN_S:g} s")
        hosts, keys = zip(*(hellos[rank] for rank in sorted(hellos)), strict=True)
        nodes = list(dict.fromkeys(keys))
        participants = Participants(hosts, [*map(nodes.index, keys)])
        context = Context(environment, run_dir, device, exchange, participants)
        if report is not None:
            report.open(participants)
        have_hung = [_check(context, check, report) for check in checks]
        code = 0 if report is None else report.close()
        _wait_for_rank_0(exchange)
    except (OSError, RuntimeError) as error:  # of the store; `look` returns those of a check
        return _end_alone(report, f"rank {environment.rank} {problem} the rendezvous store: {describe_error(error)}")
    if any(have_hung):
        sys.stdout.flush()
        os._exit(code)  # a thread that hangs in a collective would also block the end of the interpreter
    return code


def _end_alone(report: FindingsReport | None, what: str) -> int:
    """Report that the ranks cannot communicate."""
    if report is None:
        print(f"samestep doctor: {what}", file=sys.stderr)
        return 1
    advice = "see the output of those ranks; the port of the endpoint must be open to all hosts"
    report.add(Finding(FAIL, what, advice, check="rendezvous"))
    return report.close()


def _check(context: Context, check: DoctorCheck, report: FindingsReport | None) -> bool:
    """Run one check. Returns whether it hung on this rank."""
    if report is not None:
        report.begin(check.name)
    context.doing = ""
    answer = look_bounded(context, check)
    hang = f"it hung{_format_activity(context)}, and was abandoned after {check.limit_s:g} s"
    context.exchange.post(f"check/{check.name}", answer or {"error": hang})
    if report is not None:
        answers = context.exchange.collect(f"check/{check.name}", check.limit_s + GRACE_S if answer else GRACE_S)
        report.add(*judge_answers(check, context.participants, answers))
    return answer is None


def look_bounded(context: Context, check: DoctorCheck) -> dict[str, Any] | None:
    """Run a check on this rank, in a thread: {"facts": ...} or {"error": reason}. None if it hangs; it is abandoned."""
    answers: list[dict[str, Any]] = []

    def look() -> None:
        try:
            answers.append({"facts": check.look(context)})
        except Exception as error:
            answers.append({"error": describe_error(error) + _format_activity(context)})

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(check.limit_s)
    return answers[0] if answers else None


def _format_activity(context: Context) -> str:
    return f" in {context.doing}" if context.doing else ""


def describe_error(error: BaseException) -> str:
    """Format an error in one line, without the C++ stack that torch appends."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}"[:MAX_REASON] if lines else type(error).__name__


def judge_answers(
    check: DoctorCheck, participants: Participants, answers: Mapping[int, Mapping[str, Any]]
) -> list[Finding]:
    """Return the findings of a check, including one per error of `look`.

    Args:
        answers: rank -> `{"facts": ...}` or `{"error": reason}`; ranks that did not answer are missing.
    """
    facts = {rank: answer["facts"] for rank, answer in answers.items() if answer.get("facts") is not None}
    reasons = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
    reasons |= {rank: "it did not answer" for rank in range(len(participants.hosts)) if rank not in answers}
    findings = []
    for reason in Counter(reasons.values()):
        ranks = [rank for rank, other in reasons.items() if other == reason]
        where = "" if len(participants.hosts) == 1 else f" on {participants.name_ranks(ranks)}"
        findings.append(Finding(FAIL, f"could not be checked{where}: {reason}", check.advice, check=check.name))
    for name, judge in check.judges.items() if facts or not reasons else ():
        found = [replace(finding, check=name) for finding in judge(participants, facts)]
        findings += [finding for finding in found if finding.status != PASS] or found
    return findings


def _wait_for_rank_0(exchange: StoreExchange) -> None:
    """Wait for the report. Rank 0, whose process can hold the store, ends last."""
    with suppress(RuntimeError):
        if exchange.rank == 0:
            exchange.post("end", True)
            exchange.collect("bye", PARTING_S, range(1, exchange.world_size))
        else:
            exchange.collect("end", END_S, [0])
            exchange.post("bye", True)
