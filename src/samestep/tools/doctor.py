"""The examination of `samestep doctor`: its checks, on every rank. Rank 0 derives findings and prints the report.

A check is a `look` on each rank, which collects facts as plain JSON, and a pure `judge` on rank 0. The ranks report
through the store of the rendezvous: so a rank that is missing or hangs is named, too.

The checks: whether versions agree, whether all nodes share the directory for runs and reach each other, whether the
results of collectives are right, and which link between two nodes is slow.
"""

import math
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from statistics import median_high
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist

from samestep.cli import print_json
from samestep.config import is_url
from samestep.console import describe_ranks, format_bytes, print_result, show_activity
from samestep.errors import Error
from samestep.processes import leave_now
from samestep.snapshot.copies import find_writers
from samestep.torch_internals import set_timeout
from samestep.version import __version__
from samestep.world.environment import Environment, read_host, read_master
from samestep.world.group import Group, open_group
from samestep.world.host import find_source, read_host_id
from samestep.world.process_group import StoreExchange, choose_device, close_group

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

# of the checks
CONNECT_S = 3.0
EXCHANGE_S = 10.0
TIMEOUT_S = 10.0  # of a collective
EXACT_SIZES = (1, 1000, 65537)  # elements per rank
NUM_SENT = 1 << 20  # numbers in a message
SLOW_LINK = 0.5  # fraction of the median
GROUP_ADVICE = (
    "check that all ranks run and reach each other on all ports; with several interfaces, name one "
    "(GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=eth0); NCCL_DEBUG=INFO shows what NCCL does"
)


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


# --- versions -----------------------------------------------------------------------------------------------------


def look_at_versions(context: Context) -> dict[str, str]:
    """Return name -> version; "" if it is not installed."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
        "samestep": __version__,
    }


def judge_versions(participants: Participants, facts: Mapping[int, Mapping[str, str]]) -> list[Finding]:
    """Report the ranks that differ from the first one."""
    versions = facts[min(facts)]
    problems = []
    for name, usual in versions.items():
        for other in sorted({theirs[name] for theirs in facts.values()} - {usual}):
            where = participants.name_ranks([rank for rank, theirs in facts.items() if theirs[name] == other])
            found = f"{name} is {other or 'missing'} on {where}, and {usual or 'missing'} on rank {min(facts)}"
            problems.append(Finding("versions", FAIL, found, f"install the same {name} on all"))
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return problems or [Finding("versions", PASS, shown, measured=versions)]


# --- the directory for runs ---------------------------------------------------------------------------------------


def look_at_run_dir(context: Context) -> dict[str, Any] | None:
    """On the first rank of each node: check the directory as the node sees it. Leaves no files."""
    if is_url(context.run_dir):
        return None
    wanted = Path(context.run_dir or "runs")
    _, writers = find_writers(context.exchange, wanted)  # as a run does it
    if not context.is_leader:
        return None
    problem = ""
    try:
        path = wanted.absolute()
        existing = next(each for each in (path, *path.parents) if each.exists())  # a run creates the others
        with TemporaryFile(dir=existing, buffering=0) as file:
            file.write(b"x")
    except OSError as error:
        problem = error.strerror or str(error)
    return {"wanted": str(wanted), "problem": problem, "writer": writers.get(context.environment.rank, 0)}


def judge_run_dir(participants: Participants, facts: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Report nodes that cannot write it, or do not share it."""
    if not facts:
        return [Finding("run_dir", PASS, "a URL, which a run checks when it begins")]
    wanted = next(iter(facts.values()))["wanted"]
    problems = []
    for rank, fact in facts.items():
        if fact["problem"]:
            found = f"{wanted} cannot be written on {participants.hosts[rank]} ({fact['problem']})"
            problems.append(Finding("run_dir", FAIL, found, "name another with --run-dir, and make it writable"))
    apart = [participants.nodes[rank] for rank, fact in facts.items() if not fact["problem"] and fact["writer"]]
    if apart:
        found = (
            f"{wanted} on {participants.name_nodes(apart)} differs from that on {participants.name_node(0)}: a run "
            "keeps a copy on each such host"
        )
        problems.append(
            Finding(
                "run_dir",
                WARN,
                found,
                "use a file system that all nodes share, if there is one, and give the full path",
            )
        )
    where = ", and is one for all hosts" if len(facts) > 1 else ""
    return problems or [Finding("run_dir", PASS, f"{wanted} can be written{where}")]


