"""Checks of a run while it trains: the script's calls, of optimizers and of the run, and the equality of the ranks."""

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any
from weakref import WeakMethod, WeakSet, finalize

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from samestep.errors import Error, UsageError
from samestep.hashing import hash_short
from samestep.nested import find_tensors
from samestep.snapshot.async_copy import Share, TrainingState
from samestep.torch_internals import get_local, is_sharded, read_version
from samestep.train.context import RunContext
from samestep.train.objects import Objects, list_params, strip_compiled
from samestep.train.step import Step, StepObserver
from samestep.watch.replica_checksums import checksum, combine, explain_drift, find_drift, read_back
from samestep.world.environment import read_host
from samestep.world.group import Group

# A call that a script must make on all ranks in the same order. NONE: a step, or the end of an epoch.
Call = IntEnum("Call", "NONE STOP PREPARE LOOP ONCE EVALUATE RESTORE UPDATE BARRIER", start=0)
_NAMES = {
    Call.STOP: "run.stop",
    Call.PREPARE: "run.prepare",
    Call.LOOP: "run.epochs or run.steps",
    Call.ONCE: "run.once",
    Call.EVALUATE: "run.evaluate",
    Call.RESTORE: "run.restore",
    Call.UPDATE: "optimizer.step",
    Call.BARRIER: "run.barrier",
}
_ADVICE = {
    Call.STOP: "base the decision to stop on values that are the same on all ranks, such as step.loss",
    Call.EVALUATE: "call it on every rank, since they divide the data set, and print or save the result on rank 0",
    Call.UPDATE: "base the decision to update on values that are the same on all ranks, such as step.loss",
}
_OTHER_ADVICE = (
    "make the same calls in the same order on every rank, and check what ranks can see differently, such as whether a "
    "file exists, in the function that run.once calls"
)
_SIGN = 0x5A3E51  # the highest bits of a call's number


class MisuseChecks(StepObserver):
    """Observes one run's loop, its prepared objects and schedules, and the updates of all optimizers of the process.

    The hook that sees the updates has no reference to this object, and is removed with it.

    Args:
        optimizers: those of the run.
        inner: the one that updates inside the micro-batch loop, which is not checked; None: there is none.
    """

    def __init__(
        self, objects: Objects, optimizers: Iterable[Optimizer], context: RunContext, inner: Optimizer | None
    ) -> None:
        self._objects = objects
        self._inner = inner
        self._context = context
        self._optimizers = WeakSet(optimizers)
        self._schedules = {name: thing for name, thing in objects.by_name.items() if isinstance(thing, LRScheduler)}
        self._positions: dict[str, int] = {}  # of the schedules when the pass began
        self._signature = self._sign()
        self._names = {number: name for name, (number, *_) in self._signature.items()}
        self._step: Step | None = None
        self._others: WeakSet[Optimizer] = WeakSet()  # were not passed, and have updated something in the loop
        # Gradients of their parameters, with the number of writes to each: when the last pass began, and those that
        # it has changed.
        self._before: dict[Tensor, int] = {}
        self._partial: dict[Tensor, int] = {}
        find_check = WeakMethod(self._check_update)

        def check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (check_update := find_check()) is not None:
                check_update(optimizer)

        finalize(self, register_optimizer_step_pre_hook(check).remove)

    def begin_loop(self) -> None:
        """A loop begins. Raises UsageError if a model is not the one that was prepared."""
        before, now = self._signature, self._sign()
        if changed := next((name for name in before | now if before.get(name) != now.get(name)), ""):
            raise UsageError(
                f"{changed} was added, removed, replaced or converted after run.prepare: change the model before it",
                code="SS216",
            )

    def begin_step(self, step: Step) -> None:
        self._step = step

    def begin_pass(self, step: Step) -> None:
        if self._schedules:
            self._positions = self._read_positions()
        if self._others:
            self._before = self._read_grads()

    def reduced(self, step: Step) -> None:
        if self._schedules:
            for name, now in self._read_positions().items():
                if now != self._positions[name]:
                    raise UsageError(
                        f"{name}.step() inside the micro-batch loop of step {step.number}: each rank calls it as often "
                        "as it has micro-batches; dedent it by one level",
                        code="SS211",
                    )
        if self._others:
            grads = self._read_grads()
            self._partial = {grad: count for grad, count in grads.items() if self._before.get(grad) != count}

    def _read_positions(self) -> dict[str, int]:
        return {name: getattr(schedule, "last_epoch", 0) for name, schedule in self._schedules.items()}

    def _read_grads(self) -> dict[Tensor, int]:
        params = [param for optimizer in self._others for param in list_params(optimizer)]
        return {param.grad: read_version(param.grad) for param in params if param.grad is not None}

    def _check_update(self, optimizer: Optimizer) -> None:
        if optimizer is self._inner:
            return
        is_ours = optimizer in self._optimizers
        state = self._context.state
        if not state.is_in_loop:
            if is_ours and state.is_before_loops and any(param.grad is not None for param in list_params(optimizer)):
                raise UsageError(
                    "optimizer.step() was called before the loop of the run: each rank trains alone there, on the "
                    "whole data set, and nothing is saved; iterate over run.epochs(...) or run.steps(...)",
                    code="SS214",
                )
            return
        ids = [] if is_ours else [id(param) for param in list_params(optimizer) if id(param) in self._names]
        if (step := self._step) is not None and (is_ours or ids):
            step.refuse_inside("optimizer.step()", "its gradient is not complete there; dedent it by one level")
        if ids:
            raise UsageError(
                f"an optimizer ({type(optimizer).__name__}) that was not passed to run.prepare updates "
                f"{self._names[ids[0]]}: pass "
                "it, so that its state is part of the snapshots",
                code="SS215",
            )
        if not is_ours and self._context.world_size > 1:
            self._others.add(optimizer)
            if step is not None and not step.is_open:
                self._refuse_partial(optimizer, step.number)

    def _refuse_partial(self, optimizer: Optimizer, number: int) -> None:
        """Raise UsageError for an update from a gradient of this rank's micro-batches only."""
        for param in list_params(optimizer):
            if param.grad is not None and self._partial.get(param.grad) == read_version(param.grad):
                raise UsageError(
                    f"an optimizer ({type(optimizer).__name__}) that was not passed to run.prepare updates a parameter "
                    f"of shape {tuple(param.shape)} in step {number}, whose gradient is of this rank's micro-batches "
                    "only: pass the optimizer and the module of the parameter to run.prepare",
                    code="SS215",
                )

    def _sign(self) -> dict[str, tuple[int, Any, Any]]:
        """Return what identifies each parameter, by name."""
        return {name: (id(param), param.dtype, param.device) for name, param in self._objects.name_params().items()}


