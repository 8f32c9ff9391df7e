"""Saving and restoring a run: rank 0 writes in the directory, every rank knows what was written."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from samestep.config import RunConfig
from samestep.errors import Error
from samestep.launch.output_recorder import start_log
from samestep.snapshot.async_copy import Copy, Staging, Watch, is_watchable, locate
from samestep.snapshot.serialization import encode
from samestep.snapshot.store import OF_RUN, Snapshot, Store
from samestep.snapshot.writer import Refused, Saving
from samestep.train import stateful as prepared
from samestep.train.arguments import check_name
from samestep.train.copies import Copies, Order
from samestep.train.directory import LOGS, Directory
from samestep.train.inspection import Inspection
from samestep.train.mirror import Mirror, Unpushed
from samestep.train.options import Options
from samestep.train.replicas import Replicas, name_replicated
from samestep.train.sharing import find_keepers, name_node, say_here
from samestep.world.environment import read_host
from samestep.world.group import Group

T = TypeVar("T")


@dataclass(frozen=True)
class _Pending:
    """Snapshots on their way."""

    order: Order
    inspection: Inspection
    saving: Saving


class Snapshotter:
    """What a run leaves on disk. With `run_dir` None every call does nothing.

    Attributes:
        path, named: the run's directory, and as a person named it; None without one.
        directory: on rank 0, the directory itself; on nodes that do not share it, on the first rank of each.
        logs: takes what the ranks of this start print, `<rank>.log`; None until `record`.
        saved_step: the step of the newest numbered snapshot, or of one on its way; None when there is none.
        is_wanted: a numbered snapshot is due after this step, or as soon as the position can be resumed from.
        read_again: after `restore`, gives the whole state in that snapshot once more.
        unsaved: on rank 0, the step of the last snapshot that was due, and why it is not there; None where it is.
    """

    def __init__(self, config: RunConfig, group: Group, say: Callable[[str], None]) -> None:
        self._config, self._group, self._say = config, group, say
        self.directory: Directory | None = None
        self.logs: Path | None = None
        self.saved_step: int | None = None
        self.unsaved: tuple[int, str] | None = None
        self.is_wanted = self._is_ending = self._is_unpushed = False
        self._names_due: list[str] = []
        self._notes: list[str] = []
        self._watch: Watch | None = None
        self._restless: set[int] = set()
        self._staging, self._saved_s, self._url = Staging(), time.monotonic(), ""
        self._pending: _Pending | None = None
        self._warn = say if group.rank == 0 else self._note
        self._copies: Copies | None = None
        self._mirror: Mirror | None = None
        self.read_again: Callable[[], dict[str, Any]] = dict
        self.named: Path | None = None if config.run_dir is None else self._open_all(config.run_dir)
        self.path = None if self.named is None else self.named.absolute()

    @property
    def shown(self) -> str:
        """Where the run lives, as a person named it."""
        return self._url or str(self.named)

    def _open_mirror(self, url: str) -> tuple[str, str]:
        fresh, local_dir = self._config.fresh, self._config.local_dir
        self._mirror = Mirror(url, fresh=fresh, local_dir=local_dir, say=self._say)
        self._say(f"the working copy of {self._mirror.url} is {self._mirror.path}")
        return str(self._mirror.path), self._mirror.url

    def _open_all(self, run_dir: Path | str) -> Path:
        fresh = self._config.fresh and not isinstance(run_dir, str)
        if isinstance(run_dir, str):
            run_dir, self._url = self._group.once(self._open_mirror, run_dir)
        path, keepers = find_keepers(self._group, Path(run_dir))
        if len(keepers) == 1:
            return Path(self._group.once(self._open, path, fresh))
        self._copies = copies = Copies(self._group, keepers, self._say)
        path = copies.choose(path) if fresh else path
        try:
            self._group.each(lambda: name_node(lambda: self._open(path, fresh=False)), on=keepers)
        except Error:
            if self.directory is not None:
                self.directory.close()
            raise
        self._say(f"{path} is not one directory for all nodes: {len(keepers)} of them keep a copy of the run each")
        return path

    def _note(self, sentence: str) -> None:
        """Says what has happened to this node's copy, here and on rank 0."""
        say_here(sentence)
        if self._copies is not None:
            self._copies.notes.append(f"{read_host()}: {sentence}")

    def _open(self, path: Path, fresh: bool) -> str:
        directory = Directory(path, fresh=fresh, warn=self._warn)
        try:
            directory.check_numbers(self._config.identity())
        except Error:
            directory.close()
            raise
        self.directory = directory
        directory.before_close = self._settle_at_close
        return str(directory.named)

    def once(self, fn: Callable[[], T]) -> T:
        """Calls `fn` on each rank that has a directory; what it returned on rank 0. A full disk is an Error."""

        def call() -> T:
            try:
                return fn()
            except OSError as error:
                reason = f"({error.strerror}): make room, or name another one"
                raise Error(f"the run directory {self.named} cannot be written {reason}") from None

        if self._copies is not None:
            return self._group.each(call, on=self._copies.keepers)[0]
        return self._group.once(call)

    def read(self, numbers: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]] | None:
        """Reads the snapshot to resume from.

        Returns:
            The whole state in the snapshot and what `Directory.mark` said of its moment; None to begin.
        """
        if self.path is None:
            return None
        if self._copies is not None:
            found = self._copies.find(self.directory, self._config.resume, lambda: self._check(numbers))
        else:
            found = Snapshot.from_plain(plain) if (plain := self.once(lambda: self._find(numbers))) else None
        if found is None:
            return None
        self.read_again = partial(Store(self.path).read, found, OF_RUN)
        state = self.read_again()
        self.saved_step = state["position"]["step"]
        return state, found.manifest["meta"]

    def bring(self, which: int | str) -> None:
        """Brings a snapshot to this machine, where the run lives at a URL. On rank 0. Raises Error."""
        if self._mirror is not None and self.directory is not None:
            self._mirror.bring(self.directory, which)

    def _find(self, numbers: Mapping[str, Any]) -> dict[str, Any] | None:
        self._check(numbers)
        found = self.directory.find(self._config.resume) if self.directory is not None else None
        return None if found is None else found.to_plain()

    def _check(self, numbers: Mapping[str, Any]) -> None:
        assert self.directory is not None
        if self._mirror is not None:
            self._mirror.pull(self.directory, self._config.resume)
        self.directory.check_numbers(numbers)

    def record(
        self, numbers: Mapping[str, Any], machine: Mapping[str, Any], config: Mapping[str, Any], options: Options
    ) -> None:
        """Compares with the run that is here, and writes down which one it is. From here on, there are logs in it."""

        def write() -> int:
            assert self.directory is not None
            self.directory.check_numbers(numbers)
            if self._mirror is not None:
                self.directory.is_rewound |= self._mirror.is_ahead(self.saved_step or 0)
            self.directory.write_record(numbers, machine, config, options)
            if self._mirror is not None:
                self._mirror.begin(self.directory, self.saved_step or 0)
            return self.directory.find_restart()

        if self.path is not None:
            self.logs = self.path / LOGS / str(self.once(write))
            start_log(self._group.rank, self.logs / f"{self._group.rank}.log")

    def ask_for(self, name: str, *, is_taken: bool) -> None:
        """A named snapshot is due at the end of this body, unless an earlier start took it. Errors: `check_name`."""
        if check_name(name) not in self._names_due and not is_taken:
            self._names_due.append(name)

    def drop_names(self) -> None:
        """Named snapshots that are due are not taken."""
        for name in self._names_due:
            self._say(f"the snapshot {name} is not taken: the run stopped within the epoch that asks for it")
        self._names_due = []

    def watch(self, objects: prepared.Objects) -> None:
        """The first step begins: what is written to before its update has to be copied at once in all of them."""
        if self.path is not None:
            self._watch = Watch(tensor for tensor in prepared.list_calm(objects) if is_watchable(tensor))
            self._saved_s = time.monotonic()

    def is_time(self) -> bool:
        """Whether a snapshot is due by this rank's clock. Rank 0's counts, and the others hear of it."""
        every = self._config.snapshot_every
        if self.directory is None or every is None or every.seconds is None:
            return False
        return time.monotonic() - self._saved_s >= every.seconds

    def save_what_is_due(
        self,
        build_state: Callable[[], dict[str, Any]],
        objects: prepared.Objects,
        replicas: Replicas,
        *,
        step: int,
        epochs_done: int | None,
        numbered: bool,
        ending: bool,
        notes: Mapping[str, Any],
    ) -> None:
        """Begins to write the snapshots that are due between two steps. On all ranks.

        Args:
            step: the steps done.
            epochs_done: at an epoch's end, after its body.
            numbered: whether the position can be resumed from, so that a numbered one may be written.
            ending: the run ends here, so a numbered one is due, and all are there when this returns.
            notes: as in `Directory.mark`.

        Raises:
            Error: the state is poisoned, or not the same on all ranks, or the run has another writer by now.
        """
        self._collect()
        every = self._config.snapshot_every
        due = numbered and every is not None and self.saved_step != step
        due = due and every is not None and (ending or self.is_wanted or every.is_due(step, epochs_done))
        names: list[str | None] = [*self._names_due]
        self._names_due = []
        if self.path is None or not (due or names):
            return
        self.settle()
        self.unsaved, self._is_ending = None, ending
        if due:
            # Last: resumed from, it would not have the script ask for the named ones again.
            names.append(None)
            self.saved_step, self._saved_s, self.is_wanted = step, time.monotonic(), False
        inspection = Inspection(objects, replicas, step)
        order = self._order(build_state, step, names, notes)
        if self._copies is not None:
            order = self._align(self._copies, order, objects)
        if ending:
            self._save_now(order, inspection)
        else:
            self._save_beside(order, inspection, objects)

    @property
    def is_copying(self) -> bool:
        """Whether a snapshot's copy has not been joined yet."""
        return self._pending is not None and not self._pending.saving.is_decided

    def join_copy(self) -> None:
        """Before an update, on all ranks: what is being copied must not change any more.

        Raises:
            Error: the state that was copied is poisoned, or not the same on all ranks.
        """
        if self._watch is not None:
            self._restless |= {locate(tensor) for tensor in self._watch.find_changed()}
            self._watch = None
        if self._pending is None or self._pending.saving.is_decided:  # as in `is_copying`
            return
        copy = self._pending.saving.copy
        copy.join()
        if copy.torn:
            self._pending.saving.decide(False)
            self._restless |= {*copy.torn}
            self._take_again(self._pending.order)
            return
        try:
            if copy.has_failed:
                self._pending.inspection.look_again()
            self._pending.inspection.conclude()
        except Error:
            self._pending.saving.decide(False)
            raise
        self._pending.saving.decide(True)

    def settle(self) -> None:
        """Waits until what is on its way is there. On all ranks. Errors as for `join_copy`."""
        self.join_copy()
        if self._pending is not None:
            self._pending.saving.settle()
        self._collect()

    def _order(
        self, build_state: Callable[[], dict[str, Any]], step: int, names: list[str | None], notes: Mapping[str, Any]
    ) -> Order:
        """What is to be written; on ranks that do not write, nothing."""
        if self.directory is None:
            return Order(step, names, None, {}, {})
        state = build_state()
        structure, tensors = encode(state)
        try:
            epoch, world_size = state["position"]["epoch"], self._group.world_size
            meta = self.directory.mark(epoch=epoch, world_size=world_size, notes=notes)
        except OSError as error:
            self._report(step, names, error)
            return Order(step, [], None, {}, {})
        return Order(step, names, structure, tensors, meta)

    def _align(self, copies: Copies, order: Order, objects: prepared.Objects) -> Order:
        def find_replicated() -> set[int]:
            return {locate(tensor) for _, tensor in name_replicated(objects)}

        try:
            return copies.align(order, self.directory, find_replicated)
        except OSError as error:
            if order.names:  # else it was reported
                self._report(order.step, order.names, error)
            return Order(order.step, [], None, {}, {})

    def _save_now(self, order: Order, inspection: Inspection) -> None:
        inspection.look_again()
        inspection.conclude()
        try:
            self._write(order, order.tensors, lambda: None)
        except Error:
            raise
        except Exception as error:
            self._report(order.step, order.names, error)

    def _save_beside(self, order: Order, inspection: Inspection, objects: prepared.Objects) -> None:
        targets, refusal = self._take_memory(order)
        places = {locate(tensor) for tensor in order.tensors.values()}
        others = {f"/{place}": tensor for place, tensor in inspection.tensors.items() if place not in places}
        calm = {locate(tensor) for tensor in prepared.list_calm(objects)} - self._restless
        copy = Copy(order.tensors | others, targets, calm=calm, look=inspection.look)

        def write(confirm: Callable[[], None]) -> None:
            if refusal is not None:
                raise refusal
            self._write(order, targets, confirm)

        self._pending = _Pending(order, inspection, Saving(copy, write, inspection.is_sound))

    def _take_memory(self, order: Order) -> tuple[dict[str, Tensor], Exception | None]:
        """To copy to; none, and why, where the machine has not got it: the run goes on without this snapshot."""
        try:
            return self._staging.take(order.tensors), None
        except (MemoryError, RuntimeError) as error:  # torch's is a RuntimeError
            return {}, error

    def _write(self, order: Order, tensors: Mapping[str, Tensor], confirm: Callable[[], None]) -> None:
        """Writes all of an order, in whatever thread."""
        if self.directory is None:
            confirm()
            return
        for name in order.names:
            self.directory.save(order.structure, tensors, step=order.step, name=name, meta=order.meta, confirm=confirm)
        try:
            self.directory.prune(self._config.keep_last)
        except Error:
            raise
        except Exception as error:
            self._notes.append(f"old snapshots could not be removed ({error}): the run goes on")
        if self._mirror is not None:
            began_s = time.monotonic()
            self._mirror.push(self.directory, self._config.keep_last)
            self.directory.save_s += time.monotonic() - began_s

    def _take_again(self, order: Order) -> None:
        """What could not be copied is due once more after this step."""
        self._names_due = [*(name for name in order.names if name is not None), *self._names_due]
        if None in order.names:
            self.saved_step, self.is_wanted = None, True
        self._say(
            f"the snapshot of step {order.step} is taken one step later: the model or an optimizer was changed between "
            "that step and the next update; from now on, what was changed is copied before the step goes on"
        )

    def _collect(self) -> None:
        """Says what has become of a snapshot whose thread has ended."""
        if self._pending is None or not self._pending.saving.has_ended:
            return
        pending, self._pending = self._pending, None
        notes, self._notes = self._notes, []
        for note in notes:
            self._warn(note)
        failure = pending.saving.failure
        if isinstance(failure, Error):
            raise failure
        if failure is not None and not isinstance(failure, Refused):
            self._report(pending.order.step, pending.order.names, failure)

    def _report(self, step: int, names: list[str | None], error: Exception) -> None:
        if None in names:
            self.saved_step = None
        if self.directory is not None:
            self._is_unpushed = isinstance(error, Unpushed)
            told = f"the snapshot of step {step} {error}" if self._is_unpushed else ""
            self.unsaved = step, told or self.directory.explain_failure(step, error)
            self._warn(self.unsaved[1] + ("" if self._is_ending else ", the run goes on"))

    def end(self, step: int) -> None:
        """The loop is over, after `step` steps: `settle`, and all rows are in all copies."""
        self.settle()
        if self._mirror is not None and self.directory is not None:
            try:
                self._mirror.push(self.directory, self._config.keep_last)
                if self._is_unpushed:
                    self.unsaved = None
            except Unpushed as error:
                if self.unsaved is None or self.unsaved[0] != step:
                    self._is_ending = True
                    self._report(step, [None], error)
        if self._copies is not None:
            with suppress(OSError):  # as is told now
                self._copies.hand_rows(self.directory)
        is_unsaved = self.unsaved is not None and self.unsaved[0] == step
        if self.directory is not None and self.directory.find_lost() and not is_unsaved:
            self._warn(self.directory.lost)

    def write_status(self, status: str, reason: str, end: Mapping[str, Any] | None) -> None:
        """As `Directory.write_status`, in all copies."""
        if self.directory is not None:
            self.directory.write_status(status, reason, end)
            if self._mirror is not None:
                self._mirror.push_status(self.directory)

    def _settle_at_close(self) -> None:
        """Without the other ranks: they may be gone."""
        if self._pending is not None:
            with suppress(Error):
                self._pending.saving.settle()
                self._collect()

    def close(self) -> bool:
        """Gives the directory up. False where there was none to give up, since a later run has taken it over."""
        self._settle_at_close()
        was_open = self.path is not None and (self.directory is None or self.directory.is_open)
        if self.directory is not None:
            self.directory.close()
            self.directory = None
        return was_open
