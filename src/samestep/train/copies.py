"""A run on nodes that do not share its directory: each node keeps a copy, and what one lacks it is handed.

In a copy are the snapshots, `metrics.jsonl`, `ledger.bin`, `run.json`, `orders/`, `restarts.jsonl` and `status.json`:
whatever a resume or an audit reads. Each copy is written by the first rank of its node. What that rank could have
otherwise than rank 0 (rows, buffers, `run.state`) comes from rank 0, with each snapshot; nothing comes with a step.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.errors import Error
from samestep.files import open_regular
from samestep.plan.ledger import RECORD
from samestep.snapshot.async_copy import locate
from samestep.snapshot.manifest import find_damage
from samestep.snapshot.store import Snapshot
from samestep.train.directory import Directory
from samestep.train.sharing import name_node
from samestep.watch.records import RESTARTS, STATUS, count_lines
from samestep.world.environment import read_host
from samestep.world.group import Group

PIECE_BYTES = 16 << 20
RECORD_FILE, ROWS, LEDGER = "run.json", "metrics.jsonl", "ledger.bin"
HISTORY = (RESTARTS, STATUS)


@dataclass(frozen=True)
class Order:
    """Snapshots to be written: None among the names is a numbered one."""

    step: int
    names: list[str | None]
    structure: Any
    tensors: dict[str, Tensor]
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class _Held:
    """What a copy has.

    Attributes:
        found: the snapshot that it would go on from, every byte of which was checked.
        problem: why there is none, where there should be one.
        newest: the step of the newest snapshot, as far as their sizes tell.
        named: the named ones, as far as their sizes tell.
        sizes: the other files, and how many bytes each has.
        num_starts: the lines in `restarts.jsonl`.
    """

    found: Snapshot | None
    problem: str
    newest: int
    named: dict[str, Snapshot]
    sizes: dict[str, int]
    num_starts: int

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "_Held":
        found, named = plain["found"], plain["named"]
        return cls(**{
            **plain,
            "found": None if found is None else Snapshot.from_plain(found),
            "named": {name: Snapshot.from_plain(each) for name, each in named.items()},
        })  # fmt: skip

    def to_plain(self) -> dict[str, Any]:
        """Its attributes as JSON has them, for other ranks."""
        named = {name: each.to_plain() for name, each in self.named.items()}
        return {**vars(self), "found": None if self.found is None else self.found.to_plain(), "named": named}


class Copies:
    """All copies of one run. Its methods are for all ranks to call together.

    Args:
        keepers: the ranks that write one each; rank 0 is the first of them.
        say: says a sentence, on rank 0.

    Attributes:
        notes: what has happened to this copy and is still to be said on rank 0: a launcher may show no other's output.
    """

    def __init__(self, group: Group, keepers: Sequence[int], say: Callable[[str], None]) -> None:
        self.keepers = list(keepers)
        self.notes: list[str] = []
        self._group, self._say = group, say
        self._num_handed = 0  # bytes of rank 0's rows, which all have by now or are to write

    def choose(self, path: Path) -> Path:
        """The first of x, x-2, x-3 ... that holds nothing on any node."""
        for number in count(1):
            chosen = path if number == 1 else path.with_name(f"{path.name}-{number}")
            if not any(self._group.gather(chosen.exists() and any(chosen.iterdir()))):
                return chosen
        raise AssertionError

    # --- before the first step --------------------------------------------------------------------------------

    def find(self, directory: Directory | None, resume: str | int | None, check: Callable[[], None]) -> Snapshot | None:
        """The newest sound snapshot of all copies, once every copy has it and what goes with it; None to begin.

        Args:
            directory: on the ranks that keep one.
            check: compares the copy with the run.

        Raises:
            Error: no copy has one, though there should be; what `check` raises; a copy cannot be written.
        """

        def begin() -> list[int]:
            assert directory is not None
            with _blaming(directory):
                name_node(check)
            return directory.rewinds

        def look() -> dict[str, Any]:
            assert directory is not None
            with _blaming(directory):
                return name_node(lambda: _look(directory, resume, rewinds)).to_plain()

        rewinds = max(self._group.each(begin, on=self.keepers), key=len)
        held = [_Held.from_plain(plain) for plain in self._group.each(look, on=self.keepers)]
        self._say_notes()
        if directory is not None:
            directory.num_recorded = max(each.sizes.get(LEDGER, 0) for each in held) // RECORD.size
            directory.rewinds = rewinds
        giver = max(range(len(held)), key=lambda place: _step(held[place].found))  # the first of them
        found = held[giver].found
        if found is None and (problem := next((each.problem for each in held if each.problem), "")):
            raise Error(problem)
        often = max(range(len(held)), key=lambda place: (held[place].num_starts, STATUS in held[place].sizes))
        for name in HISTORY:
            self._hand_start(directory, name, held[often].sizes.get(name, 0), often)
        if found is not None:
            self._hand_run(directory, held, giver, found)
            self._num_handed = found.manifest["meta"]["metrics_bytes"]
            if directory is not None:
                directory.go_on_from(found)
                directory.is_rewound = any(each.newest > found.step for each in held)
        return found

    def _hand_run(self, directory: Directory | None, held: Sequence[_Held], giver: int, found: Snapshot) -> None:
        """The snapshot, and first what goes with it."""
        orders = {name for each in held for name in each.sizes if name.startswith("orders/")}
        for name in (RECORD_FILE, *sorted(orders)):
            sizes = [each.sizes.get(name, 0) for each in held]
            if len(set(sizes)) > 1:
                self._hand_start(directory, name, max(sizes), giver)
        if directory is not None:
            directory.read_record_again()
        self._hand_start(directory, ROWS, found.manifest["meta"]["metrics_bytes"], giver)
        self._hand_start(directory, LEDGER, found.step * RECORD.size, giver)
        for name in sorted({name for each in held for name in each.named} - {found.name}):
            self._hand_named(directory, [each.named.get(name) for each in held], found.step)
        self._hand_snapshot(directory, [each.found for each in held], giver)

    def _hand_named(self, directory: Directory | None, copies: Sequence[Snapshot | None], last_step: int) -> None:
        """The newest sound one of a name that is no later than the snapshot to go on from."""
        for giver in sorted(range(len(copies)), key=lambda place: -_step(copies[place])):
            copy = copies[giver]
            if copy is None or copy.step > last_step:
                continue
            if all(other is not None and copy.is_same(other) for other in copies):
                return
            [damage] = self._group.each(partial(find_damage, copy.path, copy.manifest), on=[self.keepers[giver]])
            if damage is None:
                self._hand_snapshot(directory, copies, giver)
                return

    def _hand_snapshot(self, directory: Directory | None, copies: Sequence[Snapshot | None], giver: int) -> None:
        snapshot = copies[giver]
        assert snapshot is not None
        takers = [place for place, other in enumerate(copies) if other is None or not snapshot.is_same(other)]
        place = f"snapshots/{snapshot.path.name}"
        files = {f"{place}/{file}": expected["size"] for file, expected in snapshot.manifest["files"].items()}

        def adopt() -> None:
            assert directory is not None
            if problem := directory.store.adopt(snapshot):
                raise Error(f"a copy of {snapshot.path} has not arrived as it was sent ({problem}): start again")

        self._hand(directory, files, giver, takers, adopt)

    def _hand_start(self, directory: Directory | None, name: str, size: int, giver: int) -> None:
        """The first `size` bytes of a file, from the giver, or from whoever has so many."""
        hashes = self._group.each(lambda: _hash_start(_at(directory, name), size), on=self.keepers)
        having = [place for place in (giver, *range(len(hashes))) if hashes[place]]
        if not having:  # `Directory.begin` says that a part is missing
            return
        takers = [place for place, each in enumerate(hashes) if each != hashes[having[0]]]

        def replace_file() -> None:
            assert directory is not None
            path = directory.path / name
            if _hash_start(directory.store.inbox / path.name, size) != hashes[having[0]]:
                raise Error(f"a copy of {path} has not arrived as it was sent: start again")
            path.parent.mkdir(exist_ok=True)
            os.replace(directory.store.inbox / path.name, path)

        self._hand(directory, {name: size}, having[0], takers, replace_file)

    def _hand(
        self, directory: Directory | None, files: Mapping[str, int], giver: int, takers: Sequence[int],
        put: Callable[[], None],
    ) -> None:  # fmt: skip
        """Brings the first so many bytes of files to the takers' inboxes, where `put` is called then."""
        ranks = [self.keepers[place] for place in (giver, *takers)]

        def hand() -> None:
            assert directory is not None
            inbox, failures = directory.store.inbox, list[OSError]()
            is_taker = self._group.rank != ranks[0]
            with _noting(failures):
                if is_taker:
                    directory.store.make_inbox()
            for name, size in files.items():
                path = directory.path / name
                self._pass_on(path, inbox / path.name, size, ranks, failures)
            try:
                with _blaming(directory):
                    if failures:
                        raise failures[0]
                    if is_taker:
                        directory.check_still_ours()
                        put()
            finally:
                shutil.rmtree(inbox, ignore_errors=True)

        if takers:
            self._group.each(hand, on=ranks)

    def _pass_on(self, source: Path, target: Path, size: int, ranks: Sequence[int], failures: list[OSError]) -> None:
        """The first `size` bytes of `source`, on the first of `ranks`, into `target` on the others.

        A disk that fails must not keep the others waiting: what is sent goes on to the end.
        """
        is_giver = self._group.rank == ranks[0]
        buffer = torch.empty(min(size, PIECE_BYTES), dtype=torch.uint8)
        for start in range(0, size, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, size - start)]
            data = memoryview(piece.numpy())  # type: ignore[arg-type]
            with _noting(failures):
                if is_giver:
                    _read(source, start, data)
            self._group.relay(piece, ranks)
            with _noting(failures):
                if not is_giver and not failures:
                    _append(target, start, data)

    # --- under way --------------------------------------------------------------------------------------------

    def align(self, order: Order, directory: Directory | None, replicated: Callable[[], set[int]]) -> Order:
        """The order as rank 0 has it, and its rows up to there.

        Args:
            order: this rank's own; without names where it cannot be written here.
            replicated: gives the places of the tensors that are the same on all ranks, and need not be sent.

        Raises:
            Error: this rank lacks a tensor.
            OSError: the rows could not be written; they are kept and tried again.
        """
        message: Any = None
        if self._group.rank == 0:
            alike = replicated()
            own = {
                name: tensor.detach().resolve_conj().resolve_neg().cpu().clone()
                for name, tensor in order.tensors.items()
                if locate(tensor) not in alike or not tensor.numel()  # whose place says nothing
            }
            message = (order.names, order.structure, list(order.tensors), own, order.meta)
        names, structure, tensors, own, meta = self._group.broadcast(message)
        self.hand_rows(directory)
        if self._group.rank == 0 or directory is None or not (names and order.names):
            return order if self._group.rank == 0 else replace(order, names=[])
        if missing := [name for name in tensors if name not in own and name not in order.tensors]:
            raise Error(
                f"{missing[0]} is in the state of rank 0, and not in that of rank {self._group.rank}: make what "
                "run.prepare got the same on all ranks"
            )
        aligned = {name: own[name] if name in own else order.tensors[name] for name in tensors}
        return Order(order.step, names, structure, aligned, meta)

    def hand_rows(self, directory: Directory | None) -> None:
        """Brings the rows that rank 0 has written to the other copies. Raises OSError as `align`."""
        self._say_notes()
        is_giver = self._group.rank == 0
        rows = self._group.broadcast(_read_rows(directory, self._num_handed) if is_giver else b"")
        self._num_handed += len(rows)
        if directory is not None and not is_giver:
            directory.write_rows(rows)

    def _say_notes(self) -> None:
        for note in chain.from_iterable(self._group.gather(self.notes)):
            self._say(note)
        self.notes = []


