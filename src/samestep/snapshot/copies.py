"""A run on nodes that do not share its directory: each node keeps a complete copy.

Every rank holds the whole training state, so the first rank of each node (a *writer*) writes the same snapshots. Only
values that may differ between ranks come from rank 0, with each snapshot: buffers, `run.state`, the structure of the
state, and the rows of `metrics.jsonl`. Nothing is exchanged in a step. At the start, the writers agree on the newest
sound snapshot that any of them holds, and files that a node lacks are broadcast.
"""

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from samestep.console import say
from samestep.data.order_files import list_orders
from samestep.errors import InvalidValue, RunDirectoryError
from samestep.files import open_regular, replacing
from samestep.plan.ledger import RECORD as LEDGER_RECORD
from samestep.snapshot.async_copy import locate
from samestep.snapshot.inspection import SnapshotOrder, TrainingState
from samestep.snapshot.manifest import measure
from samestep.snapshot.resume_point import Holding, ResumePoint
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.store import SNAPSHOTS, Snapshot
from samestep.watch.records import LEDGER, METRICS, RECORD, RESTARTS, STATUS, TRACKERS
from samestep.world.environment import read_host
from samestep.world.group import Group

T = TypeVar("T")

PIECE_BYTES = 16 << 20

Each = Callable[[Callable[[RunDirectory], Any]], list[Any]]


class Copies:
    """The copies of a run in the directories of several ranks, the writers.

    Args:
        writers: these ranks.
        say: prints a message, on rank 0.
        each: calls a function on the writers with their directory, and returns the results on every rank.
    """

    def __init__(self, group: Group, writers: Sequence[int], say: Callable[[str], None], each: Each) -> None:
        self._group = group
        self._writers = writers
        self._say = say
        self._each = each
        self._notes: list[str] = []  # of this node, to be printed on rank 0: a launcher may show no other rank's output
        self._num_sent = 0  # bytes of rank 0's rows that all writers have

    def warn(self, sentence: str) -> None:
        """Print a message about this node's files: on a node without rank 0, here and later on rank 0."""
        if self._group.rank == 0:
            self._say(sentence)
        else:
            say(f"{read_host()}: {sentence}")
            self._notes.append(f"{read_host()}: {sentence}")

    def _print_notes(self) -> None:
        for note in chain.from_iterable(self._group.gather(self._notes)):
            self._say(note)
        self._notes = []

    # --- start ------------------------------------------------------------------------------------------------

    def complete(
        self, directory: RunDirectory | None, held: Sequence[Holding], source: int, point: ResumePoint
    ) -> None:
        """Send every node the files of a point that it lacks.

        Args:
            directory: of this rank, if it writes one.
            held: what each node holds.
            source: the index of the node that has the snapshot.

        Raises:
            Error: a disk failed, or a file was damaged.
        """
        self._print_notes()
        self._num_sent = point.metrics_bytes
        sizes = self._each(lambda own: _measure_files(own, point))[source]
        self._send(directory, source, sizes, range(len(held)), lambda own: _put_files(own, sizes))
        for sender, snapshot, targets in _list_missing(held, source, point):
            place = f"{SNAPSHOTS}/{snapshot.path.name}"
            sizes = {f"{place}/{file}": measure(pieces) for file, pieces in snapshot.manifest["files"].items()}
            self._send(directory, sender, sizes, targets, lambda own: self._adopt(own, snapshot, point))  # noqa: B023

    def _send(
        self,
        directory: RunDirectory | None,
        sender: int,
        sizes: Mapping[str, int],
        targets: Collection[int],
        finish: Callable[[RunDirectory], None],
    ) -> None:
        """Broadcast files of the node `sender` to the inboxes of some nodes, and call `finish` there.

        If a disk fails, the broadcast continues, so that no rank waits; the error is raised at the end.

        Args:
            sizes: of the files, by path in the run directory.
        """
        node = self._writers.index(self._group.rank) if directory is not None else None
        inbox = None if directory is None or node not in targets else directory.store.inbox
        disk = _Disk()
        if directory is not None and inbox is not None:
            disk.attempt(directory.store.make_inbox)
        for name, size in sizes.items():
            for start in range(0, size, PIECE_BYTES):
                piece = None
                if directory is not None and node == sender:
                    piece = disk.attempt(_read_piece, directory.path / name, start, min(PIECE_BYTES, size - start))
                piece = self._group.broadcast(piece or b"", self._writers[sender])
                if inbox is not None and node != sender:
                    disk.attempt(_append_piece, inbox / Path(name).name, piece)

        def finish_one(own: RunDirectory) -> None:
            try:
                if disk.error is not None:
                    raise disk.error
                if inbox is not None:
                    own.check_still_ours()
                    finish(own)
            finally:
                shutil.rmtree(own.store.inbox, ignore_errors=True)

        self._each(finish_one)

    def _adopt(self, directory: RunDirectory, snapshot: Snapshot, point: ResumePoint) -> None:
        if problem := directory.store.adopt(snapshot):
            where = f"the copy of {directory.store.path / snapshot.label} from another node"
            if point.snapshot is not None and snapshot.is_same(point.snapshot):
                raise RunDirectoryError(f"{where} is damaged ({problem}): start again", code="SS410")
            self.warn(f"{where} is not used, because it is damaged: {problem}")

    # --- under way --------------------------------------------------------------------------------------------

    def align(self, directory: RunDirectory | None, order: SnapshotOrder, state: TrainingState) -> SnapshotOrder:
        """Return the order that this rank executes, see `Location.align`."""
        message = None
        own: dict[str, Tensor] = {}
        if self._group.rank == 0:
            same = {locate(tensor) for _, tensor in state.replicated}
            # An empty tensor has no address.
            own = {name: each for name, each in order.tensors.items() if not each.numel() or locate(each) not in same}
            message = list(order.names), order.structure, list(order.tensors), list(own), order.meta
        names, structure, tensors, sent, meta = self._share(directory, message)
        is_writer = directory is not None and bool(names and order.names)
        aligned = {name: order.tensors[name] for name in tensors if name in order.tensors}
        for name in sent:
            value: Any = self._group.broadcast(own[name].detach().cpu() if name in own else None)
            if is_writer:
                aligned[name] = value
        if self._group.rank == 0:
            return order
        if not is_writer:
            return SnapshotOrder(order.step, is_last=order.is_last)
        if missing := next((name for name in tensors if name not in aligned), None):
            raise InvalidValue(
                f"{missing} is in the state of rank 0, and not in that of rank {self._group.rank}: make the objects "
                "for run.prepare the same on all ranks",
                code="SS504",
            )
        aligned = {name: aligned[name] for name in tensors}
        return replace(order, names=names, structure=structure, tensors=aligned, meta=meta)

    def _share(self, directory: RunDirectory | None, value: Any = None) -> Any:
        """Send the rows that rank 0 has written to the other writers. Return rank 0's `value` on every rank.

        Raises:
            OSError: this rank could not write the rows; they are kept, and written with the next ones.
        """
        self._print_notes()
        rows = _read_rows(directory, self._num_sent) if directory is not None and self._group.rank == 0 else b""
        rows, value = self._group.broadcast((rows, value))
        self._num_sent += len(rows)
        if directory is not None and self._group.rank != 0:
            directory.write_rows(rows)
        return value

    def end(self, directory: RunDirectory | None) -> None:
        """Send the last rows, at the end of a loop."""
        with suppress(OSError):  # `RunDirectory.find_lost` reports it
            self._share(directory)


