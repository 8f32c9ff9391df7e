"""A check of the doctor, the facts that each rank collects for it, and the findings that follow."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from samestep.tools.doctor.context import Context, Participants

PASS, WARN, FAIL = "pass", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        check: name of the check.
        status: PASS, WARN or FAIL.
        found: the result, as text.
        advice: what to do, or "".
        measured: the measurements, as plain JSON.
    """

    check: str
    status: str
    found: str
    advice: str = ""
    measured: Any = None


@dataclass(frozen=True)
class Facts:
    """The facts of one check, without the ranks that failed to collect them.

    Attributes:
        by_rank: rank -> facts; None if there is nothing to check on that rank.
    """

    participants: Participants
    by_rank: Mapping[int, Any]

    @cached_property
    def by_node(self) -> dict[int, Any]:
        """The facts of the first rank of each node."""
        found = {node: self.by_rank.get(leader) for node, leader in enumerate(self.participants.leaders)}
        return {node: fact for node, fact in found.items() if fact is not None}


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        look: collects facts on every rank, as plain JSON.
        judge: derives findings from the facts of all ranks, on rank 0. Pure.
        limit_s: time limit of `look`.
        advice: what to do if `look` fails.
        in_thread: run `look` in a thread that can be abandoned. False if it uses collectives or starts a process.
    """

    name: str
    look: Callable[[Context], Any]
    judge: Callable[[Facts], list[Finding]]
    limit_s: float = 10.0
    advice: str = "correct that, and run the doctor again"
    in_thread: bool = True


def judge_answers(check: Check, participants: Participants, answers: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Return the findings of a check, including one per error of `look`.

    Args:
        answers: rank -> `{"facts": ...}` or `{"error": reason}`; ranks that did not answer are missing.
    """
    facts = {rank: answer["facts"] for rank, answer in answers.items() if "facts" in answer}
    reasons = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
    reasons |= {rank: "it did not answer" for rank in range(len(participants.hosts)) if rank not in answers}
    findings = []
    for reason in Counter(reasons.values()):
        ranks = [rank for rank, other in reasons.items() if other == reason]
        where = "" if len(participants.hosts) == 1 else f" on {participants.name_ranks(ranks)}"
        findings.append(Finding(check.name, FAIL, f"could not be checked{where}: {reason}", check.advice))
    if facts:
        try:
            findings += check.judge(Facts(participants, facts))
        except Exception as error:
            found = f"could not be judged: {type(error).__name__}: {error}"
            findings.append(Finding(check.name, FAIL, found, "this is a bug of samestep: report it"))
    return findings


def format_bytes(count: float) -> str:
    """Format a size of a message or of memory, in powers of 1024, such as "256 MB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 10 or count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TB"


def format_rate(bytes_per_s: float) -> str:
    """Format a rate of a link or disk, in powers of 1000, such as "1.25 GB/s"."""
    for unit in ("B/s", "KB/s", "MB/s"):
        if bytes_per_s < 1000:
            return f"{bytes_per_s:.3g} {unit}"
        bytes_per_s /= 1000
    return f"{bytes_per_s:.3g} GB/s"


def format_s(seconds: float) -> str:
    """Format a duration, such as "21 us", "3.4 ms" or "1.2 s"."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.3g} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
