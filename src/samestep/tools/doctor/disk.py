"""Checks the directory for runs: free space, speed, and whether all nodes share it."""

import os
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from samestep.config import is_url
from samestep.errors import Error
from samestep.snapshot.object_store import ObjectStore, Unreachable, find_copies
from samestep.tools.doctor.context import Context
from samestep.tools.doctor.findings import FAIL, PASS, WARN, Facts, Finding, format_bytes, format_rate, format_s

DEFAULT = "runs"
CHUNK_BYTES, MOST_BYTES = 4 << 20, 64 << 20
WRITE_S, FSYNC_S = 1.0, 0.5  # duration of the measurements
NUM_FSYNCS = 10
EXCHANGE_S = 8.0
VISIBLE_S = 2.0  # a network file system can cache the listing of a directory
MARK = ".samestep-doctor-"
LEAST_BYTES, FEW_BYTES = 1 << 30, 10 << 30
SLOW_BYTES_PER_S, SLOW_FSYNC_S = 30e6, 0.1


def find_existing(path: Path) -> Path:
    """Return the directory, or its nearest existing parent: a run creates it."""
    path = Path(os.path.abspath(path))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def look_at_disk(context: Context) -> dict[str, Any] | None:
    """On the first rank of each node: check the directory as the node sees it. Leaves no files."""
    leaders = context.participants.leaders
    if is_url(context.options.run_dir):
        return _look_at_store(context, str(context.options.run_dir)) if context.environment.rank == 0 else None
    wanted = Path(context.options.run_dir or DEFAULT)
    if context.environment.rank == 0:
        context.exchange.post("disk/token", uuid.uuid4().hex)
    if not context.is_leader:
        return None
    token: str = context.exchange.collect("disk/token", EXCHANGE_S, [0])[0]
    place = find_existing(wanted)
    node = context.participants.nodes[context.environment.rank]
    mark = place / f"{MARK}{token}-{node}"
    facts: dict[str, Any] = {"wanted": str(wanted), "place": str(place), "problem": ""}
    try:
        mark.touch(exist_ok=False)
    except OSError as error:
        facts["problem"] = error.strerror or str(error)
    try:
        made = context.exchange.exchange("disk/made", not facts["problem"], EXCHANGE_S, leaders)
        nodes = [node for node, leader in enumerate(leaders) if made.get(leader)]
        facts["sees"] = find_marks(place, token, nodes)
        context.exchange.exchange("disk/seen", True, EXCHANGE_S, leaders)
        if not facts["problem"]:
            facts["free_bytes"] = _measure_room(place)
            if node == 0:  # rank 0 writes the snapshots, and all nodes at once would share the disk
                facts |= measure_speed(place / f"{MARK}{token}-speed", facts["free_bytes"])
    except OSError as error:
        facts["problem"] = error.strerror or str(error)
    finally:
        with suppress(OSError):
            mark.unlink()
    return facts


def _look_at_store(context: Context, url: str) -> dict[str, Any]:
    """On rank 0, which alone uses the URL: check that it is reachable, and the disk of the working copy."""
    try:
        ObjectStore(url).is_empty()
    except (Error, Unreachable) as error:
        return {"wanted": url, "place": url, "problem": str(error)}
    place = find_existing(find_copies(context.environment.overrides.get("local_dir")))
    facts = {"wanted": f"the working copy of {url}, in {place}", "place": str(place), "problem": "", "sees": [0]}
    try:
        free_bytes = _measure_room(place)
        speed = measure_speed(place / f"{MARK}{uuid.uuid4().hex}-speed", free_bytes)
    except OSError as error:
        return facts | {"problem": error.strerror or str(error)}
    return facts | {"free_bytes": free_bytes} | speed


def _measure_room(place: Path) -> int:
    room = os.statvfs(place)
    return room.f_bavail * room.f_frsize


def find_marks(place: Path, token: str, nodes: Sequence[int]) -> list[int]:
    """Return those of `nodes` whose mark is visible here, waiting up to VISIBLE_S."""
    deadline_s = time.monotonic() + VISIBLE_S
    while True:
        with suppress(OSError):
            os.listdir(place)  # makes a network file system refresh its cache
        seen = [node for node in nodes if (place / f"{MARK}{token}-{node}").exists()]
        if len(seen) == len(nodes) or time.monotonic() > deadline_s:
            return seen
        time.sleep(0.02)


