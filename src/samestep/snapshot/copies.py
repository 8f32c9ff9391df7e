"""A run on nodes that do not share its directory: each node keeps a complete copy.

Every rank holds the whole training state, so the first rank of each node (a *writer*) writes the same snapshots. Only
values that may differ between ranks come from rank 0, with each snapshot: buffers, `run.state`, the structure of the
state, and the rows of `metrics.jsonl`. Nothing is exchanged in a step. At the start, the writers agree on the newest
sound snapshot that any of them holds, and a node that lacks it gets the files that belong to it.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from samestep.console import escape, read_terminal
from samestep.data.source import list_orders
from samestep.errors import InvalidValue, RunDirectoryError
from samestep.files import open_regular, replacing
from samestep.plan.ledger import RECORD as LEDGER_RECORD
from samestep.snapshot.async_copy import SnapshotOrder, TrainingState, locate
from samestep.snapshot.manifest import Snapshot, measure
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.run_record import CopyContent, ResumePoint
from samestep.snapshot.store import SNAPSHOTS
from samestep.watch.records import LEDGER, METRICS, SHARED
from samestep.world.environment import read_host
from samestep.world.group import Group
from samestep.world.local_sockets import Gatherer

CHUNK_BYTES = 16 << 20

# Calls a function on writers with their directory. Returns the results on every rank. Raises Error.
Each = Callable[[Callable[[RunDirectory], Any], Sequence[int]], list[Any]]


def find_writers(group: Gatherer, run_dir: Path) -> tuple[Path, dict[int, int]]:
    """Find which nodes share the run's directory. The first rank of each node creates an empty file for that.

    Returns:
        Rank 0's `run_dir`, and a dict: first rank of a node -> the lowest rank with the same directory.
    """
    answers = group.gather((group.local_rank == 0, str(run_dir)))
    path = Path(answers[0][1])
    firsts = [rank for rank, (is_first, _) in enumerate(answers) if is_first or rank == 0]
    if len(firsts) == 1:
        return path, {0: 0}
    token = _create_token(path) if group.rank in firsts else None
    try:
        names = group.gather(None if token is None else token.name)
        shared = [
            rank
            for rank in firsts
            if names[rank] and any(os.path.exists(each / names[rank]) for each in (path, *path.parents))
        ]
        writers = group.gather(min(shared, default=group.rank))
    finally:
        if token is not None:
            token.unlink(missing_ok=True)
    return path, {rank: writers[rank] for rank in firsts}


def _create_token(path: Path) -> Path | None:
    """Create an empty file in the directory, or in the nearest existing one above it; return None if that fails.

    Its name is new, so no network file system has cached that it does not exist. Creating it refreshes the node's cache
    of that directory, in which another node may just have created the run directory.
    """
    with suppress(OSError):
        for directory in (path, *path.parents):
            if directory.is_dir():
                token = directory / f".samestep-node-{secrets.token_hex(8)}"
                token.touch(exist_ok=False)
                return token
    return None


def warn(sentence: str) -> None:
    """Print a message about this node's files, where its launcher prints: rank 0 may be on another node."""
    with suppress(OSError), os.fdopen(read_terminal(), "w", closefd=False) as terminal:
        terminal.write(f"samestep: {escape(f'{read_host()}: {sentence}')}\n")


