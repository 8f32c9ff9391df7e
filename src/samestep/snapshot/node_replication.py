"""A run on nodes that do not share its directory: each node keeps a complete copy.

Every rank holds the whole training state, so the first rank of each node (a *writer*) writes the same snapshots. Only
values that may differ between ranks come from rank 0, with each snapshot: buffers, `run.state`, the structure of the
state, and the rows of `metrics.jsonl`. Nothing is exchanged in a step. At the start, the writers agree on the newest
sound snapshot that any of them holds, and files that a node lacks are broadcast. With one writer, nothing is exchanged.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

from samestep.console import say
from samestep.data.order_files import list_orders
from samestep.errors import KINDS, Error, RunDirectoryError, name_kind
from samestep.files import open_regular, replacing
from samestep.plan.ledger import RECORD as LEDGER_RECORD
from samestep.snapshot.manifest import find_damage, hash_range
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.store import SNAPSHOTS, Snapshot, Unreachable
from samestep.snapshot.writers import find_writers
from samestep.watch.records import LEDGER, METRICS, RECORD, RESTARTS, STATUS, TRACKERS, count_lines
from samestep.world.environment import read_host
from samestep.world.group import Group

T = TypeVar("T")

PIECE_BYTES = 16 << 20


class NodeReplication:
    """The run directories of a run's nodes. All ranks call its methods together.

    Args:
        run_dir: the run directory as the user gave it; all nodes use rank 0's.
        say: prints a message, on rank 0.

    Attributes:
        path: the run's directory, the same on all nodes.
        writers: the ranks that write: [0] if all nodes share the directory.
        directory: on writers, after `open`: the run directory.
    """

    def __init__(self, group: Group, run_dir: Path, say: Callable[[str], None], *, fresh: bool) -> None:
        self._group, self._say = group, say
        self._notes: list[str] = []  # of this node, to be printed on rank 0: a launcher may show no other rank's output
        self._num_sent = 0  # bytes of rank 0's rows that all writers have
        self.directory: RunDirectory | None = None
        self.path, writers = find_writers(group, run_dir)
        self.writers = sorted({*writers.values()})
        if fresh:
            self.path = self._choose_fresh(self.path)

    @property
    def is_replicated(self) -> bool:
        """Whether there is more than one directory."""
        return len(self.writers) > 1

    def _choose_fresh(self, path: Path) -> Path:
        """Return the first of x, x-2, x-3 ... that is empty, or does not exist, on all nodes."""
        for number in count(1):
            beside = path if path.name else path.absolute()  # "." has no name
            chosen = path if number == 1 else beside.with_name(f"{beside.name}-{number}")
            if not any(self.each(lambda: chosen.exists() and any(chosen.iterdir()))):  # noqa: B023
                return chosen
        raise AssertionError

    def open(self, check: Callable[[RunDirectory], None]) -> None:
        """Open the directory on each writer. `check`: see `find`.

        Raises:
            Error: a directory cannot be used. All directories have been closed then.
        """

        def open_one() -> None:
            self.directory = RunDirectory(self.path, warn=self.warn)
            check(self.directory)

        try:
            self.each(open_one)
        except Error:
            if self.directory is not None:
                self.directory.close()
            raise
        if self.is_replicated:
            num_writers = len(self.writers)
            self._say(f"{self.path} is not shared by all nodes: {num_writers} of them keep a copy of the run each")

    def each(self, fn: Callable[[], T]) -> list[T]:
        """Call `fn` on the writers. Return their results on every rank.

        Raises:
            Error: `fn` raised it on a writer, or the disk is full.
        """

        def call() -> T:
            try:
                return fn()
            except OSError as error:
                where = f"the run directory {self.path}{f' on {read_host()}' if self.is_replicated else ''}"
                why = error.strerror or error
                raise RunDirectoryError(f"{where} cannot be written ({why}): make room, or name another one") from None
            except Error as error:
                if not self.is_replicated:
                    raise
                raise KINDS[name_kind(error)](f"on {read_host()}: {error}") from None

        return self._group.each(call, on=self.writers)

    def warn(self, sentence: str) -> None:
        """Print a message about this rank's directory. On a node without rank 0: here, and later on rank 0."""
        if self._group.rank == 0:
            self._say(sentence)
        else:
            say(f"{read_host()}: {sentence}")
            self._notes.append(f"{read_host()}: {sentence}")

    def _on_directories(self, fn: Callable[[RunDirectory], T]) -> list[T]:
        """Like `each`, with the writer's directory as argument."""

        def call() -> T:
            assert self.directory is not None
            return fn(self.directory)

        return self.each(call)

    # --- start ------------------------------------------------------------------------------------------------

    def find(self, resume: str | int | None, check: Callable[[RunDirectory], None]) -> Snapshot | None:
        """Find the newest undamaged snapshot of all nodes, and copy it to every node. Return None to begin.

        Args:
            check: compares a directory with the run. Raises Error if it belongs to another run.

        Raises:
            Error: no node has an undamaged snapshot although one should exist; `check` raised it; a node's disk is
                full.
        """

        def begin(directory: RunDirectory) -> list[int]:
            check(directory)
            return directory.rewinds

        rewinds = max(self._on_directories(begin), key=len)
        held = self._on_directories(lambda directory: _look(directory, resume, rewinds))
        self._print_notes()
        found = [None if each["found"] is None else Snapshot.from_plain(each["found"]) for each in held]
        source = max(range(len(held)), key=lambda node: -1 if (own := found[node]) is None else own.step)
        chosen = found[source]
        if chosen is None and (problem := next((each["problem"] for each in held if each["problem"]), "")):
            raise RunDirectoryError(problem)
        directory = self.directory
        if self.is_replicated:
            if directory is not None:
                directory.num_recorded = max(each["num_recorded"] for each in held)
            self._copy_parts(held, chosen, source)
            if directory is not None and chosen is not None:
                directory.is_rewound = any(each["newest"] > chosen.step for each in held)
        if chosen is not None:
            self._num_sent = chosen.manifest["meta"]["metrics_bytes"]
            if directory is not None:
                directory.snapshot = chosen
        return chosen

    def _copy_parts(self, held: Sequence[dict[str, Any]], chosen: Snapshot | None, source: int) -> None:
        """Copy to every node the missing files that a resume or an audit reads."""
        last = None if chosen is None else f"{SNAPSHOTS}/{chosen.label}"  # it makes the copy complete
        snapshots: list[dict[str, Snapshot]] = [{} for _ in held]
        for own, node in zip(snapshots, held, strict=True):
            if chosen is not None:
                named = [each for each in map(Snapshot.from_plain, node["named"]) if each.label != chosen.label]
                own |= {f"{SNAPSHOTS}/{each.label}": each for each in named if each.step <= chosen.step}
                if node["found"] is not None and Snapshot.from_plain(node["found"]).is_same(chosen):
                    own[f"{SNAPSHOTS}/{chosen.label}"] = Snapshot.from_plain(node["found"])

        def examine(directory: RunDirectory) -> dict[str, Any]:
            node = self.writers.index(self._group.rank)
            parts = _list_files(directory, chosen, is_source=node == source)
            for name, own in snapshots[node].items():
                is_alike = all(name in others and own.is_same(others[name]) for others in snapshots)
                if is_alike or name == last or find_damage(own.path, own.manifest) is None:
                    parts[name] = {"size": 0, "content": own.identity, "worth": [own.step, node == source]}
            return parts

        parts = self._on_directories(examine)
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
        source, directory = self.writers[sender], self.directory
        is_target = self._group.rank in [self.writers[node] for node in targets]
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
                        raise RunDirectoryError(f"{where} is damaged ({problem}): start again")
            finally:
                if is_target:
                    shutil.rmtree(directory.store.inbox, ignore_errors=True)

        self._on_directories(finish)

    # --- under way --------------------------------------------------------------------------------------------

    def share(self, value: Any = None) -> Any:
        """Send the rows that rank 0 has written to the other writers. Return rank 0's `value` on every rank.

        Raises:
            OSError: this rank could not write the rows; they are kept, and written with the next ones.
        """
        self._print_notes()
        if not self.is_replicated:
            return value
        directory = self.directory
        rows = _read_rows(directory, self._num_sent) if directory is not None and self._group.rank == 0 else b""
        rows, value = self._group.broadcast((rows, value))
        self._num_sent += len(rows)
        if directory is not None and self._group.rank != 0:
            directory.write_rows(rows)
        return value

    def _print_notes(self) -> None:
        if self.is_replicated:
            for note in chain.from_iterable(self._group.gather(self._notes)):
                self._say(note)
            self._notes = []


