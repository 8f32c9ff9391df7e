"""A run on nodes that do not share its directory: each node keeps a complete one of its own.

Every rank holds the whole training state, so the first rank of each node (a *writer*) writes the same snapshots. Only
values that may differ between ranks come from rank 0, with each snapshot: buffers, `run.state`, the structure of the
state, and the rows of `metrics.jsonl`. Nothing is exchanged in a step. At the start, the writers agree on the newest
sound snapshot that any of them holds, and files that a node lacks are broadcast. With one writer, nothing is exchanged.
"""

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

from samestep.console import say
from samestep.errors import Error
from samestep.files import open_regular
from samestep.plan.ledger import RECORD as LEDGER_RECORD
from samestep.snapshot.manifest import find_damage
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.store import SNAPSHOTS, Snapshot
from samestep.watch.records import LEDGER, METRICS, RECORD, RESTARTS, SHARED, STATUS, count_lines, list_orders
from samestep.world.environment import read_host
from samestep.world.group import Group

T = TypeVar("T")

PIECE_BYTES = 16 << 20
_TOKEN = ".samestep-node-"
_OLD_S = 3600.0


@dataclass(frozen=True)
class _Transfer:
    """Files, or their first bytes, that one writer sends and others lack.

    Attributes:
        sizes: by name, how many bytes are sent.
        source, targets: indices of writers.
        snapshot: the one that the files make; None for a single file.
        sha256: of the bytes of a single file.
    """

    sizes: dict[str, int]
    source: int
    targets: list[int]
    snapshot: Snapshot | None = None
    sha256: str = ""


