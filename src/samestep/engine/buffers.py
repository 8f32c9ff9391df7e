"""The buffers of modules, which change in forward passes: after a step they are the same at any number of ranks."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from samestep.engine.control import Control, Vote
from samestep.engine.exchange import ReductionPlan
from samestep.engine.leaf import Grads, PartialSums
from samestep.errors import InvalidValue, UsageError
from samestep.plan.tree import Layout
from samestep.torch_internals import copy_all, divide_all, get_buffers, get_non_persistent, read_version, round_all
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


class _Buffer(NamedTuple):
    """A buffer, at the first place where a module holds it.

    Attributes:
        path: for messages.
        held_by: the module's own dict, which changes with it.
    """

    path: str
    held_by: dict[str, Tensor | None]
    name: str

    def read(self) -> Tensor:
        tensor = self.held_by.get(self.name)
        if tensor is None:
            _refuse_places(self.path)
        return tensor


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
        numbers: dict[int, int] = {}  # the identity of a tensor, which may have several places -> its number
        self.followed = []
        for (path, name), tensor in places.items():
            if id(tensor) not in numbers:
                numbers[id(tensor)] = len(numbers)
                self.followed.append(_Buffer(f"{path}.{name}", self._modules[path][0], name))
        # Per buffer: the one whose version counts the changes of this one, too. torch does not count its own writes to
        # the statistics of BatchNorm, which change with their counter.
        self._leaders = [*range(len(numbers))]
        for (path, name), tensor in places.items():
            counter = places.get((path, "num_batches_tracked"))
            if counter is not None and name in ("running_mean", "running_var"):
                self._leaders[numbers[id(tensor)]] = numbers[id(counter)]
        self._uncounted = set[int]()  # those whose versions do not count all changes
        # Per buffer: the tensor, its values at the beginning of each micro-batch, and its version when it had them.
        self._tensors = [each.read() for each in self.followed]
        self._starts = [tensor.detach().clone() for tensor in self._tensors]
        self._versions = [*map(read_version, self._tensors)]
        self._use([])

    def _use(self, active: Sequence[int]) -> None:
        """Exchange these buffers: those that have changed in any pass, on any rank."""
        self._active = active
        widened = [(self.followed[k].path, _allocate_sum(self._starts[k])) for k in active]
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
        held = [k for k in {*self._find_changes(), *self._active} if not self._tensors[k].is_meta]
        for k in held:
            tensor = self._tensors[k] = self.followed[k].read()
            if _find_kind(tensor) != _find_kind(self._starts[k]):
                self._starts[k] = torch.empty_like(tensor)
        _copy([self._starts[k] for k in held], [self._tensors[k] for k in held])
        self._versions = [*map(read_version, self._tensors)]

    def undo(self) -> None:
        """Restore the values that `hold` has remembered."""
        self._restore(self._find_changes())

    def _restore(self, changed: Sequence[int]) -> None:
        if not changed:
            return
        _copy([self._tensors[k] for k in changed], [self._starts[k] for k in changed])
        for k in changed:
            self.followed[k].held_by[self.followed[k].name] = self._tensors[k]
        self._versions = [*map(read_version, self._tensors)]

    def _find_changes(self) -> list[int]:
        """Return the buffers that were written or replaced. One of another rank, on the meta device, never is."""
        present = [held_by.get(name) for _, held_by, name in self.followed]
        versions = [*map(read_version, self._tensors)]
        changed = {
            k
            for k, tensor in enumerate(self._tensors)
            if (present[k] is not tensor or versions[k] != self._versions[k]) and not tensor.is_meta
        }
        # The version of a tensor counts writes, but not those through `.data`.
        compared = {*range(len(versions))} if self._num_passes <= PASSES_COMPARED else self._uncounted
        for k in compared - changed:
            if not (self._tensors[k].is_meta or torch.equal(self._tensors[k], self._starts[k])):
                self._uncounted.add(k)
                changed.add(k)
        return [k for k, leader in enumerate(self._leaders) if k in changed or leader in changed]

    def take(self) -> None:
        """End the next micro-batch of this rank: note the values that it gave to buffers, and restore those before it.

        Raises:
            UsageError: it has removed a buffer, or changed a shape.
        """
        changed = self._find_changes()
        values = [self.followed[k].read() for k in changed]
        for k, value in zip(changed, values, strict=True):
            if value.shape != self._starts[k].shape:
                raise UsageError(
                    f"buffer {self.followed[k].path} changed its shape during a step, from "
                    f"{tuple(self._starts[k].shape)} to {tuple(value.shape)}: keep its shape, or register a cache with "
                    "persistent=False",
                    code="SS208",
                )
        widened = [_allocate_sum(self._starts[k]) for k in changed]
        _copy(widened, values)
        self._restore(changed)
        self._values.append(dict(zip(changed, widened, strict=True)))

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

    def exchange(self, packed: Sequence[bytes]) -> dict[int, Tensor]:
        """Return the new values of the buffers that any micro-batch has changed, by number.

        Args:
            packed: the result of `pack` on each rank.

        Raises:
            PeerFailed: another rank is gone.
        """
        counts = np.frombuffer(b"".join(packed), np.uint32).reshape(len(packed), -1).sum(axis=0).tolist()
        changed = [k for k, count in enumerate(counts) if count]
        if not changed:
            return {}
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
        means = {k: total for k, total in zip(self._active, sums, strict=True) if total is not None and counts[k]}
        if sums_of_several := {k: total for k, total in means.items() if counts[k] > 1}:
            divide_all([*sums_of_several.values()], [counts[k] for k in sums_of_several])
        if whole := [mean for k, mean in means.items() if _is_whole(self._starts[k])]:
            round_all(whole)
        return means

    def finish(self, values: Mapping[int, Tensor]) -> None:
        """Give buffers the new values."""
        with torch.no_grad():
            copy_all([self._tensors[k] for k in values], [*values.values()])


def _refuse_places(path: str) -> NoReturn:
    raise UsageError(
        f"buffer {path} was added or removed inside the micro-batch loop: register it in the module's __init__, as a "
        "tensor, or with persistent=False if it is a cache",
        code="SS208",
    )


def _allocate_sum(like: Tensor) -> Tensor:
    """Allocate a tensor for sums of a buffer. In its type, no sum overflows, and the mean of equal values is exact."""
    return torch.empty_like(like, dtype=torch.complex128 if like.is_complex() else torch.float64)


def _find_kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy values, which the versions of the targets do not count."""
    if targets:
        copy_all([target.data for target in targets], [source.data for source in sources])


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