# --- connections between nodes ------------------------------------------------------------------------------------


def look_at_connections(context: Context) -> list[str] | None:
    """On the first rank of each node: try to connect to every other node. Returns which cannot be reached, and why."""
    name = context.participants.name_node
    leaders = context.participants.leaders
    if len(leaders) == 1 or not context.is_leader:
        return None
    with socket.create_server(("", 0)) as server:
        mine = [find_source(read_master()[0]), server.getsockname()[1]]
        theirs = context.exchange.exchange("connections", mine, EXCHANGE_S, leaders)
        others = [node for node, leader in enumerate(leaders) if leader in theirs and theirs[leader] != mine]
        with ThreadPoolExecutor(8) as pool:
            problems = [*pool.map(lambda node: try_connection(*theirs[leaders[node]]), others)]
        context.exchange.exchange("connected", True, EXCHANGE_S, leaders)  # the servers can close
    own = name(context.participants.nodes[context.environment.rank])
    found = zip(others, problems, strict=True)
    return [f"{own} cannot reach {name(node)} at {problem}" for node, problem in found if problem]


def try_connection(address: str, port: int) -> str:
    """Return why an address cannot be reached; "" if it can."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return f"{address}: {error.strerror or error}"
    return ""


def judge_connections(participants: Participants, facts: Mapping[int, Sequence[str]]) -> list[Finding]:
    """Report the pairs of nodes of which one does not reach the other."""
    advice = "open the firewall between them for all ports, or name another interface (GLOO_SOCKET_IFNAME)"
    problems = [Finding("connections", FAIL, found, advice) for theirs in facts.values() for found in theirs]
    return problems or [Finding("connections", PASS, "all hosts reach each other" if facts else "one host")]


# --- collectives -----------------------------------------------------------------------------------------------------


def look_at_collectives(context: Context) -> dict[str, Any] | None:
    """Open the group, check and measure. Collective. Returns None with one rank."""
    if context.environment.world_size == 1:
        return None
    context.doing = "joining the ranks"
    device = choose_device(context.environment, context.device)
    group = open_group(context.environment, device, compares=False)
    set_timeout(timedelta(seconds=TIMEOUT_S))
    try:
        return {"wrong": check_results(context, group), "links": measure_links(context, group), "device": device.type}
    finally:
        group.close()
        with suppress(RuntimeError):
            close_group()


def check_results(context: Context, group: Group) -> list[str]:
    """Return a sentence for each operation whose result is not exact. float32 represents all numbers exactly."""
    wrong = {}
    size = group.world_size
    for num in EXACT_SIZES:
        context.doing = f"collectives of {num} numbers per rank"
        pattern = torch.arange(num * size) % 97  # rank r adds r to it
        given = (pattern + group.rank).float().to(group.device)
        total = given.clone()
        dist.all_reduce(total)
        gathered = [torch.empty_like(given[:num]) for _ in range(size)]
        dist.all_gather(gathered, given[:num])
        shares = torch.empty_like(given)
        dist.all_to_all_single(shares, given)
        own = pattern[group.rank * num :][:num]
        expected = {
            "all-reduce": (total, pattern * size + size * (size - 1) // 2),
            "all-gather": (torch.cat(gathered), torch.cat([pattern[:num] + rank for rank in range(size)])),
            "all-to-all": (shares, torch.cat([own + rank for rank in range(size)])),
        }
        for name, (found, wanted) in expected.items():
            if differing := int((found.cpu() != wanted).sum()):
                wrong[name] = f"{differing} of {len(wanted)} numbers of an {name} are wrong"
    return list(wrong.values())


def measure_links(context: Context, group: Group) -> list[dict[str, Any]]:
    """Measure the links between neighbouring nodes in both directions, one after the other. Collective.

    Returns:
        {"from", "to", "bytes_per_s"} for each link, with the names of the nodes.
    """
    leaders = context.participants.leaders
    if len(leaders) == 1:
        return []
    ring = [(node, (node + 1) % len(leaders)) for node in range(len(leaders))]
    own = []
    for ends in dict.fromkeys([*ring, *((b, a) for a, b in ring)]):
        group.gather_number(0)  # waits for all ranks, so that one link is measured at a time
        sender, receiver = map(context.participants.name_node, ends)
        context.doing = f"sending from {sender} to {receiver}"
        start, end = (leaders[node] for node in ends)
        took_s = _time_message(group, start, end)
        if group.rank == start:
            own.append({"from": sender, "to": receiver, "bytes_per_s": 4 * NUM_SENT / took_s})
    return [link for theirs in group.gather(own) for link in theirs]


def _time_message(group: Group, start: int, end: int) -> float:
    """Return the seconds from the start of a message to its answer; infinite on ranks that take no part."""
    took_s = math.inf
    data = torch.zeros(NUM_SENT, device=group.device)
    answer = torch.zeros(1, device=group.device)
    for _ in range(2 if group.rank in (start, end) else 0):  # the first one opens the connection
        began_s = time.perf_counter()
        if group.rank == start:
            dist.send(data, end)
            dist.recv(answer, end)
        else:
            dist.recv(data, start)
            dist.send(answer, start)
        float(answer)  # waits for a GPU
        took_s = min(took_s, time.perf_counter() - began_s)
    return took_s


def judge_collectives(participants: Participants, facts: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Report wrong results, and links much slower than the others."""
    if not facts:
        return [Finding("collectives", PASS, "one rank: nothing to exchange (more with --nproc-per-node 2)")]
    problems = []
    for sentence in dict.fromkeys(text for fact in facts.values() for text in fact["wrong"]):
        where = participants.name_ranks([rank for rank, fact in facts.items() if sentence in fact["wrong"]])
        problems.append(
            Finding(
                "collectives",
                FAIL,
                f"{sentence}: {where}",
                "do not train here: look for failing memory, GPUs or network cards there (dmesg, DCGM)",
            )
        )
    one = next(iter(facts.values()))
    right = Finding("collectives", PASS, f"right, over {'NCCL' if one['device'] == 'cuda' else 'gloo'}")
    return [*(problems or [right]), *judge_links(one["links"])]