# --- one directory ----------------------------------------------------------------------------------------------------


def _look(directory: RunDirectory, resume: str | int | None, rewinds: Sequence[int]) -> dict[str, Any]:
    """Return a description of the content of a directory.

    Returns:
        found: the snapshot from which it would resume, after checking every byte; problem: why there is none; newest:
        the step of the newest snapshot, judged by sizes; named: the named ones, judged by sizes; num_recorded: the
        number of steps in the ledger.
    """
    found, problem = None, ""
    directory.rewinds = [*rewinds]  # this node may not have taken part when the run went back
    try:
        found = directory.find(resume)
    except Error as error:
        if resume is None or isinstance(error, Unreachable):
            raise  # another node's snapshot may be older than those at the URL
        problem = str(error)
    sound = [each for each in directory.store.snapshots() if each.problem is None]
    return {
        "found": None if found is None else found.to_plain(),
        "problem": problem,
        "newest": max((each.step for each in sound), default=0),
        "named": [each.to_plain() for each in sound if each.name is not None],
        "num_recorded": _measure(directory.path / LEDGER) // LEDGER_RECORD.size,
    }


def _list_files(directory: RunDirectory, chosen: Snapshot | None, *, is_source: bool) -> dict[str, Any]:
    """Return the files of this node that belong to a snapshot.

    Args:
        is_source: whether the chosen snapshot is this node's.

    Returns:
        By name: size, how many of the first bytes belong to the snapshot; content, their sha256; worth: the node with
        the greatest one sends its file to the nodes whose file differs.
    """
    # These are of the last start, which may have begun without the node that has the snapshot.
    last_start = [count_lines(directory.path / RESTARTS), (directory.path / STATUS).exists()]
    wanted: dict[str, tuple[int, list[int]]] = {
        name: (_measure(directory.path / name), last_start) for name in (RESTARTS, STATUS, TRACKERS)
    }
    if chosen is not None:
        wanted[RECORD] = _measure(directory.path / RECORD), [is_source]
        wanted[METRICS] = chosen.manifest["meta"]["metrics_bytes"], [is_source]
        wanted[LEDGER] = chosen.step * LEDGER_RECORD.size, [is_source]
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
        os.rename(received, partial)
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