class _Disk:
    """The disk of this rank. `error`: the first failure of an attempt; nothing is attempted after one."""

    def __init__(self) -> None:
        self.error: OSError | None = None

    def attempt(self, fn: Callable[..., T], *args: Any) -> T | None:
        """Call a function, and return its result; None if it failed."""
        if self.error is None:
            try:
                return fn(*args)
            except OSError as error:
                self.error = error
        return None


def _measure_files(directory: RunDirectory, point: ResumePoint) -> dict[str, int]:
    """Return the files of this node that belong to a point, and how many of their first bytes do."""
    names = [RESTARTS, STATUS, TRACKERS]
    wanted: dict[str, int] = {}
    if not point.is_beginning:
        names += [RECORD, *list_orders(directory.path)]
        wanted = {METRICS: point.metrics_bytes, LEDGER: point.step * LEDGER_RECORD.size}
    there = {name: (directory.path / name) for name in [*names, *wanted] if (directory.path / name).exists()}
    sizes = {name: path.stat().st_size for name, path in there.items()}
    return {name: wanted.get(name, size) for name, size in sizes.items() if 0 < wanted.get(name, size) <= size}


def _list_missing(
    held: Sequence[Holding], source: int, point: ResumePoint
) -> list[tuple[int, Snapshot, Collection[int]]]:
    """Return the snapshots that nodes lack: the node that sends it, the snapshot, and the nodes that lack it.

    That of the point is last, because it makes a copy complete. The others are the named ones before it.
    """
    chosen = point.snapshot
    if chosen is None:
        return []
    own: list[dict[str, Snapshot]] = []
    for node in held:
        there = {each.label: each for each in node.named if each.step <= chosen.step and each.label != chosen.label}
        own.append(there)
        if node.found is not None and node.found.is_same(chosen):
            there[chosen.label] = node.found
    missing: list[tuple[int, Snapshot, Collection[int]]] = []
    for label in sorted({*chain.from_iterable(own)}, key=lambda label: label == chosen.label):
        holders = [node for node, there in enumerate(own) if label in there]
        sender = source if source in holders else holders[0]
        if targets := {*range(len(held))} - {*holders}:
            missing.append((sender, own[sender][label], targets))
    return missing


def _put_files(directory: RunDirectory, names: Collection[str]) -> None:
    """Move the files in the inbox to their places."""
    for name in names:
        path = directory.path / name
        received = directory.store.inbox / path.name
        if received.exists():
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as partial:
                os.rename(received, partial)  # noqa: TID251 whole, from the same file system
    if RECORD in names:
        directory.read_record()


def _read_piece(path: Path, start: int, size: int) -> bytes:
    with open(path, "rb", opener=open_regular) as file:
        file.seek(start)
        return file.read(size)


def _append_piece(path: Path, data: bytes) -> None:
    with open(path, "ab", opener=open_regular) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_rows(directory: RunDirectory, start: int) -> bytes:
    """Return the rows from byte `start` of their file, as far as they can be written and read."""
    with suppress(OSError):
        directory.write_rows()
    with suppress(OSError):
        return _read_piece(directory.path / METRICS, start, -1)
    return b""