def find_replicated(params: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that must be equal on all ranks that have them, after every step.

    An optimizer's state that differs makes parameters differ in the next update. It may also have memory that is never
    read. Buffers are left out, because a script may use one as a counter of its rank. So are parameters of which this
    rank has a shard, or nothing: those of other stages of a pipeline are on the meta device.
    """
    return {name: param for name, param in params.items() if not (is_sharded(param) or param.is_meta)}


def list_checked(objects: Objects, params: Mapping[str, nn.Parameter]) -> list[tuple[str, Tensor]]:
    """Return the tensors that training must not make infinite or nan, with names for messages.

    These are trained parameters (of a sharded one, this rank's shard) and BatchNorm's statistics. Other buffers, such
    as masks, may be infinite. An optimizer's state may be, too, or have memory that is never read; what it spoils shows
    in the parameters after the next update.
    """
    found = [(name, get_local(param)) for name, param in params.items() if param.requires_grad]
    for name, module in objects.modules.items():
        found += [
            (f"{name}.{strip_compiled(path)}.{key}", buffer)
            for path, child in module.named_modules()
            if isinstance(child, _BatchNorm)
            for key, buffer in child.named_buffers(recurse=False)
        ]
    return [(name, tensor) for name, tensor in found if not tensor.is_meta]


def list_stable(objects: Objects, params: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """Return the tensors that change only in or after an update: parameters and the optimizers' state."""
    tensors: list[Tensor] = [*params.values()]
    for optimizer in objects.optimizers.values():
        tensors += find_tensors([*optimizer.state.values()])
    return [get_local(tensor) for tensor in tensors if not tensor.is_meta]


class ReplicaChecks:
    """Compares the parameters of `objects` between the ranks, at the interval `compare_every`."""

    def __init__(self, objects: Objects, context: RunContext) -> None:
        self._objects = objects
        self._group = context.group
        self._every = context.config.compare_every if self._group.num_replicas > 1 else None
        self._is_divided = context.config.divides_state
        self._alike_at: int | None = None
        self._restored: Mapping[str, int] = {}

    def note_restored(self) -> None:
        """Note the state in which the run resumes, for `find_change`."""
        self._restored = self._read_checksums()

    def find_change(self) -> str:
        """Return the name of a parameter that the script has changed since `note_restored`; "" if there is none."""
        before, self._restored = self._restored, {}
        now = self._read_checksums() if before else {}
        return next((name for name, value in before.items() if now.get(name) != value), "")

    def compare_if_due(self, step: int, epochs_done: int | None) -> None:
        """Compare after `step` steps if that is due, on all ranks: one exchange of 8 bytes.

        Args:
            epochs_done: at the end of an epoch; else None.

        Raises:
            Error: they differ; the message names rank, host and tensor. Raised on all ranks.
        """
        if self._every is not None and self._every.is_due(step, epochs_done) and self._alike_at != step:
            self._compare(step, self._read_checksums())

    def _read_checksums(self) -> Mapping[str, int]:
        return read_back(
            {name: checksum(param) for name, param in find_replicated(self._objects.name_params()).items()}
        )

    def _compare(self, step: int, checksums: Mapping[str, int]) -> None:
        num_parts = self._group.ranks_per_replica  # each of which is compared over the replicas
        marks = self._group.gather_number(combine(checksums))
        if any(len({*marks[part::num_parts]}) > 1 for part in range(num_parts)):
            replies = self._group.gather((read_host(), checksums))
            names = [f"rank {rank} ({host})" for rank, (host, _) in enumerate(replies)]
            for part in range(num_parts):
                drift = find_drift([checked for _, checked in replies[part::num_parts]])
                if drift is not None:
                    raise Error(explain_drift(drift, names[part::num_parts], step, self._alike_at), code="SS502")
        self._alike_at = step

    def build_training_state(
        self,
        contents: Mapping[str, Any],
        notes: Mapping[str, Any],
        step: int,
        share: Share,
    ) -> TrainingState:
        """Return the content of a snapshot after `step` steps. `contents`, `notes`, `share`: see `TrainingState`."""
        is_due = self._every is not None and self._alike_at != step
        is_parted = self._group.ranks_per_replica > 1
        params = self._objects.name_params()
        replicated = find_replicated(params) if is_due or self._is_divided else {}
        stable = list_stable(self._objects, params)
        return TrainingState(
            contents,
            notes,
            checked=list_checked(self._objects, params),
            stable=stable,
            replicated=[*replicated.items()] if is_due else [],
            compare=partial(self._compare, step) if is_due else None,
            same=[] if is_parted else [*replicated.values()] if self._is_divided else stable,
            share=share,
        )


def wait_for_call(group: Group, call: Call, names: Sequence[str] = ()) -> None:
    """Wait until all ranks have made a call. Without this, ranks at different calls would wait for each other forever.

    Args:
        names: at the end of an epoch, the named snapshots that this rank has asked for.

    Raises:
        UsageError: another rank made a different call, continues with the next step, or asked for different snapshots.
    """
    asked = hash_short(repr([*names]).encode()) >> 32
    marks = group.gather_number(_SIGN << 40 | asked << 8 | call)
    # The message of a step's exchange begins with another number.
    calls = [Call(mark & 0xFF) if mark >> 40 == _SIGN else Call.NONE for mark in marks]
    if len({*calls}) > 1:
        named = max(calls)
        rank = calls.index(named)
        other, others_call = next(each for each in enumerate(calls) if each[1] != named)
        does = f"has called {_NAMES[others_call]}" if others_call in _NAMES else "has not"
        raise UsageError(
            f"rank {rank} has called {_NAMES[named]}, and rank {other} {does}: {_ADVICE.get(named, _OTHER_ADVICE)}",
            code="SS501",
        )
    if len({*marks}) > 1:
        other = next(rank for rank, mark in enumerate(marks) if mark != marks[0])
        raise UsageError(
            f"rank 0 and rank {other} did not ask for the same snapshots in this epoch: call run.snapshot on every "
            "rank; one of them writes it",
            code="SS501",
        )


def gather_after_step(group: Group, value: Any) -> list[Any]:
    """Gather a value of each rank between two steps, as `Group.gather`.

    Raises:
        UsageError: another rank waits in the step of a divided optimizer.
    """
    wait_for_call(group, Call.NONE)
    return group.gather(value)
