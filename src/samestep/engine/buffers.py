"""The buffers of modules, which change in forward passes: after a step they are the same at any number of ranks."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from samestep.engine.control import Control, Vote
from samestep.engine.exchange import ReductionPlan
from samestep.engine.leaf import Grads, PartialSums
from samestep.errors import InvalidValue, UsageError
from samestep.plan.tree import Layout
from samestep.torch_internals import get_buffers, get_non_persistent, read_version
from samestep.world.group import Group

Place = tuple[str, str]  # the path of a module, and the name of its buffer

PASSES_COMPARED = 4  # first passes of a start, which find the buffers that are written through `.data`


def check_module(name: str, module: nn.Module) -> None:
    """Refuse modules whose results depend on the world size.

    Raises:
        Error: `module` holds a SyncBatchNorm.
    """
    for path, each in module.named_modules():
        if isinstance(each, nn.SyncBatchNorm):
            raise InvalidValue(
                f"{name}.{path} is a SyncBatchNorm, whose statistics depend on the number of ranks: use BatchNorm; "
                "it normalizes over one micro-batch, and a step averages its running statistics over all of them",
                code="SS601",
            )


def spread_buffers(module: nn.Module) -> None:
    """Replace buffers made by `expand`, whose elements share memory, by contiguous ones, which can be written."""
    for each in module.modules():
        for name, buffer in [*get_buffers(each).items()]:
            if buffer is not None and buffer.layout is torch.strided and 0 in buffer.stride():
                get_buffers(each)[name] = buffer.contiguous()


class _Buffer:
    """A buffer, at the first place where a module holds it, in a pass over a step's micro-batches.

    Args:
        held_by: the module's own dict, which changes with it.

    Attributes:
        path: for messages.
        tensor, start: the buffer, and its values at the beginning of each micro-batch.
        leader: the buffer whose version counts the changes of this one, too.
    """

    def __init__(self, path: str, held_by: dict[str, Tensor | None], name: str) -> None:
        self.path = path
        self._held_by = held_by
        self._name = name
        self.leader = self
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
        """Return whether it was written or replaced. One of another rank (on the meta device) never is.

        The version of a tensor counts writes, but not those through `.data`.

        Args:
            compares: whether to compare the values, too.
        """
        if self.tensor.is_meta:
            return False
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

    Attributes:
        followed: the buffers, which have an entry each in the control block.
        plan: how those that change are exchanged.
    """

    def __init__(self, modules: Mapping[str, nn.Module], group: Group) -> None:
        paths = {
            each: f"{name}.{path}" if path else name
            for name, module in modules.items()
            for path, each in module.named_modules()
        }
        # By path: the modules' own dicts and sets, which change with them.
        self._modules = {path: (get_buffers(each), get_non_persistent(each)) for each, path in paths.items()}
        self._group = group
        self._num_passes = 0
        self._follow(self._list())

    def _list(self) -> dict[Place, Tensor]:
        places: dict[Place, Tensor] = {}
        for path, (held_by, non_persistent) in self._modules.items():
            for name, buffer in held_by.items():
                if buffer is not None and buffer.layout is torch.strided and name not in non_persistent:
                    places[path, name] = buffer
        return places

    def _follow(self, places: Mapping[Place, Tensor]) -> None:
        """Follow the buffers at these places from now on."""
        self._places = {*places}
        found: dict[int, _Buffer] = {}
        for (path, name), tensor in places.items():
            if id(tensor) not in found:  # else it has several places
                found[id(tensor)] = _Buffer(f"{path}.{name}", self._modules[path][0], name)
        for (path, name), tensor in places.items():
            # torch does not count its own writes to the statistics of BatchNorm, which change with their counter.
            counter = places.get((path, "num_batches_tracked"))
            if counter is not None and name in ("running_mean", "running_var"):
                found[id(tensor)].leader = found[id(counter)]
        self.followed = [*found.values()]
        self._use([])

    def _use(self, active: Sequence[int]) -> None:
        """Exchange these buffers: those that have changed in any pass, on any rank."""
        self._active = active
        buffers = [self.followed[k] for k in active]
        widened = [(buffer.path, torch.empty_like(buffer.tensor, dtype=_widen(buffer.tensor))) for buffer in buffers]
        self.plan = ReductionPlan(widened, self._group)

    def begin(self, layout: Layout) -> None:
        """Begin a pass: each of its micro-batches starts from the present values."""
        self.hold()
        self._num_passes += 1
        self._layout = layout
        self._values: list[dict[int, Tensor]] = []  # per micro-batch of this rank, those that it gave to buffers

    def hold(self) -> None:
        """Remember the present values, which the script may have changed."""
        places = self._list()
        if places.keys() != self._places:
            self._follow(places)
        if not self.followed:
            return
        for k in {*self._find_changes(), *self._active}:
            self.followed[k].hold()

    def undo(self) -> None:
        """Restore the values that `hold` has remembered."""
        for k in self._find_changes():
            self.followed[k].restore()

    def _find_changes(self) -> list[int]:
        """Return the buffers that were written or replaced."""
        compares = self._num_passes <= PASSES_COMPARED
        changed = {buffer for buffer in self.followed if buffer.is_changed(compares=compares)}
        return [k for k, buffer in enumerate(self.followed) if buffer in changed or buffer.leader in changed]

    def take(self) -> None:
        """End the next micro-batch of this rank: note the values that it gave to buffers, and restore those before it.

        Raises:
            UsageError: it has removed a buffer, or changed a shape.
        """
        self._values.append({k: self.followed[k].take() for k in self._find_changes()})

    def pack(self) -> bytes:
        """Return this rank's entries: how many micro-batches have changed each buffer.

        Raises:
            UsageError: a micro-batch has added or removed a buffer.
        """
        for path, name in sorted(self._list().keys() ^ self._places):
            _refuse_places(f"{path}.{name}")
        if not any(self._values):
            return bytes(4 * len(self.followed))  # zeros, as uint32
        changed = np.fromiter(chain.from_iterable(self._values), np.int64)
        return np.bincount(changed, minlength=len(self.followed)).astype(np.uint32).tobytes()

    def exchange(self, packed: Sequence[bytes]) -> list[tuple[int, Tensor]]:
        """Return the new values of the buffers that any micro-batch has changed, by number.

        Args:
            packed: the result of `pack` on each rank.

        Raises:
            PeerFailed: another rank is gone.
        """
        counts = np.frombuffer(b"".join(packed), np.uint32).reshape(len(packed), -1).sum(axis=0).tolist()
        changed = [k for k, count in enumerate(counts) if count]
        if not changed:
            return []
        if active := {*changed} - {*self._active}:
            self._use(sorted(active.union(self._active)))
        rows: list[Grads] = [[values.get(k) for k in self._active] for values in self._values]
        partial_sums = PartialSums(self._layout, self._group.replica)
        for v, row in zip(partial_sums.held[:-1], rows, strict=False):
            partial_sums.fold(v, row)
        if self._layout.world_size == 1:
            sums = partial_sums.complete(rows[-1])
        else:
            exchange = self.plan.begin_exchange(partial_sums)
            for i in self.plan.bucket_of if rows else ():
                exchange.pack(i, rows[-1][i])
            _, sums = exchange.finish(Control(Vote()))
        totals = {k: total for k, total in zip(self._active, sums, strict=True) if total is not None}
        return [(k, _finish(totals[k], counts[k], self.followed[k].start)) for k in changed if k in totals]

    def finish(self, values: Sequence[tuple[int, Tensor]]) -> None:
        """Give buffers the new values."""
        with torch.no_grad():
            for k, value in values:
                self.followed[k].tensor.copy_(value)


def _refuse_places(path: str) -> NoReturn:
    raise UsageError(
        f"buffer {path} was added or removed inside the micro-batch loop: register it in the module's __init__, as a "
        "tensor, or with persistent=False if it is a cache",
        code="SS208",
    )


def _widen(tensor: Tensor) -> torch.dtype:
    """Return the type in which a buffer is summed, so that no sum overflows, and equal values keep theirs."""
    return torch.complex128 if tensor.is_complex() else torch.float64


def _finish(total: Tensor, count: int, like: Tensor) -> Tensor:
    """Return the new value of a buffer, from the sum over all ranks."""
    mean = total / count
    is_whole = not (like.is_floating_point() or like.is_complex() or like.dtype is torch.bool)
    return (mean.round() if is_whole else mean).to(like.dtype)