class NodeReplication:
    """The run directories of a run's nodes. All ranks call its methods together.

    Args:
        run_dir: as the user gave it; rank 0's counts.
        say: prints a sentence, on rank 0.

    Attributes:
        path: the run's directory, the same on all nodes.
        writers: the ranks that write: [0] if all nodes share the directory.
    """

    def __init__(self, group: Group, run_dir: Path, say: Callable[[str], None], *, fresh: bool) -> None:
        self._group, self._say = group, say
        self._notes: list[str] = []  # of this node, to be printed on rank 0: a launcher may show no other rank's output
        self._num_sent = 0  # bytes of rank 0's rows that all writers have
        self.path, self.writers = find_writers(group, run_dir)
        if fresh:
            self.path = self._choose_fresh(self.path)

    @property
    def is_replicated(self) -> bool:
        """Whether there is more than one directory."""
        return len(self.writers) > 1

    def _choose_fresh(self, path: Path) -> Path:
        """The first of x, x-2, x-3 ... that is empty, or does not exist, on all nodes."""
        for number in count(1):
            beside = path.absolute()
            chosen = path if number == 1 else beside.with_name(f"{beside.name}-{number}")
            if not any(self.each(lambda: chosen.exists() and any(chosen.iterdir()))):  # noqa: B023
                return chosen
        raise AssertionError

    def each(self, fn: Callable[[], T]) -> list[T]:
        """Calls `fn` on the writers. Returns their results on every rank.

        Raises:
            Error: `fn` raised it on a writer, or the disk is full.
        """

        def call() -> T:
            try:
                return fn()
            except OSError as error:
                where = f"the run directory {self.path}{f' on {read_host()}' if self.is_replicated else ''}"
                why = error.strerror or error
                raise Error(f"{where} cannot be written ({why}): make room, or name another one") from None
            except Error as error:
                if not self.is_replicated:
                    raise
                raise Error(f"on {read_host()}: {error}") from None

        return self._group.each(call, on=self.writers)

    def note(self, sentence: str) -> None:
        """Prints a sentence about this node's directory: here, and later on rank 0."""
        say(f"{read_host()}: {sentence}")
        self._notes.append(f"{read_host()}: {sentence}")

    # --- start ------------------------------------------------------------------------------------------------

    def find(
        self, directory: RunDirectory | None, resume: str | int | None, check: Callable[[RunDirectory], None]
    ) -> Snapshot | None:
        """The newest sound snapshot of all nodes, after it and its files were copied to every node; None to begin.

        Args:
            directory: of this writer.
            check: compares a directory with the run. Raises Error if it is another one.

        Raises:
            Error: no node has a sound one, though there should be; raised by `check`; a node's disk is full.
        """

        def on_writers(fn: Callable[[RunDirectory], T]) -> list[T]:
            return self.each(lambda: fn(directory))  # type: ignore[arg-type]

        def begin(directory: RunDirectory) -> list[int]:
            check(directory)
            return directory.rewinds

        rewinds = max(on_writers(begin), key=len)
        held = on_writers(lambda directory: _look(directory, resume, rewinds))
        self._print_notes()
        found = [None if each["found"] is None else Snapshot.from_plain(each["found"]) for each in held]
        source = max(range(len(held)), key=lambda node: -1 if (own := found[node]) is None else own.step)
        chosen = found[source]
        if chosen is None and (problem := next((each["problem"] for each in held if each["problem"]), "")):
            raise Error(problem)
        if self.is_replicated:
            if directory is not None:
                directory.num_recorded = max(each["sizes"].get(LEDGER, 0) for each in held) // LEDGER_RECORD.size
                directory.rewinds = rewinds
            self._copy_files(directory, held, source, found)
            if directory is not None and chosen is not None:
                directory.is_rewound = any(each["newest"] > chosen.step for each in held)
        if chosen is not None:
            self._num_sent = chosen.manifest["meta"]["metrics_bytes"]
            if directory is not None:
                directory.resume_from(chosen)
        return chosen

    def _copy_files(
        self, directory: RunDirectory | None, held: Sequence[dict[str, Any]], source: int,
        found: Sequence[Snapshot | None],
    ) -> None:  # fmt: skip
        """Copies to every node what a resume or an audit reads and the node lacks."""
        chosen = found[source]
        oldest = max(range(len(held)), key=lambda node: (held[node]["num_starts"], STATUS in held[node]["sizes"]))
        wanted = [(name, held[oldest]["sizes"].get(name, 0), oldest) for name in (RESTARTS, STATUS)]
        named: dict[str, list[Snapshot | None]] = {}
        if chosen is not None:
            orders = sorted({name for each in held for name in each["sizes"]} - {*SHARED})
            # Another node's record can be longer and older, so its size does not count.
            wanted.append((RECORD, held[source]["sizes"].get(RECORD, 0), source))
            wanted += [(name, max(each["sizes"].get(name, 0) for each in held), source) for name in orders]
            wanted.append((METRICS, chosen.manifest["meta"]["metrics_bytes"], source))
            wanted.append((LEDGER, chosen.step * LEDGER_RECORD.size, source))
            for name in sorted({name for each in held for name in each["named"]} - {chosen.name}):
                owned = [each["named"].get(name) for each in held]
                named[name] = [None if each is None else Snapshot.from_plain(each) for each in owned]

        def examine() -> tuple[list[str | None], dict[str, bool]]:
            assert directory is not None
            own = {name: each[self.writers.index(self._group.rank)] for name, each in named.items()}
            sound = {
                name: snapshot is not None and not _are_same(named[name]) and _is_sound(directory, snapshot)
                for name, snapshot in own.items()
            }
            return [_hash_start(directory.path / name, size) for name, size, _ in wanted], sound

        replies = self.each(examine)
        transfers = []
        for place, (name, size, preferred) in enumerate(wanted):
            hashes = [hashes[place] for hashes, _ in replies]
            having = [node for node in (preferred, *range(len(held))) if hashes[node]]
            if having:  # otherwise `RunDirectory.begin` warns that a part is missing
                wanting = [node for node, each in enumerate(hashes) if each != hashes[having[0]]]
                transfers.append(_Transfer({name: size}, having[0], wanting, sha256=str(hashes[having[0]])))
        for name, owned in named.items():  # the newest one that is sound and no later than the chosen snapshot
            sound = [node for node, (_, are_sound) in enumerate(replies) if are_sound[name]]
            usable = [node for node in sound if chosen and owned[node].step <= chosen.step]  # type: ignore[union-attr]
            if usable:
                transfers.append(_copy_snapshot(owned, max(usable, key=lambda node: owned[node].step)))  # type: ignore[union-attr]
        if chosen is not None:
            transfers.append(_copy_snapshot(found, source))  # last: it makes the copy complete
        for transfer in transfers:
            if transfer.targets:
                self._run(directory, transfer)

    def _run(self, directory: RunDirectory | None, transfer: _Transfer) -> None:
        """Broadcasts the files of a transfer. A disk that fails does not stop it: the error is raised at its end."""
        source, targets = self.writers[transfer.source], [self.writers[node] for node in transfer.targets]
        is_target = self._group.rank in targets
        failures: list[OSError] = []

        def attempt(fn: Callable[[RunDirectory], T], *, on: bool) -> T | None:
            try:
                return fn(directory) if on and directory is not None and not failures else None
            except OSError as error:
                failures.append(error)
                return None

        attempt(lambda directory: directory.store.make_inbox(), on=is_target)
        for name, size in transfer.sizes.items():
            for start in range(0, size, PIECE_BYTES):
                place = name, start, min(PIECE_BYTES, size - start)
                data = attempt(lambda directory: _read_piece(directory, *place), on=self._group.rank == source)  # noqa: B023
                piece = self._group.broadcast(data or b"", source)
                attempt(lambda directory: _append_piece(directory.store.inbox / Path(name).name, piece), on=is_target)  # noqa: B023

        def put() -> None:
            assert directory is not None
            try:
                if failures:
                    raise failures[0]
                if is_target:
                    directory.check_still_ours()
                    _put(directory, transfer)
            finally:
                if is_target:
                    shutil.rmtree(directory.store.inbox, ignore_errors=True)

        self.each(put)

    # --- under way --------------------------------------------------------------------------------------------

    def share(self, directory: RunDirectory | None, value: Any = None) -> Any:
        """Brings the rows that rank 0 has written to the other writers. Returns rank 0's `value` on every rank.

        Raises:
            OSError: the rows could not be written here; they are kept, and written with the next ones.
        """
        self._print_notes()
        if not self.is_replicated:
            return value
        rows = _read_rows(directory, self._num_sent) if self._group.rank == 0 else b""
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


