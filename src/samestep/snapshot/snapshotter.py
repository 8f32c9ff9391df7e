"""Saves and restores a run. One rank of each run directory writes; all ranks call the same methods."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from samestep.config import RunConfig
from samestep.console import warn
from samestep.errors import Error, InvalidValue
from samestep.launch.output_recorder import start_log
from samestep.snapshot.async_copy import Copy, Refused, Staging, Watch, Writer, is_watchable, locate
from samestep.snapshot.inspection import Inspection, TrainingState
from samestep.snapshot.node_replication import NodeReplication
from samestep.snapshot.object_store import RemoteRun
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.run_record import Options
from samestep.snapshot.serialization import encode
from samestep.snapshot.store import OF_RUN, Snapshot, Store
from samestep.watch.records import LOGS
from samestep.world.group import Group

T = TypeVar("T")


@dataclass(frozen=True)
class _Order:
    """Snapshots of one step to be written.

    Attributes:
        names: names of the snapshots; None for a numbered one. Empty on ranks that do not write.
        structure, tensors: the encoded state.
        meta: see `RunDirectory.mark`.
    """

    step: int
    names: Sequence[str | None] = ()
    structure: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Pending:
    """Snapshots that are being written."""

    order: _Order
    inspection: Inspection
    writer: Writer


class Snapshotter:
    """Saves and restores a run. With `run_dir` None every call does nothing.

    Args:
        config: `run_dir`, `local_dir`, `fresh`, `resume`, `snapshot_every`, `keep_last` and the run's identity.
        say: prints a message on rank 0.

    Attributes:
        path, named: the run's directory, and the same as the user gave it; None without one.
        directory: the run directory, on ranks that write.
        logs: the directory for the output of this start's ranks, `<rank>.log`; None before `record`.
        saved_step: the step of the newest numbered snapshot, complete or being written; None if there is none.
        is_wanted: whether a numbered snapshot is due after this step, or as soon as the run can resume from the
            position.
        read_again: reads the state that `read` returned a second time.
        unsaved: step and reason, if the last snapshot could not be written; else None. On ranks that write.
    """

    def __init__(self, config: RunConfig, group: Group, say: Callable[[str], None]) -> None:
        self._config, self._group, self._say, self._warn = config, group, say, say
        self.directory: RunDirectory | None = None
        self.logs: Path | None = None
        self.saved_step: int | None = None
        self.unsaved: tuple[int, str] | None = None
        self.is_wanted = self._is_ending = False
        self.read_again: Callable[[], dict[str, Any]] = dict
        self._names_due: list[str] = []
        self._asked: list[str] = []
        self._watch: Watch | None = None
        self._unstable: set[int] = set()  # addresses of tensors that the script writes to between updates
        self._staging, self._saved_s = Staging(), time.monotonic()
        self._pending: _Pending | None = None
        self._remote: RemoteRun | None = None
        self._url = ""
        self._nodes: NodeReplication | None = None
        run_dir, fresh = config.run_dir, config.fresh
        if isinstance(run_dir, str):
            (run_dir, self._url), fresh = group.once(self._open_remote, run_dir), False
        if run_dir is not None:
            self._nodes = NodeReplication(group, Path(run_dir), say, fresh=fresh)
            self._warn = self._nodes.warn
            self._nodes.open(lambda directory: directory.check_numbers(config.identity()))
            self.directory = self._nodes.directory
            if self.directory is not None:
                self.directory.before_close = self._settle_alone
        self.named = None if self._nodes is None else self._nodes.path
        self.path = None if self.named is None else self.named.absolute()

    def _open_remote(self, url: str) -> tuple[str, str]:
        config = self._config
        self._remote = remote = RemoteRun(url, fresh=config.fresh, local_dir=config.local_dir, warn=self._say)
        self._say(f"the working copy of {remote.url} is {remote.path}")
        return str(remote.path), remote.url

    @property
    def shown(self) -> str:
        """The run's directory or URL, for messages."""
        return self._url or str(self.named)

    def once(self, fn: Callable[[], T]) -> T:
        """Call `fn` on each rank that writes. Return rank 0's result on every rank. Raises Error as in `each`."""
        return self._group.once(fn) if self._nodes is None else self._nodes.each(fn)[0]

    # --- start ------------------------------------------------------------------------------------------------

    def read(self, numbers: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]] | None:
        """Read the snapshot to resume from.

        Returns:
            The state in the snapshot and the manifest's `meta`; None to begin.
        """
        if self._nodes is None or self.path is None:
            return None

        def check(directory: RunDirectory) -> None:
            if self._remote is not None:
                directory.elsewhere = self._remote.pull(directory)
            directory.check_numbers(numbers)

        found = self._nodes.find(self._config.resume, check)
        if found is None:
            return None
        self.read_again = partial(Store(self.path).read, found, OF_RUN)
        state = self.read_again()
        self.saved_step = state["position"]["step"]
        return state, found.manifest["meta"]

    def find(self, which: int | str) -> Snapshot | None:
        """Call `Store.find` for the run directory and its URL, on rank 0."""
        assert self.path is not None
        elsewhere = None
        if self._remote is not None and self.directory is not None:
            elsewhere = self._remote.find_elsewhere(self.directory)
        return Store(self.path, self.named).find(which, warn=self._say, elsewhere=elsewhere)

    def record(
        self, numbers: Mapping[str, Any], machine: Mapping[str, Any], config: Mapping[str, Any], options: Options
    ) -> None:
        """Compare with the directory's run, write `run.json`, and start the logs. Arguments as for `build_record`."""

        def write() -> int:
            assert self.directory is not None
            self.directory.check_numbers(numbers)
            self.directory.write_record(numbers, machine, config, options)
            if self._remote is not None:
                self._remote.begin(self.directory, self.saved_step or 0)
            return self.directory.find_restart()

        if self.path is not None:
            self.logs = self.path / LOGS / str(self.once(write))
            start_log(self._group.rank, self.logs / f"{self._group.rank}.log")

    # --- when -------------------------------------------------------------------------------------------------

    def ask_for(self, name: Any, *, is_taken: bool) -> None:
        """Make a named snapshot due at the end of this body. `is_taken`: whether an earlier start wrote it.

        Raises:
            InvalidValue: the name is not valid.
        """
        is_valid = isinstance(name, str) and name.isascii() and name.isidentifier() and len(name) <= 64
        if not is_valid or name in ("latest", "never"):
            raise InvalidValue(f"a snapshot's name is letters, digits and underscores, such as best, not {name!r}")
        if name not in self._asked:
            self._asked.append(name)
        if name not in self._names_due and not is_taken:
            self._names_due.append(name)

    def take_asked(self) -> list[str]:
        """Return the names given to `ask_for` since the last call."""
        asked, self._asked = self._asked, []
        return asked

    def drop_names(self, why: str) -> None:
        """Forget the named snapshots that are due, and print which and why."""
        for name in self._names_due:
            self._say(f"the snapshot {name} is not taken: {why}")
        self._names_due = []

    def is_time(self) -> bool:
        """Return whether a snapshot is due by this rank's clock. Rank 0 announces it in the next exchange."""
        every = self._config.snapshot_every
        return self.directory is not None and every is not None and every.has_passed(time.monotonic() - self._saved_s)

    def save_what_is_due(
        self,
        get_state: Callable[[], TrainingState],
        *,
        step: int,
        epochs_done: int | None,
        numbered: bool,
        ending: bool,
        notes: Mapping[str, Any],
    ) -> None:
        """Start to write the snapshots that are due between two steps. All ranks call this.

        Args:
            get_state: called if a snapshot is due.
            step: the number of steps done.
            epochs_done: the number of epochs done, at an epoch's end after its body; else None.
            numbered: whether a run can be resumed at this position, so that a numbered snapshot may be written.
            ending: whether the run ends here: then a numbered snapshot is due, and all are complete when this returns.
            notes: see `RunDirectory.mark`.

        Raises:
            Error: the state is not finite, or not the same on all ranks, or another process has taken the run over.
        """
        self._collect()
        every = self._config.snapshot_every
        is_new = numbered and self.saved_step != step
        due = is_new and every is not None and (ending or self.is_wanted or every.is_due(step, epochs_done))
        names: list[str | None] = [*self._names_due]
        self._names_due = []
        if self.path is None or not (due or names):
            return
        self.settle()
        self.unsaved, self._is_ending = None, ending
        if due:
            # Last: a script that resumes from it would not ask for the named ones again.
            names.append(None)
            self.saved_step, self._saved_s, self.is_wanted = step, time.monotonic(), False
        state = get_state()
        inspection = Inspection(state, step)
        self._start_writer(self._align(self._build_order(state, step, names, notes), state), inspection, state)
        if ending:
            try:
                self.settle()
            finally:
                self._settle_alone()  # after an exception, the script may change the tensors that are being written

    def _build_order(
        self, state: TrainingState, step: int, names: list[str | None], notes: Mapping[str, Any]
    ) -> _Order:
        if self.directory is None:
            return _Order(step)
        contents = state.build()
        structure, tensors = encode(contents)
        try:
            epoch, world_size = contents["position"]["epoch"], self._group.world_size
            meta = self.directory.mark(epoch=epoch, world_size=world_size, notes=notes)
        except OSError as error:
            self._report(step, names, error)
            return _Order(step)
        return _Order(step, names, structure, tensors, meta)

    def _align(self, order: _Order, state: TrainingState) -> _Order:
        """Return rank 0's order, on other nodes that write.

        Raises:
            InvalidValue: this rank lacks one of its tensors.
        """
        nodes = self._nodes
        if nodes is None or not nodes.is_replicated:
            return order
        message = None
        if self._group.rank == 0:
            same = {locate(tensor) for _, tensor in state.replicated}
            own = {
                name: tensor.detach().resolve_conj().resolve_neg().cpu().clone()
                for name, tensor in order.tensors.items()
                if locate(tensor) not in same or not tensor.numel()  # an empty tensor has no address
            }
            message = (list(order.names), order.structure, list(order.tensors), own, order.meta)
        try:
            names, structure, tensors, own, meta = nodes.share(message)
        except OSError as error:
            if order.names:  # otherwise it was reported before
                self._report(order.step, order.names, error)
            return _Order(order.step)
        if self._group.rank == 0:
            return order
        if self.directory is None or not names or not order.names:
            return _Order(order.step)
        if missing := [name for name in tensors if name not in own and name not in order.tensors]:
            raise InvalidValue(
                f"{missing[0]} is in the state of rank 0, and not in that of rank {self._group.rank}: make the objects "
                "for run.prepare the same on all ranks"
            )
        aligned = {name: own[name] if name in own else order.tensors[name] for name in tensors}
        return _Order(order.step, names, structure, aligned, meta)

    # --- write ------------------------------------------------------------------------------------------------

    def watch(self, stable: Iterable[Tensor]) -> None:
        """Begin to watch tensors, before the loop's first step. `stable`: see `TrainingState`.

        Tensors that the script writes to before the step's update are copied at once in all snapshots.
        """
        if self.path is not None:
            self._watch = Watch(tensor for tensor in stable if is_watchable(tensor))
            self._saved_s = time.monotonic()

    @property
    def is_copying(self) -> bool:
        """Return whether a copy is in progress."""
        return self._pending is not None and not self._pending.writer.is_decided

    def join_copy(self) -> None:
        """Wait until the state is copied. All ranks call this before an update.

        Raises:
            Error: the copied state is not finite, or not the same on all ranks.
        """
        if self._watch is not None:
            self._unstable |= {locate(tensor) for tensor in self._watch.find_changed()}
            self._watch = None
        if self._pending is None or self._pending.writer.is_decided:
            return
        writer, copy, inspection = self._pending.writer, self._pending.writer.copy, self._pending.inspection
        copy.join()
        if copy.torn:
            writer.decide(False)
            self._unstable |= {*copy.torn}
            self._take_again(self._pending.order)
            return
        try:
            if copy.has_failed:
                inspection.look_again()
            inspection.conclude()
        except Error:  # after another exception, the check of this rank decides
            writer.decide(False)
            raise
        writer.decide(True)

    def settle(self) -> None:
        """Wait until all snapshots are written. All ranks call this. Errors as for `join_copy`."""
        self.join_copy()
        if self._pending is not None:
            self._pending.writer.settle()
        self._collect()

    def _start_writer(self, order: _Order, inspection: Inspection, state: TrainingState) -> None:
        targets: dict[str, Tensor] = {}
        try:
            if not self._is_ending:  # no step follows the last snapshot, so it needs no copy
                targets = self._staging.take(order.tensors)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError
            self._report(order.step, order.names, error)
            order = _Order(order.step)
        places = {locate(tensor) for tensor in order.tensors.values()}
        others = {f"/{place}": tensor for place, tensor in inspection.tensors.items() if place not in places}
        stable = {locate(tensor) for tensor in state.stable} - self._unstable
        copy = Copy(order.tensors | others, targets, stable=stable, look=inspection.look)
        write = partial(self._write, order, order.tensors if self._is_ending else targets)
        self._pending = _Pending(order, inspection, Writer(copy, write, inspection.is_sound))

    def _write(self, order: _Order, tensors: Mapping[str, Tensor], confirm: Callable[[], None]) -> None:
        """Write all snapshots of an order. May be called in any thread."""
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
            self._warn(f"old snapshots could not be removed ({error}): the run continues")
        if self._remote is not None and not self._is_ending:  # `end` uploads the last one
            began_s = time.monotonic()
            if problem := self._remote.push(self.directory, self._config.keep_last):
                self._warn(f"the snapshot of step {order.step} {problem}, and the run continues")
            self.directory.save_s += time.monotonic() - began_s

    def _take_again(self, order: _Order) -> None:
        """Make the snapshots due again after this step."""
        self._names_due = [*(name for name in order.names if name is not None), *self._names_due]
        if None in order.names:
            self.saved_step, self.is_wanted = None, True
        late = (
            f"the snapshot of step {order.step} is taken one step later: the model or an optimizer was changed between "
            "that step and the next update; from now on, what was changed is copied before the step continues"
        )
        warn(self._say, late, start="the snapshot of step")

    def _collect(self) -> None:
        """Report the result of a writer that has ended."""
        if self._pending is None or not self._pending.writer.has_ended:
            return
        pending, self._pending = self._pending, None
        failure = pending.writer.failure
        if isinstance(failure, Error):
            raise failure
        if failure is not None and not isinstance(failure, Refused):
            self._report(pending.order.step, pending.order.names, failure)

    def _report(self, step: int, names: Sequence[str | None], error: Exception) -> None:
        if None in names:
            self.saved_step = None
        if self.directory is not None:
            self.unsaved = step, self.directory.explain_failure(step, error)
            self._warn(self.unsaved[1] + ("" if self._is_ending else ", and the run continues"))

    # --- end --------------------------------------------------------------------------------------------------

    def end(self, step: int) -> None:
        """Complete all snapshots and logs. All ranks call this at the end of the loop, after `step` steps."""
        self.settle()
        if self._remote is not None and self.directory is not None:
            problem = self._remote.push(self.directory, self._config.keep_last)
            if problem and (self.unsaved is None or self.unsaved[0] != step):
                self.unsaved = step, f"the snapshot of step {step} {problem}"
                self._warn(self.unsaved[1])
        if self._nodes is not None:
            with suppress(OSError):  # `find_lost` reports it
                self._nodes.share()
        is_unsaved = self.unsaved is not None and self.unsaved[0] == step
        if self.directory is not None and self.directory.find_lost() and not is_unsaved:
            self._warn(self.directory.lost)
        if self.directory is not None:
            self.directory.check_logs()

    def write_status(self, status: str, reason: str, end: Mapping[str, Any] | None) -> None:
        """Call `RunDirectory.write_status` for all copies of the run."""
        if self.directory is not None:
            self.directory.write_status(status, reason, end)
            if self._remote is not None:
                self._remote.push_status(self.directory)

    def _settle_alone(self) -> None:
        """Complete the pending snapshots without collectives, because the other ranks may be gone."""
        if self._pending is not None:
            with suppress(Error):
                self._pending.writer.settle()
                self._collect()

    def close(self) -> bool:
        """Release the directory. Return False if a later run of this process has taken it over before."""
        self._settle_alone()
        was_open = self.path is not None and (self.directory is None or self.directory.is_open)
        if self.directory is not None:
            self.directory.close()
            self.directory = None
        return was_open