# --- one copy ---------------------------------------------------------------------------------------------------------


def _look(directory: Directory, resume: str | int | None, rewinds: Sequence[int]) -> _Held:
    found, problem = None, ""
    if resume is not None:
        _part_from_old_branches(directory, rewinds)
    try:
        found = directory.find(resume)
    except Error as error:
        if resume is None:
            raise
        problem = str(error)
    sound = [each for each in directory.store.snapshots() if each.problem is None]
    orders = [f"orders/{path.name}" for path in _at(directory, "orders").glob("*.npy")]
    sizes = {}
    for name in (RECORD_FILE, LEDGER, *HISTORY, *orders):
        with suppress(OSError):
            sizes[name] = _at(directory, name).stat().st_size
    num_starts = count_lines(_at(directory, RESTARTS))
    return _Held(
        found,
        problem,
        newest=max((each.step for each in sound), default=0),
        named={each.name: each for each in sound if each.name is not None},
        sizes=sizes,
        num_starts=num_starts,
    )


def _part_from_old_branches(directory: Directory, rewinds: Sequence[int]) -> None:
    """Moves aside what the run has gone back behind while this node was not there."""
    directory.store.clean()
    directory.store.abandon([each for each in directory.store.snapshots() if each.was_left(rewinds)])


def _at(directory: Directory | None, name: str) -> Path:
    assert directory is not None
    return directory.path / name


