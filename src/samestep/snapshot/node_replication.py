"""A run on nodes that do not share its directory: each node keeps a complete copy.

Every rank holds the whole training state, so the first rank of each node (a *writer*) writes the same snapshots. Only
values that may differ between ranks come from rank 0, with each snapshot: buffers, `run.state`, the structure of the
state, and the rows of `metrics.jsonl`. Nothing is exchanged in a step. At the start, the writers agree on the newest
sound snapshot that any of them holds, and files that a node lacks are broadcast.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from samestep.config import RunConfig
from samestep.console import say
from samestep.data.order_files import list_orders
from samestep.errors import KINDS, Error, RunDirectoryError, name_kind
from samestep.files import open_regular, replacing
from samestep.plan.ledger import RECORD as LEDGER_RECORD
from samestep.snapshot.async_copy import locate
from samestep.snapshot.inspection import TrainingState, check_tensors
from samestep.snapshot.location import LocalLocation, SnapshotOrder, explain_unwritable
from samestep.snapshot.manifest import find_damage, hash_range
from samestep.snapshot.resume_point import Holding, ResumePoint, choose
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.store import SNAPSHOTS, Snapshot
from samestep.tagged import find_dtype, name_dtype
from samestep.watch.records import LEDGER, METRICS, RECORD, RESTARTS, STATUS, TRACKERS, count_lines
from samestep.world.environment import read_host
from samestep.world.group import Group

T = TypeVar("T")

PIECE_BYTES = 16 << 20


class ReplicatedLocation(LocalLocation):
    """A run whose nodes do not share its directory. The first rank of each node with an own disk writes a copy.

    Arguments and errors as for `LocalLocation`, with several writers.
    """

    def __init__(
        self, group: Group, named: Path, config: RunConfig, say: Callable[[str], None], writers: Sequence[int]
    ) -> None:
        self._notes: list[str] = []  # of this node, to be printed on rank 0: a launcher may show no other rank's output
        self._num_sent = 0  # bytes of rank 0's rows that all writers have
        super().__init__(group, named, config, say, writers)
        say(f"{named} is not shared by all nodes: {len(writers)} of them keep a copy of the run each")

    def _call(self, fn: Callable[[], T]) -> T:
        try:
            return fn()
        except OSError as error:
            raise explain_unwritable(f"the run directory {self._named} on {read_host()}", error) from None
        except Error as error:
            raise KINDS[name_kind(error)](f"on {read_host()}: {error}", code=error.code) from None

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

    def _agree(self, held: Sequence[Holding], rewinds: Sequence[int]) -> ResumePoint:
        self._print_notes()
        source, point = choose(held, rewinds)
        self._copy_parts(held, point, source)
        self._num_sent = point.metrics_bytes
        return point

    def _copy_parts(self, held: Sequence[Holding], point: ResumePoint, source: int) -> None:
        """Copy to every node the files that it lacks of those which are read later. `source`: the snapshot's node."""
        chosen = point.snapshot
        last = None if chosen is None else f"{SNAPSHOTS}/{chosen.label}"  # it makes the copy complete
        snapshots: list[dict[str, Snapshot]] = [{} for _ in held]
        for own, node in zip(snapshots, held, strict=True):
            if chosen is not None:
                named = [each for each in node.named if each.label != chosen.label]
                own |= {f"{SNAPSHOTS}/{each.label}": each for each in named if each.step <= chosen.step}
                if node.found is not None and node.found.is_same(chosen):
                    own[f"{SNAPSHOTS}/{chosen.label}"] = node.found

        def examine(directory: RunDirectory) -> dict[str, Any]:
            node = self._writers.index(self._group.rank)
            parts = _list_files(directory, point, is_source=node == source)
            for name, own in snapshots[node].items():
                is_alike = all(name in others and own.is_same(others[name]) for others in snapshots)
                if is_alike or name == last or find_damage(own.path, own.manifest) is None:
                    parts[name] = {"size": 0, "content": own.identity, "worth": [own.step, node == source]}
            return parts

        parts = self._each_directory(examine)
        for name in sorted({name for each in parts for name in each}, key=lambda name: (name == last, name)):
            holders = {node: each[name] for node, each in enumerate(parts) if name in each}
            sender, part = max(holders.items(), key=lambda item: item[1]["worth"])
            having = [node for node, each in holders.items() if each["content"] == part["content"]]
            if targets := {*range(len(parts))} - {*having}:
                self._send(name, part, snapshots[sender].get(name), sender, targets)

    def _send(
        self, name: str, part: Mapping[str, Any], snapshot: Snapshot | None, sender: int, targets: Collection[int]
    ) -> None:
        """Broadcast a file, or the files of a snapshot, to some nodes.

        If a disk fails, the broadcast continues, so that no rank waits; the error is raised at the end.
        """
        sizes = {name: part["size"]}
        if snapshot is not None:
            sizes = {f"{name}/{file}": each["size"] for file, each in snapshot.manifest["files"].items()}
        source = self._writers[sender]
        directory = self._directory
        is_target = self._group.rank in [self._writers[node] for node in targets]
        failures: list[OSError] = []

        @contextmanager
        def keeping_failure() -> Iterator[None]:
            try:
                yield
            except OSError as error:
                failures.append(error)

        if directory is not None and is_target:
            with keeping_failure():
                directory.store.make_inbox()
        for file, size in sizes.items():
            for start in range(0, size, PIECE_BYTES):
                piece = b""
                if directory is not None and self._group.rank == source and not failures:
                    with keeping_failure():
                        piece = _read_piece(directory.path / file, start, min(PIECE_BYTES, size - start))
                piece = self._group.broadcast(piece, source)
                if directory is not None and is_target and not failures:
                    with keeping_failure():
                        _append_piece(directory.store.inbox / Path(file).name, piece)

        def finish(directory: RunDirectory) -> None:
            try:
                if failures:
                    raise failures[0]
                if is_target:
                    directory.check_still_ours()
                    problem = _put_file(directory, name, part) if snapshot is None else directory.store.adopt(snapshot)
                    if problem:
                        where = f"the copy of {directory.path / name} from another node"
                        raise RunDirectoryError(f"{where} is damaged ({problem}): start again", code="SS410")
            finally:
                if is_target:
                    shutil.rmtree(directory.store.inbox, ignore_errors=True)

        self._each_directory(finish)

    # --- under way --------------------------------------------------------------------------------------------

    def align(self, order: SnapshotOrder, state: TrainingState) -> SnapshotOrder:
        message = None
        own: dict[str, Tensor] = {}
        if self._group.rank == 0:
            same = {locate(tensor) for _, tensor in state.replicated}
            own = {
                name: tensor.detach().resolve_conj().resolve_neg()
                for name, tensor in order.tensors.items()
                if locate(tensor) not in same or not tensor.numel()  # an empty tensor has no address
            }
            outlines = {name: (name_dtype(tensor.dtype), [*tensor.shape]) for name, tensor in own.items()}
            message = (list(order.names), order.structure, list(order.tensors), outlines, order.meta)
        names, structure, tensors, outlines, meta = self._share(message)
        is_writer = self._directory is not None and bool(names and order.names)
        received = self._send_values(outlines, own, is_kept=is_writer and self._group.rank != 0)
        if self._group.rank == 0:
            return order
        if not is_writer:
            return SnapshotOrder(order.step, is_last=order.is_last)
        check_tensors([name for name in tensors if name not in received], order.tensors, self._group.rank)
        aligned = {name: received[name] if name in received else order.tensors[name] for name in tensors}
        return replace(order, names=names, structure=structure, tensors=aligned, meta=meta)

    def _send_values(
        self, outlines: Mapping[str, tuple[str, list[int]]], own: Mapping[str, Tensor], *, is_kept: bool
    ) -> dict[str, Tensor]:
        """Send tensors of rank 0 to all ranks, one at a time if they are large. Return them if `is_kept`."""
        received: dict[str, Tensor] = {}
        pending: list[Tensor] = []
        num_bytes = 0  # of those
        for number, (name, (dtype, shape)) in enumerate(outlines.items(), start=1):
            tensor = own[name].cpu().clone() if name in own else torch.empty(shape, dtype=find_dtype(dtype))
            if is_kept:
                received[name] = tensor
            if tensor.numel():
                pending.append(tensor.contiguous())
                num_bytes += tensor.nbytes
            if num_bytes >= PIECE_BYTES or number == len(outlines):
                self._group.broadcast_tensors(pending)
                pending = []
                num_bytes = 0
        return received

    def _share(self, value: Any = None) -> Any:
        """Send the rows that rank 0 has written to the other writers. Return rank 0's `value` on every rank.

        Raises:
            OSError: this rank could not write the rows; they are kept, and written with the next ones.
        """
        self._print_notes()
        directory = self._directory
        rows = _read_rows(directory, self._num_sent) if directory is not None and self._group.rank == 0 else b""
        rows, value = self._group.broadcast((rows, value))
        self._num_sent += len(rows)
        if directory is not None and self._group.rank != 0:
            directory.write_rows(rows)
        return value

    def end(self) -> str:
        with suppress(OSError):  # `RunDirectory.find_lost` reports it
            self._share()
        return ""