# --- nodes ------------------------------------------------------------------------------------------------------------


def find_writers(group: Group, run_dir: Path) -> tuple[Path, list[int]]:
    """Finds which nodes share the run's directory. The first rank of each node creates an empty file for that.

    Returns:
        Rank 0's `run_dir`, and for each distinct directory the lowest rank that has it: [0] if all nodes share one.
    """
    answers = group.gather((group.local_rank == 0, str(run_dir)))
    path = Path(answers[0][1])
    firsts = [rank for rank, (is_first, _) in enumerate(answers) if is_first or rank == 0]
    if len(firsts) == 1:
        return path, [0]
    token = _create_token(path) if group.rank in firsts else None
    try:
        names = group.gather(None if token is None else token.name)
        places = (path, *path.parents)
        writer = None
        if group.rank in firsts:
            seen = (rank for rank in firsts if names[rank] and any(_exists(place / names[rank]) for place in places))
            writer = next(seen, group.rank)
        writers = group.gather(writer)
    finally:
        if token is not None:
            token.unlink(missing_ok=True)
    return path, sorted({writer for writer in writers if writer is not None})


def _create_token(path: Path) -> Path | None:
    """An empty file in the directory, or in the nearest existing one above it; None if none can be created.

    Its name is new, so that no network file system has cached that it does not exist. Creating it refreshes what the
    node has cached of that directory, in which another node may just have created the run's.
    """
    with suppress(OSError):
        for place in (path, *path.parents):
            if place.is_dir():
                for old in place.glob(f"{_TOKEN}*"):  # of a start that was killed here
                    if time.time() - old.stat().st_mtime > _OLD_S:
                        old.unlink(missing_ok=True)
                token = place / f"{_TOKEN}{secrets.token_hex(8)}"
                token.touch(exist_ok=False)
                return token
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


