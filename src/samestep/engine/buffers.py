"""The buffers of modules, which change in forward passes: after a step they are the same at any number of ranks."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from samestep.engine.control import Control, Vote
from samestep.engine.exchange import Exchange, sum_alone
from samestep.engine.exchange_memory import LastMemory
from samestep.engine.folding import Grads, RankParts
from samestep.engine.reduction_plan import build_reduction_plan
from samestep.errors import InvalidValue, UsageError
from samestep.plan.tree import Layout
from samestep.torch_internals import get_buffers, get_non_persistent, read_version
from samestep.world.group import Group

PASSES_COMPARED = 4  # first passes of a start, which find the buffers that are written through `.data`


def check_module(name: str, module: nn.Module) -> None:
    """Refuse modules whose results depend on the world size.

    Raises:
        Error: `module` holds a SyncBatchNorm.
    """
    for path, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise InvalidValue(
                f"{name}.{path} is a SyncBatchNorm, whose statistics depend on the number of ranks: use BatchNorm; "
                "it normalizes over one micro-batch, and a step averages its running statistics over all of them",
                code="SS601",
            )


def spread_buffers(module: nn.Module) -> None:
    """Replace buffers made by `expand`, whose elements share memory, by contiguous ones, which can be written."""
    for part in module.modules():
        for name, buffer in [*get_buffers(part).items()]:
            if buffer is not None and buffer.layout is torch.strided and 0 in buffer.stride():
                get_buffers(part)[name] = buffer.contiguous()


def refuse_lone_sample(modules: Mapping[str, nn.Module], step: int, v: int, rank: int) -> list[RemovableHandle]:
    """Add hooks that raise an error with the name of a BatchNorm layer that cannot normalize the one sample of v.

    Returns:
        The hooks, to be removed after the micro-batch.

    Raises:
        InvalidValue: (from a layer's forward) a layer in training would normalize a single value per channel.
    """

    def build_check(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def check(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            shape = inputs[0].shape
            if layer.training and inputs[0].numel() == shape[1]:
                raise InvalidValue(
                    f"micro-batch {v} of step {step} (rank {rank}) has one sample, and {path} cannot normalize one "
                    f"value per channel (shape {tuple(shape)}): choose a larger micro_batch_size that leaves no "
                    "remainder of 1, or drop_last=True",
                    rank=rank,
                    code="SS210",
                )

        return check

    layers = {
        id(part): (f"{name}.{path}", part)
        for name, module in modules.items()
        for path, part in module.named_modules()
        if isinstance(part, _BatchNorm)
    }
    return [part.register_forward_pre_hook(build_check(path)) for path, part in layers.values()]


class _Buffer:
    """A buffer, at the first place where a module holds it, in a pass over a step's micro-batches.

    Args:
        held_by: the module's own dict, which changes with it.

    Attributes:
        path: for messages.
        tensor, start: the buffer, and its values at the beginning of each micro-batch.
        leader: the buffer whose version counts the changes of this one, too.
        is_changing: whether it has changed on this rank, in any pass.
    """

    def __init__(self, path: str, held_by: dict[str, Tensor | None], name: str) -> None:
        self.path = path
        self._held_by = held_by
        self._name = name
        self.leader = self
        self.is_changing = False
        self._is_uncounted = False  # its version does not count all changes
        self.hold()

    def _read(self) -> Tensor:
        tensor = self._held_by.get(self._name)
        if tensor is None:
            _refuse_places(self.path)
        return tensor

    def hold(self) -> None:
        """Remember the present values."""
        self.tensor = self._read()
        self.start = self.tensor.detach().clone()
        self._version = read_version(self.tensor)

    def is_changed(self, *, compares: bool) -> bool:
        """Return whether it was written or replaced.

        The version of a tensor counts writes, but not those through `.data`.

        Args:
            compares: whether to compare the values, too.
        """
        if self._held_by.get(self._name) is not self.tensor or read_version(self.tensor) != self._version:
            return True
        if not (compares or self._is_uncounted) or torch.equal(self.tensor, self.start):
            return False
        self._is_uncounted = True
        return True

    def take(self) -> Tensor:
        """Return the value that a micro-batch gave it, in the type of the sum, and restore the value before.

        Raises:
            UsageError: its shape has changed, or it is gone.
        """
        start = self.start
        value = self._read().detach()
        if value.shape != start.shape:
            raise UsageError(
                f"buffer {self.path} changed its shape during a step, from {tuple(start.shape)} to "
                f"{tuple(value.shape)}: keep its shape, or register a cache with persistent=False",
                code="SS208",
            )
        widened = value.to(start.device, _widen(start), copy=True)
        self.restore()
        return widened

    def restore(self) -> None:
        """Restore the value of `hold`."""
        self.tensor.data.copy_(self.start)
        self._held_by[self._name] = self.tensor
        self._version = read_version(self.tensor)


class Buffers:
    """The persistent buffers of modules.

    Every micro-batch starts from the values at the beginning of the step. After the step, a buffer has the mean of the
    values that micro-batches gave it, summed along the canonical tree like a gradient. The mean of whole numbers is
    rounded, and a flag is set if a micro-batch has set it. Micro-batches that left a buffer as it was do not count.

    A buffer with `persistent=False` is no state: it stays as a forward pass has left it.

    Args:
        modules: by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module], group: Group) -> None:
        self._modules = {
            part: f"{name}.{path}" if path else name
            for name, module in modules.items()
            for path, part in module.named_modules()
        }
        self._held_by = [*map(get_buffers, self._modules)]  # the modules' own dicts, which change with them
        self._group = group
        self._num_passes = 0
        self._find_all()

    @property
    def num_buffers(self) -> int:
        """Number of the buffers, which have an entry each in the control block."""
        return len(self._buffers)

    def _list(self) -> list[tuple[nn.Module, str]]:
        return [
            (module, name)
            for module in self._modules
            if (buffers := get_buffers(module))
            for name, buffer in buffers.items()
            if buffer is not None and buffer.layout is torch.strided and name not in get_non_persistent(module)
        ]

    def _find_all(self) -> None:
        self._listed = self._list()
        self._tensors = [*chain.from_iterable(map(dict.values, self._held_by))]
        places = {id(get_buffers(module)[name]): (module, name) for module, name in reversed(self._listed)}
        buffers = {
            (module, name): _Buffer(f"{self._modules[module]}.{name}", get_buffers(module), name)
            for module, name in reversed(places.values())
        }
        for (module, name), buffer in buffers.items():
            # torch does not count its own writes to the statistics of BatchNorm, which change with their counter.
            if name in ("running_mean", "running_var"):
                buffer.leader = buffers.get((module, "num_batches_tracked"), buffer)
        self._buffers = [*buffers.values()]
        self._use([])

    def _has_other_places(self) -> bool:
        """Return whether a buffer was added or removed."""
        tensors = [*chain.from_iterable(map(dict.values, self._held_by))]
        if len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors)):
            return False
        self._tensors = tensors
        return self._list() != self._listed

    def _use(self, active: Sequence[int]) -> None:
        """Exchange these buffers: those that have changed in any pass, on any rank."""
        self._active = active
        buffers = [self._buffers[k] for k in active]
        self._plan = build_reduction_plan(
            [(buffer.path, torch.empty_like(buffer.tensor, dtype=_widen(buffer.tensor))) for buffer in buffers],
            self._group,
            bucket_cap_bytes=None,
        )
        self._memory = LastMemory(self._plan, self._group)

    def begin(self, layout: Layout) -> None:
        """Begin a pass: each of its micro-batches starts from the present values."""
        self.hold()
        if not self._buffers:
            return
        self._num_passes += 1
        self._layout = layout
        self._parts = RankParts(self._plan, layout, self._group.rank)
        self._last: Grads = [None] * len(self._buffers)  # the values of the last micro-batch
        self._counts = [0] * len(self._buffers)

    def hold(self) -> None:
        """Remember the present values, which the script may have changed."""
        if self._has_other_places():
            self._find_all()
        if not self._buffers:
            return
        for k in self._find_changes():
            self._buffers[k].is_changing = True
        for buffer in self._buffers:
            if buffer.is_changing:
                buffer.hold()

    def undo(self) -> None:
        """Restore the values that `hold` has remembered."""
        for k in self._find_changes():
            self._buffers[k].restore()

    def _find_changes(self) -> list[int]:
        """Return the buffers that were written or replaced."""
        compares = self._num_passes <= PASSES_COMPARED
        changed = {buffer for buffer in self._buffers if buffer.is_changed(compares=compares)}
        return [k for k, buffer in enumerate(self._buffers) if buffer in changed or buffer.leader in changed]

    def fold(self, v: int) -> None:
        """End micro-batch v of this rank: note the values that it gave to buffers, and restore those before it.

        Raises:
            UsageError: it has removed a buffer, or changed a shape.
        """
        if not self._buffers:
            return
        values: Grads = [None] * len(self._buffers)
        for k in self._find_changes():
            values[k] = self._buffers[k].take()
            self._counts[k] += 1
        if v == self._layout.ranges[self._group.rank][-1]:
            self._last = values
        else:
            self._parts.fold(v, values)

    def pack(self) -> bytes:
        """Return this rank's entries: how many micro-batches have changed each buffer.

        Raises:
            UsageError: a micro-batch has added or removed a buffer.
        """
        if self._has_other_places():
            module, name = min({*self._list()} ^ {*self._listed}, key=lambda place: place[1])
            _refuse_places(f"{self._modules[module]}.{name}")
        return array("I", self._counts).tobytes() if self._buffers else b""

    def exchange(self, packed: Sequence[bytes]) -> list[tuple[int, Tensor]]:
        """Return the new values of the buffers that any micro-batch has changed, by number.

        Args:
            packed: the result of `pack` on each rank.

        Raises:
            RuntimeError: another rank is gone.
        """
        counts = np.frombuffer(b"".join(packed), np.uint32).reshape(len(packed), -1).sum(axis=0).tolist()
        changed = [k for k, count in enumerate(counts) if count]
        if not changed:
            return []
        if active := {*changed} - {*self._active}:
            self._use(sorted(active.union(self._active)))
        last = [self._last[k] for k in self._active]
        self._parts.select(self._active)
        control = Control(Vote())
        if self._layout.world_size == 1:
            sums = sum_alone(self._plan, self._parts, last, control)
        else:
            memory = self._memory.find(self._layout)
            sums = Exchange(self._plan, memory, self._group, self._parts).finish(last, control)
        totals = {
            self._active[i]: total
            for indices, of_bucket in sums.pieces
            for i, total in zip(indices, of_bucket, strict=True)
        }
        return [(k, _finish(totals[k], counts[k], self._buffers[k].start)) for k in changed]

    def finish(self, values: Sequence[tuple[int, Tensor]]) -> None:
        """Give buffers the new values."""
        with torch.no_grad():
            for k, value in values:
                self._buffers[k].tensor.copy_(value)

    def forget_memory(self) -> None:
        """Release the memory for exchanges, and the messages in it that have not arrived."""
        self._memory.forget()


def _refuse_places(path: str) -> NoReturn:
    raise UsageError(
        f"buffer {path} was added or removed inside the micro-batch loop: register it in the module's __init__, as a "
        "tensor, or with persistent=False if it is a cache",
        code="SS208",
    )


def _widen(tensor: Tensor) -> torch.dtype:
    """Return the type in which a buffer is summed, so that no sum overflows, and equal values keep theirs."""
    return torch.complex128 if tensor.is_complex() else torch.float64


def _finish(total: Tensor | None, count: int, like: Tensor) -> Tensor:
    """Return the new value of a buffer, from the sum over all ranks."""
    assert total is not None
    mean = total / count
    is_whole = not (like.is_floating_point() or like.is_complex() or like.dtype is torch.bool)
    return (mean.round() if is_whole else mean).to(like.dtype)