# --- one directory ----------------------------------------------------------------------------------------------------


def _list_files(directory: RunDirectory, point: ResumePoint, *, is_source: bool) -> dict[str, Any]:
    """Return the files of this node that belong to a point.

    Args:
        is_source: whether its snapshot is this node's.

    Returns:
        By name: size, how many of the first bytes belong to the snapshot; content, their sha256; worth: the node with
        the greatest one sends its file to the nodes whose file differs.
    """
    # These are of the last start, which may have begun without the node that has the snapshot.
    last_start = [count_lines(directory.path / RESTARTS), (directory.path / STATUS).exists()]
    wanted: dict[str, tuple[int, list[int]]] = {
        name: (_measure(directory.path / name), last_start) for name in (RESTARTS, STATUS, TRACKERS)
    }
    if not point.is_beginning:
        wanted[RECORD] = _measure(directory.path / RECORD), [is_source]
        wanted[METRICS] = point.metrics_bytes, [is_source]
        wanted[LEDGER] = point.step * LEDGER_RECORD.size, [is_source]
        sizes = {name: _measure(directory.path / name) for name in list_orders(directory.path)}
        wanted |= {name: (size, [size, is_source]) for name, size in sizes.items()}
    return {
        name: {"size": size, "content": content, "worth": worth}
        for name, (size, worth) in wanted.items()
        if size and (content := _hash_start(directory.path / name, size))
    }


def _measure(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    return os.path.getsize(path) if os.path.exists(path) else 0


def _put_file(directory: RunDirectory, name: str, part: Mapping[str, Any]) -> str | None:
    """Move a file from the inbox to its place. Return a problem with it, or None."""
    path = directory.path / name
    received = directory.store.inbox / path.name
    if _hash_start(received, part["size"]) != part["content"]:
        return "other bytes than were sent"
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as partial:
        os.rename(received, partial)  # noqa: TID251 whole, from the same file system
    if name == RECORD:
        directory.read_record()
    return None


def _hash_start(path: Path, size: int) -> str | None:
    """Return the sha256 of a file's first bytes; None if it has fewer."""
    with suppress(OSError), open(path, "rb", opener=open_regular) as file:
        if os.fstat(file.fileno()).st_size >= size:
            return hash_range(file.fileno(), 0, size)
    return None


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