def measure_speed(path: Path, free_bytes: int) -> dict[str, float]:
    """Time writing and syncing a file, then syncing small appends."""
    chunk = os.urandom(min(CHUNK_BYTES, max(4096, free_bytes // 16)))
    most = min(MOST_BYTES, free_bytes // 4)
    try:
        with open(path, "xb", buffering=0) as file:
            began_s, written = time.perf_counter(), 0
            while written < most and time.perf_counter() - began_s < WRITE_S:
                written += file.write(chunk)
            os.fsync(file.fileno())
            took_s = time.perf_counter() - began_s
            waits: list[float] = []
            began_s = time.perf_counter()
            while len(waits) < NUM_FSYNCS and time.perf_counter() - began_s < FSYNC_S:
                file.write(b"x" * 4096)
                before_s = time.perf_counter()
                os.fsync(file.fileno())
                waits.append(time.perf_counter() - before_s)
    finally:
        with suppress(OSError):
            path.unlink()
    return {"write_bytes_per_s": written / took_s, "fsync_s": median(waits)}


def judge_disk(facts: Facts) -> list[Finding]:
    """Return the findings on free space, sharing and speed."""
    participants, by_node = facts.participants, facts.by_node
    findings = []
    if not by_node:
        return []
    shown = next(iter(by_node.values()))["wanted"]
    for node, fact in by_node.items():
        if fact["problem"]:
            found = f"{fact['place']} cannot be written on {participants.name_node(node)} ({fact['problem']})"
            findings.append(Finding("run_dir", FAIL, found, "name another with --run-dir, and make it writable"))
    well = {node: fact for node, fact in by_node.items() if not fact["problem"]}
    first = by_node.get(0)
    if first is not None and not first["problem"]:
        apart = [node for node in well if node not in first["sees"] or 0 not in well[node]["sees"]]
        if apart:
            names, first_name = participants.name_nodes(apart), participants.name_node(0)
            found = f"{shown} on {names} differs from that on {first_name}: a run keeps a copy on each such host"
            advice = "use a file system that all nodes share, if there is one, and give the full path"
            findings.append(Finding("run_dir", WARN, found, advice))
    for node, fact in well.items():
        free, name = fact["free_bytes"], participants.name_node(node)
        if free < FEW_BYTES:
            found = f"{format_bytes(free)} are left at {fact['place']} on {name}"
            advice = "make room: a snapshot holds the model and the optimizer's state, and keep_last=3 of them stay"
            findings.append(Finding("run_dir", FAIL if free < LEAST_BYTES else WARN, found, advice))
    speed, fsync_s = (well.get(0, {}).get(name) for name in ("write_bytes_per_s", "fsync_s"))
    where = f"{by_node[0]['place']} on {participants.name_node(0)}" if 0 in by_node else ""
    if speed is not None and speed < SLOW_BYTES_PER_S:
        found = f"{where} takes {format_rate(speed)}: a snapshot of 1 GB takes {1e9 / speed:.0f} s"
        findings.append(Finding("run_dir", WARN, found, "choose a faster disk, or save less often (--snapshot-every)"))
    if fsync_s is not None and fsync_s > SLOW_FSYNC_S:
        found = f"{where} needs {format_s(fsync_s)} to make a small file durable"
        findings.append(Finding("run_dir", WARN, found, "choose a faster disk: every snapshot waits for several"))
    measured = {participants.name_node(node): fact for node, fact in by_node.items()}
    if findings:
        return [replace(finding, measured=measured) for finding in findings]
    free = min(fact["free_bytes"] for fact in well.values())
    one = " is one for all hosts," if len(by_node) > 1 else ":"
    said = f"{shown}{one} {format_bytes(free)} left"
    said += f", takes {format_rate(speed)}, fsync {format_s(fsync_s)}" if speed and fsync_s else ""
    return [Finding("run_dir", PASS, said, measured=measured)]
