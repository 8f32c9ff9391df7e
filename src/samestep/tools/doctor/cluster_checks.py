"""The checks of the doctor, and those of versions, the directory for runs, and connections between nodes."""

import os
import platform
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from samestep.config import is_url
from samestep.snapshot.shared_directory import find_writers
from samestep.tools.doctor.collectives import judge_collectives, look_at_collectives
from samestep.tools.doctor.examination import Context, DoctorCheck
from samestep.tools.doctor.findings import FAIL, PASS, WARN, Finding, Participants
from samestep.version import __version__
from samestep.world.environment import read_master

DEFAULT_RUN_DIR = "runs"
CONNECT_S = 3.0
EXCHANGE_S = 10.0
GROUP_ADVICE = (
    "check that all ranks run and reach each other on all ports; with several interfaces, name one "
    "(GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=eth0); NCCL_DEBUG=INFO shows what NCCL does"
)


# --- versions -----------------------------------------------------------------------------------------------------


def look_at_versions(context: Context) -> dict[str, str]:
    """Return name -> version; "" if it is not installed."""
    has_gpu = torch.cuda.is_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_gpu else ""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "",
        "NCCL": nccl,
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
    rank = context.environment.rank
    if is_url(context.run_dir):
        return None
    wanted = Path(context.run_dir or DEFAULT_RUN_DIR)
    _, writers = find_writers(context.exchange, wanted)  # as a run does it
    if not context.is_leader:
        return None
    problem = ""
    try:
        with TemporaryFile(dir=find_existing(wanted)) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        problem = error.strerror or str(error)
    return {"wanted": str(wanted), "problem": problem, "writer": writers.get(rank, 0)}


def find_existing(path: Path) -> Path:
    """Return the directory, or its nearest existing parent: a run creates it."""
    path = Path(os.path.abspath(path))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


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
        where = f"{participants.name_nodes(apart)} differs from that on {participants.name_node(0)}"
        found = f"{wanted} on {where}: a run keeps a copy on each such host"
        advice = "use a file system that all nodes share, if there is one, and give the full path"
        problems.append(Finding("run_dir", WARN, found, advice))
    where = ", and is one for all hosts" if len(facts) > 1 else ""
    return problems or [Finding("run_dir", PASS, f"{wanted} can be written{where}")]


# --- connections between nodes ------------------------------------------------------------------------------------


def look_at_connections(context: Context) -> dict[str, str] | None:
    """On the first rank of each node: try to connect to every other node. Returns node -> why it cannot be reached."""
    leaders = context.participants.leaders
    if len(leaders) == 1 or not context.is_leader:
        return None
    with socket.create_server(("", 0)) as server:
        mine = [find_address(read_master()[0]), server.getsockname()[1]]
        theirs = context.exchange.exchange("connections", mine, EXCHANGE_S, leaders)
        others = [node for node, leader in enumerate(leaders) if leader in theirs and theirs[leader] != mine]
        with ThreadPoolExecutor(8) as pool:
            problems = [*pool.map(lambda node: try_connection(*theirs[leaders[node]]), others)]
        context.exchange.exchange("connected", True, EXCHANGE_S, leaders)  # the servers can close
    return {str(node): problem for node, problem in zip(others, problems, strict=True) if problem}


def find_address(host: str) -> str:
    """Return the address of this node on the route to a host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing
        return str(probe.getsockname()[0])


def try_connection(address: str, port: int) -> str:
    """Return why an address cannot be reached; "" if it can."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return f"{address}: {error.strerror or error}"
    return ""


def judge_connections(participants: Participants, facts: Mapping[int, Mapping[str, str]]) -> list[Finding]:
    """Report the pairs of nodes of which one does not reach the other."""
    name = participants.name_node
    advice = "open the firewall between them for all ports, or name another interface (GLOO_SOCKET_IFNAME)"
    problems = [
        Finding(
            "connections",
            FAIL,
            f"{name(participants.nodes[rank])} cannot reach {name(int(node))} at {problem}",
            advice,
        )
        for rank, theirs in facts.items()
        for node, problem in theirs.items()
    ]
    return problems or [Finding("connections", PASS, "all hosts reach each other" if facts else "one host")]


CHECKS = (
    DoctorCheck("versions", look_at_versions, judge_versions),
    DoctorCheck("run_dir", look_at_run_dir, judge_run_dir),
    DoctorCheck("connections", look_at_connections, judge_connections, limit_s=30.0),
    DoctorCheck("collectives", look_at_collectives, judge_collectives, limit_s=45.0, advice=GROUP_ADVICE),
)
