"""What a check is, and what it comes to: facts that every rank looks up, and a judgement on all of them."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from samestep.tools.doctor.context import Context, Members

MAX_NAMED = 6
PASS, WARN, FAIL = "pass", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        check: what was looked at.
        status: PASS, WARN or FAIL.
        found: what was found, for a person.
        advice: what to do; "" where nothing is.
        measured: for a machine: plain JSON.
    """

    check: str
    status: str
    found: str
    advice: str = ""
    measured: Any = None


@dataclass(frozen=True)
class Facts:
    """What the ranks have looked up for one check; those that could not are left out.

    Attributes:
        by_rank: of each rank; None of those that had nothing to look at.
    """

    members: Members
    by_rank: Mapping[int, Any]

    @cached_property
    def by_node(self) -> dict[int, Any]:
        """What the first rank of each node has looked up."""
        found = {node: self.by_rank.get(leader) for node, leader in enumerate(self.members.leaders)}
        return {node: fact for node, fact in found.items() if fact is not None}


@dataclass(frozen=True)
class Check:
    """One thing to look at.

    Attributes:
        look: called on every rank; returns plain JSON.
        judge: called on rank 0 with what all ranks have looked up. Pure.
        limit_s: after which a `look` is taken for hung.
        advice: what to do where it cannot be looked at.
        in_thread: `look` can be left behind where it hangs; what calls collectives, or starts a process, cannot.
    """

    name: str
    look: Callable[[Context], Any]
    judge: Callable[[Facts], list[Finding]]
    limit_s: float = 10.0
    advice: str = "see what it says there, and run the doctor again"
    in_thread: bool = True


def judge_answers(check: Check, members: Members, answers: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """The findings of a check, one per rank's reason for having none included.

    Args:
        check: the check.
        members: who was asked.
        answers: by rank `{"facts": ...}` or `{"error": reason}`; a rank that is not there did not answer.
    """
    facts = {rank: answer["facts"] for rank, answer in answers.items() if "facts" in answer}
    reasons = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
    reasons |= {rank: "it did not answer" for rank in range(len(members.hosts)) if rank not in answers}
    findings = []
    for reason in Counter(reasons.values()):
        ranks = [rank for rank, other in reasons.items() if other == reason]
        where = "" if len(members.hosts) == 1 else f" on {members.name_ranks(ranks)}"
        findings.append(Finding(check.name, FAIL, f"could not be checked{where}: {reason}", check.advice))
    if facts:
        try:
            findings += check.judge(Facts(members, facts))
        except Exception as error:
            found = f"could not be judged: {type(error).__name__}: {error}"
            findings.append(Finding(check.name, FAIL, found, "that is a fault of samestep: report it"))
    return findings


def format_bytes(count: float) -> str:
    """Such as "256 MB" (powers of 1024, as sizes of messages and memory are)."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 10 or count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TB"


def format_rate(bytes_per_s: float) -> str:
    """Such as "1.25 GB/s" (powers of 1000, as rates of links and disks are)."""
    for unit in ("B/s", "KB/s", "MB/s"):
        if bytes_per_s < 1000:
            return f"{bytes_per_s:.3g} {unit}"
        bytes_per_s /= 1000
    return f"{bytes_per_s:.3g} GB/s"


def format_s(seconds: float) -> str:
    """Such as "21 us", "3.4 ms" or "1.2 s"."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.3g} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
