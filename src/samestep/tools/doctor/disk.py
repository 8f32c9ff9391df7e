"""Checks the directory for runs: free space, speed, and whether all nodes share it."""

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from samestep.config import is_url
from samestep.console import describe_size
from samestep.errors import Error
from samestep.snapshot.object_store import ObjectStore, find_copies
from samestep.tools.doctor.checks import Context, Facts, Finding, failure, format_bytes, format_s, warning, well

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
    rank, exchange, leaders = context.environment.rank, context.exchange, context.participants.leaders
    if is_url(context.options.run_dir):
        return _look_at_store(context, str(context.options.run_dir)) if rank == 0 else None
    wanted = Path(context.options.run_dir or DEFAULT)
    if rank == 0:
        exchange.post("disk/token", uuid.uuid4().hex)
    if not context.is_leader:
        return None
    token: str = exchange.collect("disk/token", EXCHANGE_S, [0])[0]
    place = find_existing(wanted)
    mark = place / f"{MARK}{token}-{leaders.index(rank)}"
    facts: dict[str, Any] = {"wanted": str(wanted), "place": str(place), "problem": ""}
    try:
        mark.touch(exist_ok=False)
    except OSError as error:
        facts["problem"] = error.strerror or str(error)
    try:
        made = exchange.exchange("disk/made", not facts["problem"], EXCHANGE_S, leaders)
        facts["sees"] = find_marks(place, token, [node for node, leader in enumerate(leaders) if made.get(leader)])
        exchange.exchange("disk/seen", True, EXCHANGE_S, leaders)
    finally:
        with suppress(OSError):
            mark.unlink()
    # Rank 0 writes the snapshots, and all nodes at once would share the disk.
    return facts if facts["problem"] else facts | _measure(place, is_timed=rank == 0)


def _look_at_store(context: Context, url: str) -> dict[str, Any]:
    """On rank 0, which alone uses the URL: check that it is reachable, and the disk of the working copy."""
    try:
        ObjectStore(url).is_empty()
    except Error as error:
        return {"wanted": url, "place": url, "problem": str(error)}
    place = find_existing(find_copies(context.environment.overrides.get("local_dir")))
    facts = {"wanted": f"the working copy of {url}, in {place}", "place": str(place), "problem": "", "sees": [0]}
    return facts | _measure(place, is_timed=True)


def _measure(place: Path, *, is_timed: bool) -> dict[str, Any]:
    try:
        room = os.statvfs(place)
        free_bytes = room.f_bavail * room.f_frsize
        speed = measure_speed(place / f"{MARK}{uuid.uuid4().hex}-speed", free_bytes) if is_timed else {}
    except OSError as error:
        return {"problem": error.strerror or str(error)}
    return {"free_bytes": free_bytes, **speed}


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


def judge_disk(facts: Facts) -> Iterator[Finding]:
    """Report problems of free space, sharing and speed."""
    by_node, name_node, name_nodes = facts.by_node, facts.participants.name_node, facts.participants.name_nodes
    if not by_node:
        return
    writable = {node: fact for node, fact in by_node.items() if not fact["problem"]}
    for node, fact in by_node.items():
        if fact["problem"]:
            found = f"{fact['place']} cannot be written on {name_node(node)} ({fact['problem']})"
            yield failure(found, "name another with --run-dir, and make it writable")
    first = writable.get(0, {})
    wanted = next(iter(by_node.values()))["wanted"]
    if first and (apart := [n for n, fact in writable.items() if n not in first["sees"] or 0 not in fact["sees"]]):
        found = f"{wanted} on {name_nodes(apart)} differs from that on {name_node(0)}: "
        found += "a run keeps a copy on each such host"
        yield warning(found, "use a file system that all nodes share, if there is one, and give the full path")
    for node, fact in writable.items():
        if fact["free_bytes"] < FEW_BYTES:
            found = f"{format_bytes(fact['free_bytes'])} are left at {fact['place']} on {name_node(node)}"
            advice = "make room: a snapshot holds the model and the optimizer's state, and keep_last=3 of them stay"
            yield (failure if fact["free_bytes"] < LEAST_BYTES else warning)(found, advice)
    shown = f"{wanted}{' is one for all hosts,' if len(by_node) > 1 else ':'} "
    shown += f"{format_bytes(min((fact['free_bytes'] for fact in writable.values()), default=0))} left"
    if "fsync_s" in first:
        where, speed, fsync_s = f"{first['place']} on {name_node(0)}", first["write_bytes_per_s"], first["fsync_s"]
        if speed < SLOW_BYTES_PER_S:
            found = f"{where} takes {describe_size(speed)}/s: a snapshot of 1 GB takes {1e9 / speed:.0f} s"
            yield warning(found, "choose a faster disk, or save less often (--snapshot-every)")
        if fsync_s > SLOW_FSYNC_S:
            found = f"{where} needs {format_s(fsync_s)} to make a small file durable"
            yield warning(found, "choose a faster disk: every snapshot waits for several")
        shown += f", takes {describe_size(speed)}/s, fsync {format_s(fsync_s)}"
    yield well(shown, {name_node(node): fact for node, fact in by_node.items()})
