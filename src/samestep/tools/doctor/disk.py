"""Checks the directory for runs: free space, speed, and whether all nodes share it."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import IO, Any

from samestep.config import is_url
from samestep.errors import Error
from samestep.snapshot.writers import find_writers
from samestep.tools.doctor.facts import CheckFacts, Context, Finding, failure, format_s, warning, well
from samestep.units import format_bytes

DEFAULT = "runs"
CHUNK_BYTES = 4 << 20
MAX_BYTES = 64 << 20
# duration of the measurements
WRITE_S = 1.0
FSYNC_S = 0.5
NUM_FSYNCS = 10
LEAST_BYTES = 1 << 30
FEW_BYTES = 10 << 30
SLOW_BYTES_PER_S = 30e6
SLOW_FSYNC_S = 0.1


def find_existing(path: Path) -> Path:
    """Return the directory, or its nearest existing parent: a run creates it."""
    path = Path(os.path.abspath(path))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def look_at_disk(context: Context) -> dict[str, Any] | None:
    """On the first rank of each node: check the directory as the node sees it. Leaves no files."""
    rank = context.environment.rank
    if is_url(context.options.run_dir):
        return _look_at_store(context, str(context.options.run_dir)) if rank == 0 else None
    wanted = Path(context.options.run_dir or DEFAULT)
    _, writers = find_writers(context.exchange, wanted)
    if not context.is_leader:
        return None
    place = find_existing(wanted)
    # Rank 0 writes the snapshots, and all nodes at once would share the disk.
    measured = _measure(place, is_timed=rank == 0)
    return {"wanted": str(wanted), "place": str(place), "writer": writers.get(rank, 0), **measured}


def _look_at_store(context: Context, url: str) -> dict[str, Any]:
    """On rank 0, which alone uses the URL: check that it is reachable, and the disk of the working copy."""
    from samestep.snapshot.object_store import ObjectStore, find_copies

    try:
        ObjectStore(url).is_empty()
    except Error as error:
        return {"wanted": url, "place": url, "problem": str(error)}
    place = find_existing(find_copies(context.environment.overrides.get("local_dir")))
    wanted = f"the working copy of {url}, in {place}"
    return {"wanted": wanted, "place": str(place), "writer": 0, **_measure(place, is_timed=True)}


def _measure(place: Path, *, is_timed: bool) -> dict[str, Any]:
    try:
        room = os.statvfs(place)
        free_bytes = room.f_bavail * room.f_frsize
        with TemporaryFile(dir=place, buffering=0) as file:
            speed = measure_speed(file, free_bytes) if is_timed else {}
    except OSError as error:
        return {"problem": error.strerror or str(error)}
    return {"problem": "", "free_bytes": free_bytes, **speed}


def measure_speed(file: IO[bytes], free_bytes: int) -> dict[str, float]:
    """Time writing and syncing a file without a buffer, then syncing small appends."""
    chunk = os.urandom(min(CHUNK_BYTES, max(4096, free_bytes // 16)))
    most = min(MAX_BYTES, free_bytes // 4)
    began_s = time.perf_counter()
    written = 0
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
    return {"write_bytes_per_s": written / took_s, "fsync_s": median(waits)}


def judge_disk(facts: CheckFacts) -> Iterator[Finding]:
    """Report problems of free space, sharing and speed."""
    by_node = facts.by_node
    name_node = facts.participants.name_node
    name_nodes = facts.participants.name_nodes
    if not by_node:
        return
    writable = {node: fact for node, fact in by_node.items() if not fact["problem"]}
    for node, fact in by_node.items():
        if fact["problem"]:
            found = f"{fact['place']} cannot be written on {name_node(node)} ({fact['problem']})"
            yield failure(found, "name another with --run-dir, and make it writable")
    first = writable.get(0, {})
    wanted = next(iter(by_node.values()))["wanted"]
    if first and (apart := [node for node, fact in writable.items() if fact["writer"]]):
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
        where = f"{first['place']} on {name_node(0)}"
        speed = first["write_bytes_per_s"]
        fsync_s = first["fsync_s"]
        if speed < SLOW_BYTES_PER_S:
            found = f"{where} takes {format_bytes(speed)}/s: a snapshot of 1 GB takes {1e9 / speed:.0f} s"
            yield warning(found, "choose a faster disk, or save less often (--snapshot-every)")
        if fsync_s > SLOW_FSYNC_S:
            found = f"{where} needs {format_s(fsync_s)} to make a small file durable"
            yield warning(found, "choose a faster disk: every snapshot waits for several")
        shown += f", takes {format_bytes(speed)}/s, fsync {format_s(fsync_s)}"
    yield well(shown, {name_node(node): fact for node, fact in by_node.items()})
