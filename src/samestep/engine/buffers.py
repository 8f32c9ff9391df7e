"""The buffers of modules, which change in forward passes: after a step they are the same at any number of ranks."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from samestep.engine.control import Control, Vote
from samestep.engine.exchange import sum_parts
from samestep.engine.exchange_memory import LastMemory
from samestep.engine.folding import Grads, RankParts
from samestep.engine.reduction_plan import build_reduction_plan
from samestep.errors import InvalidValue, UsageError
from samestep.plan.tree import Layout
from samestep.torch_internals import get_buffers, get_non_persistent, read_version
from samestep.world.group import Group

PASSES_COMPARED = 4  # first passes of a start, which find the buffers that are written through `.data`
NONE = 2**32 - 1  # no micro-batch


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


class Buffers:
    """The persistent buffers of modules.

    Every micro-batch starts from the values at the beginning of the step. After the step, a buffer of floating-point
    numbers has the mean of the values that micro-batches gave it, summed along the canonical tree like a gradient. Any
    other buffer (a counter, a flag) has the value of the first micro-batch that changed it. Micro-batches that left a
    buffer as it was do not count.

    A buffer with `persistent=False` is no state: it stays as a forward pass has left it.

    Args:
        modules: by name.
        exact: whether to sum along the canonical tree.

    Attributes:
        num_buffers: number of the buffers, which have an entry each in the control block.
    """

    def __init__(self, modules: Mapping[str, nn.Module], group: Group, *, exact: bool) -> None:
        self._modules = {
            part: f"{name}.{path}" if path else name
            for name, module in modules.items()
            for path, part in module.named_modules()
        }
        self._held_by = [*map(get_buffers, self._modules)]  # the modules' own dicts, which change with them
        self._group = group
        self._exact = exact
        self._num_passes = 0
        self._find_all()

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
        self._all = [*chain.from_iterable(map(dict.values, self._held_by))]
        # Of a buffer that modules share, the first place.
        first_of = {id(get_buffers(module)[name]): (module, name) for module, name in reversed(self._listed)}
        places = [*first_of.values()][::-1]
        self.num_buffers = len(places)
        self._places = [(get_buffers(module), name) for module, name in places]
        self._paths = [f"{self._modules[module]}.{name}" for module, name in places]
        self._tensors = [self._read(k) for k in range(len(places))]
        self._starts = [tensor.detach().clone() for tensor in self._tensors]
        self._versions = [*map(read_version, self._tensors)]
        # torch does not count its own writes to the statistics of BatchNorm, which change with their counter.
        numbers = {place: k for k, place in enumerate(places)}
        self._leaders = [
            numbers.get((module, "num_batches_tracked"), k) if name in ("running_mean", "running_var") else k
            for k, (module, name) in enumerate(places)
        ]
        self._changed = set[int]()  # on this rank, in any pass
        self._uncounted = set[int]()  # of these, the ones whose version does not count the changes
        self._use([])

    @property
    def _is_untouched(self) -> bool:
        """Whether no buffer was written or replaced: a fast answer, which may also be False if none was."""
        now = [*chain.from_iterable(map(dict.values, self._held_by))]
        is_counted = not self._tensors or (self._num_passes > PASSES_COMPARED and not self._uncounted)
        is_same = len(now) == len(self._all) and all(map(is_, now, self._all))
        return is_same and is_counted and [*map(read_version, self._tensors)] == self._versions

    def _read(self, k: int) -> Tensor:
        buffers, name = self._places[k]
        tensor = buffers[name]
        assert tensor is not None  # else `fold` has raised an error
        return tensor

    def _use(self, active: Sequence[int]) -> None:
        """Exchange these buffers: those that have changed in any pass, on any rank."""
        self._active = active
        self._plan = build_reduction_plan(
            [(self._paths[k], _carry(self._tensors[k])) for k in active],
            self._group,
            exact=self._exact,
            bucket_cap_bytes=None,
        )
        self._memory = LastMemory(self._plan, self._group)

    def begin(self, layout: Layout) -> None:
        """Begin a pass: each of its micro-batches starts from the present values."""
        self.hold()
        if not self._tensors:
            return
        self._num_passes += 1
        self._layout = layout
        self._held = layout.ranges[self._group.rank]
        self._parts = RankParts(self._plan, layout, self._group.rank)
        self._last: Grads = [None] * len(self._tensors)  # the values of the last micro-batch
        self._counts = [0] * len(self._tensors)
        self._firsts: dict[int, tuple[int, Tensor]] = {}  # the first micro-batch that changed it, and its value

    def hold(self) -> None:
        """Remember the present values, which the script may have changed."""
        if self._is_untouched and not self._changed:
            return
        if self._list() != self._listed:
            self._find_all()
        self._changed.update(self._find_changes())
        for k in self._changed:
            self._tensors[k] = tensor = self._read(k)
            self._starts[k] = tensor.detach().clone()
            self._versions[k] = read_version(tensor)
        self._all = [*chain.from_iterable(map(dict.values, self._held_by))]

    def undo(self) -> None:
        """Restore the values that `hold` has remembered."""
        if not self._is_untouched:
            for k in self._find_changes():
                self._restore(k)

    def _find_changes(self) -> list[int]:
        """Return the buffers that were written or replaced.

        The version of a tensor counts writes, but not those through `.data`. The first passes compare values, too.
        """
        found = [
            buffers.get(name) is not tensor or read_version(tensor) != version
            for (buffers, name), tensor, version in zip(self._places, self._tensors, self._versions, strict=True)
        ]
        for k in self._uncounted if self._num_passes > PASSES_COMPARED else range(len(found)):
            if not found[k] and not torch.equal(self._tensors[k], self._starts[k]):
                self._uncounted.add(k)
                found[k] = True
        return [k for k, leader in enumerate(self._leaders) if found[k] or found[leader]]

    def _restore(self, k: int) -> None:
        buffers, name = self._places[k]
        tensor = self._tensors[k]
        tensor.data.copy_(self._starts[k])
        buffers[name] = tensor
        self._versions[k] = read_version(tensor)

    def fold(self, v: int) -> None:
        """End micro-batch v of this rank: note the values that it gave to buffers, and restore those before it.

        Raises:
            UsageError: it has added or removed a buffer, or changed a shape.
        """
        values: Grads = [None] * len(self._tensors)
        if not self._is_untouched:
            self._take_changes(v, values)
        if not self._tensors:
            return
        if v == self._held[-1]:
            self._last = values
        else:
            self._parts.fold(v, values)

    def _take_changes(self, v: int, values: Grads) -> None:
        """Fill in the values that micro-batch v gave to buffers, and restore those before it."""
        self._check_listed()
        for k in self._find_changes():
            start = self._starts[k]
            value = self._read(k).detach()
            if value.shape != start.shape:
                raise UsageError(
                    f"buffer {self._paths[k]} changed its shape during a step, from {tuple(start.shape)} to "
                    f"{tuple(value.shape)}: keep its shape, or register a cache with persistent=False",
                    code="SS208",
                )
            self._counts[k] += 1
            if _is_averaged(start):
                values[k] = value.to(start.device, _widen(start), copy=True)
            elif k not in self._firsts:
                self._firsts[k] = v, value.to(start, copy=True)
            self._restore(k)

    def _check_listed(self) -> None:
        if (listed := self._list()) != self._listed:
            module, name = min({*listed} ^ {*self._listed}, key=lambda place: place[1])
            raise UsageError(
                f"buffer {self._modules[module]}.{name} was added or removed inside the micro-batch loop: register it "
                "in the module's __init__, as a tensor, or with persistent=False if it is a cache",
                code="SS208",
            )

    def pack(self) -> bytes:
        """Return this rank's entries: how many micro-batches have changed each buffer, and the first that has."""
        firsts = [self._firsts[k][0] if k in self._firsts else NONE for k in range(len(self._tensors))]
        return array("I", [*self._counts, *firsts]).tobytes()

    def exchange(self, packed: Sequence[bytes]) -> list[tuple[int, Tensor]]:
        """Return the new values of the buffers that any micro-batch has changed, by number.

        Args:
            packed: the result of `pack` on each rank.

        Raises:
            RuntimeError: another rank is gone.
        """
        rows = np.frombuffer(b"".join(packed), np.uint32).reshape(len(packed), 2, self.num_buffers)
        counts = rows[:, 0].sum(axis=0).tolist()
        firsts = rows[:, 1].min(axis=0, initial=NONE).tolist()
        changed = [k for k, count in enumerate(counts) if count]
        if not changed:
            return []
        if active := {*changed} - {*self._active}:
            self._use(sorted(active.union(self._active)))
        last = [
            _to_bytes(self._firsts[k][1]) if k in self._firsts and self._firsts[k][0] == firsts[k] else self._last[k]
            for k in self._active
        ]
        self._parts.select(self._active)
        memory = self._memory.find(self._layout)
        sums = sum_parts(self._plan, self._parts, last, Control(Vote()), memory, self._group)
        totals = {
            self._active[i]: total
            for indices, of_bucket in sums.pieces
            for i, total in zip(indices, of_bucket, strict=True)
        }
        return [(k, _finish(totals[k], counts[k], self._starts[k])) for k in changed]

    def finish(self, values: Sequence[tuple[int, Tensor]]) -> None:
        """Give buffers the new values."""
        with torch.no_grad():
            for k, value in values:
                self._tensors[k].copy_(value)

    def forget_memory(self) -> None:
        """Release the memory for exchanges, and the messages in it that have not arrived."""
        self._memory.forget()


def _is_averaged(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.element_size() > 1  # float8 has no addition


def _widen(tensor: Tensor) -> torch.dtype:
    """Return the type in which an averaged buffer is summed, so that no sum overflows, and equal values keep theirs."""
    return torch.complex128 if tensor.is_complex() else torch.float64


def _carry(tensor: Tensor) -> Tensor:
    """Return a tensor like the one that is exchanged in place of a buffer: its bytes, unless it is averaged."""
    if _is_averaged(tensor):
        return torch.empty_like(tensor, dtype=_widen(tensor))
    return torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)


def _to_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _finish(total: Tensor | None, count: int, like: Tensor) -> Tensor:
    """Return the new value of a buffer, from the sum over all ranks. Of bytes, only one rank has sent any."""
    assert total is not None
    return (total / count).to(like.dtype) if _is_averaged(like) else total.clone().view(like.dtype).view(like.shape)