def judge_links(links: Sequence[dict[str, Any]]) -> list[Finding]:
    """Report the slowest link; warn about links much slower than the median (of two: than the faster one)."""
    if not links:
        return []
    measured = sorted(links, key=lambda link: float(link["bytes_per_s"]))
    shown = [f"{link['from']} -> {link['to']}, {format_bytes(link['bytes_per_s'])}/s" for link in measured]
    usual = median_high([link["bytes_per_s"] for link in links])
    num_slow = sum(link["bytes_per_s"] < SLOW_LINK * usual for link in links)
    if not num_slow:
        found = f"{format_bytes(usual)}/s from host to host (median); slowest: {shown[0]}"
        return [Finding("links", PASS, found, measured=measured)]
    return [
        Finding(
            "links",
            WARN,
            f"the slowest link is {'; then '.join(shown[: min(num_slow, 4)])}; the median is {format_bytes(usual)}/s",
            "check the network card, cable and switch port that they share (ethtool: speed, errors), or leave it out",
            measured,
        )
    ]


CHECKS = (
    DoctorCheck("versions", look_at_versions, judge_versions),
    DoctorCheck("run_dir", look_at_run_dir, judge_run_dir),
    DoctorCheck("connections", look_at_connections, judge_connections, limit_s=30.0),
    DoctorCheck("collectives", look_at_collectives, judge_collectives, limit_s=45.0, advice=GROUP_ADVICE),
)


# --- the examination --------------------------------------------------------------------------------------------------


def examine(
    environment: Environment,
    checks: Sequence[DoctorCheck] = CHECKS,
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
        with suppress(RuntimeError):  # rank 0, whose process can hold the store, ends last
            if rank == 0:
                exchange.post("end", True)
                exchange.collect("bye", PARTING_S, range(1, exchange.world_size))
            else:
                exchange.collect("end", END_S, [0])
                exchange.post("bye", True)
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
        leave_now(code)  # a thread that hangs in a collective would also block the end of the interpreter
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