class Copies:
    """The copies of a run in the directories of several ranks, the writers.

    Args:
        writers: these ranks.
    """

    def __init__(self, group: Group, writers: Sequence[int], each: Each) -> None:
        self._group = group
        self._writers = writers
        self._each = each
        self._num_sent = 0  # bytes of rank 0's rows that all writers have

    def complete(
        self, directory: RunDirectory | None, contents: Sequence[CopyContent], source: int, point: ResumePoint
    ) -> None:
        """Send the nodes that lack the snapshot of a point the files that belong to it.

        Args:
            directory: of this rank, if it writes one.
            contents: of the nodes' copies.
            source: the index of the node that has the snapshot.

        Raises:
            Error: a disk failed, or a file was damaged.
        """
        self._num_sent = point.metrics_bytes
        snapshot = point.snapshot
        if snapshot is None:
            return
        targets = [
            rank
            for rank, each in zip(self._writers, contents, strict=True)
            if each.found is None or not each.found.is_same(snapshot)
        ]
        if not targets:
            return
        sender = [self._writers[source]]
        [sizes] = self._each(partial(_measure_files, point, snapshot), sender)
        try:
            self._each(lambda own: own.store.make_inbox(), targets)
            for name, size in sizes.items():
                for start in range(0, size, CHUNK_BYTES):
                    [chunk] = self._each(partial(_read_chunk, name, start, min(CHUNK_BYTES, size - start)), sender)
                    self._each(partial(_append_chunk, name, chunk), targets)
            self._each(partial(_adopt, [*sizes], snapshot), targets)
        finally:
            if directory is not None:
                shutil.rmtree(directory.store.inbox, ignore_errors=True)

    def align(self, directory: RunDirectory | None, order: SnapshotOrder, state: TrainingState) -> SnapshotOrder:
        """Return the order that this rank executes, see `Location.align`."""
        message: Any = None
        own: dict[str, Tensor] = {}
        if self._group.rank == 0:
            same = {*map(locate, state.same)}
            # Empty tensors have no address.
            own = {name: each for name, each in order.tensors.items() if not each.numel() or locate(each) not in same}
            message = list(order.names), order.structure, list(order.tensors), list(own), order.meta
        names, structure, tensors, sent, meta = self._group.broadcast(message)
        aligned = {name: order.tensors[name] for name in tensors if name in order.tensors}
        for name in sent:
            value: Any = self._group.broadcast(own[name].detach().to("cpu", copy=True) if name in own else None)
            if directory is not None:
                aligned[name] = value
        if self._group.rank == 0:
            return order
        if directory is None or not names or not order.names:
            return SnapshotOrder(order.step, is_last=order.is_last)
        if missing := next((name for name in tensors if name not in aligned), None):
            raise InvalidValue(
                f"{missing} is in the state of rank 0, and not in that of rank {self._group.rank}: make the objects "
                "for run.prepare the same on all ranks",
                code="SS504",
            )
        aligned = {name: aligned[name] for name in tensors}
        return replace(order, names=names, structure=structure, tensors=aligned, meta=meta)

    def share(self, directory: RunDirectory | None) -> None:
        """Send the rows that rank 0 has written to the other writers.

        Raises:
            OSError: this rank could not write the rows; they are kept, and written with the next ones.
        """
        rows = b""
        if directory is not None and self._group.rank == 0:
            with suppress(OSError):  # they are sent as far as they can be written and read
                directory.write_rows()
            with suppress(OSError):
                rows = _read_chunk(METRICS, self._num_sent, -1, directory)
        rows = self._group.broadcast(rows)
        self._num_sent += len(rows)
        if directory is not None and self._group.rank != 0:
            directory.write_rows(rows)


def _measure_files(point: ResumePoint, snapshot: Snapshot, directory: RunDirectory) -> dict[str, int]:
    """Return the files of this node that belong to a point, and how many of their first bytes do."""
    wanted = {METRICS: point.metrics_bytes, LEDGER: point.step * LEDGER_RECORD.size}
    sizes: dict[str, int] = {}
    for name in (*SHARED, *list_orders(directory.path)):
        path = directory.path / name
        size = path.stat().st_size if path.exists() else 0
        if 0 < wanted.get(name, size) <= size:
            sizes[name] = wanted.get(name, size)
    files = snapshot.manifest["files"].items()
    return sizes | {f"{SNAPSHOTS}/{snapshot.path.name}/{file}": measure(extents) for file, extents in files}


def _read_chunk(name: str, start: int, size: int, directory: RunDirectory) -> bytes:
    with open(directory.path / name, "rb", opener=open_regular) as file:
        file.seek(start)
        return file.read(size)


def _append_chunk(name: str, data: bytes, directory: RunDirectory) -> None:
    """Append to a file in the inbox."""
    with open(directory.store.inbox / Path(name).name, "ab", opener=open_regular) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _adopt(names: Sequence[str], snapshot: Snapshot, directory: RunDirectory) -> None:
    """Move the files from the inbox to the run's directory, the snapshot last, because it makes the copy complete."""
    directory.check()
    for name in names:
        if not name.startswith(SNAPSHOTS):
            path = directory.path / name
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as partial_path:
                os.rename(directory.store.inbox / path.name, partial_path)  # noqa: TID251 whole, on one file system
    directory.read_record()
    if problem := directory.store.adopt(snapshot):
        raise RunDirectoryError(
            f"the copy of {directory.store.path / snapshot.path.name} from another node is damaged ({problem}): start "
            "again",
            code="SS410",
        )