def _read_rows(directory: Directory | None, start: int) -> bytes:
    """The rows from byte `start` of their file on, as far as they could be written and can be read."""
    assert directory is not None
    with suppress(OSError):
        directory.write_rows()
    with suppress(OSError), open(directory.path / ROWS, "rb", opener=open_regular) as file:
        file.seek(start)
        return file.read()
    return b""


def _hash_start(path: Path, size: int) -> str | None:
    """The sha256 of a file's first bytes; None where it has fewer."""
    sha, left = hashlib.sha256(), size
    with suppress(OSError), open(path, "rb", opener=open_regular) as file:
        while left and (data := file.read(min(left, PIECE_BYTES))):
            sha.update(data)
            left -= len(data)
    return None if left else sha.hexdigest()


def _read(path: Path, start: int, data: memoryview) -> None:
    with open(path, "rb", opener=open_regular) as file:
        file.seek(start)
        file.readinto(data)


def _append(path: Path, start: int, data: memoryview) -> None:
    with open(path, "ab" if start else "wb", opener=open_regular) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _step(snapshot: Snapshot | None) -> int:
    return -1 if snapshot is None else snapshot.step


@contextmanager
def _noting(failures: list[OSError]) -> Iterator[None]:
    """Adds an OSError of the block to the list, and goes on behind it."""
    try:
        yield
    except OSError as error:
        failures.append(error)


@contextmanager
def _blaming(directory: Directory) -> Iterator[None]:
    """Makes an OSError of the block an Error that names the node."""
    try:
        yield
    except OSError as error:
        raise Error(
            f"the run directory {directory.named} on {read_host()} cannot be written ({error.strerror or error}): make "
            "room, or name another one"
        ) from None