# --- one directory ----------------------------------------------------------------------------------------------------


def _look(directory: RunDirectory, resume: str | int | None, rewinds: Sequence[int]) -> dict[str, Any]:
    """What a directory holds.

    Returns:
        found: the snapshot that it would resume from, after checking every byte; problem: why there is none; newest:
        the step of the newest snapshot, judged by sizes; named: the named ones, judged by sizes; sizes: of the other
        files, in bytes; num_starts: the lines in `restarts.jsonl`.
    """
    found, problem = None, ""
    if resume is not None:  # the run may have gone back behind some of them while this node did not take part
        directory.store.clean()
        directory.store.abandon([each for each in directory.store.snapshots() if each.was_left(rewinds)])
    try:
        found = directory.find(resume)
    except Error as error:
        if resume is None:
            raise
        problem = str(error)
    sound = [each for each in directory.store.snapshots() if each.problem is None]
    sizes = {}
    for name in (*SHARED, *list_orders(directory.path)):
        with suppress(OSError):
            sizes[name] = (directory.path / name).stat().st_size
    return {
        "found": None if found is None else found.to_plain(),
        "problem": problem,
        "newest": max((each.step for each in sound), default=0),
        "named": {each.name: each.to_plain() for each in sound if each.name is not None},
        "sizes": sizes,
        "num_starts": count_lines(directory.path / RESTARTS),
    }


def _is_sound(directory: RunDirectory, snapshot: Snapshot) -> bool:
    return find_damage(directory.store.path / snapshot.path.name, snapshot.manifest) is None


def _are_same(copies: Sequence[Snapshot | None]) -> bool:
    first = copies[0]
    return first is not None and all(each is not None and first.is_same(each) for each in copies)


def _copy_snapshot(copies: Sequence[Snapshot | None], source: int) -> _Transfer:
    snapshot = copies[source]
    assert snapshot is not None
    sizes = {
        f"{SNAPSHOTS}/{snapshot.path.name}/{file}": each["size"] for file, each in snapshot.manifest["files"].items()
    }
    targets = [node for node, other in enumerate(copies) if other is None or not snapshot.is_same(other)]
    return _Transfer(sizes, source, targets, snapshot)


def _put(directory: RunDirectory, transfer: _Transfer) -> None:
    """Checks the files in the inbox and moves them to their place."""
    inbox, [name, *_] = directory.store.inbox, transfer.sizes
    path = directory.path / name
    if transfer.snapshot is not None:
        problem = directory.store.adopt(transfer.snapshot)
    elif _hash_start(inbox / path.name, transfer.sizes[name]) == transfer.sha256:
        problem = None
        path.parent.mkdir(exist_ok=True)
        os.replace(inbox / path.name, path)
        if name == RECORD:
            directory.read_record()
    else:
        problem = "other bytes than were sent"
    if problem:
        raise Error(f"the copy of {path} from another node is damaged ({problem}): start again")


def _hash_start(path: Path, size: int) -> str | None:
    """The sha256 of a file's first bytes; None if it has fewer."""
    sha, left = hashlib.sha256(), size
    with suppress(OSError), open(path, "rb", opener=open_regular) as file:
        while left and (data := file.read(min(left, PIECE_BYTES))):
            sha.update(data)
            left -= len(data)
    return None if left else sha.hexdigest()


def _read_piece(directory: RunDirectory, name: str, start: int, size: int) -> bytes:
    with open(directory.path / name, "rb", opener=open_regular) as file:
        file.seek(start)
        return file.read(size)


def _append_piece(path: Path, data: bytes) -> None:
    with open(path, "ab", opener=open_regular) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_rows(directory: RunDirectory | None, start: int) -> bytes:
    """The rows from byte `start` of their file, as far as they can be written and read."""
    assert directory is not None
    with suppress(OSError):
        directory.write_rows()
    with suppress(OSError):
        return _read_piece(directory, METRICS, start, -1)
    return b""
