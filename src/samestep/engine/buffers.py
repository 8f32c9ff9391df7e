"""The buffers of modules: after a step they have the same values as on a single device, at any number of ranks.

Every micro-batch starts from the buffers' values at the beginning of the step, b0.

BatchNorm's running statistics get the values that accumulation over the n micro-batches on one device gives. With
momentum m these are `b0 + sum_v (1 - m)^(n - 1 - v) * delta_v`, where `delta_v` is the change that micro-batch v alone
makes to b0. The sum is computed along the canonical tree, in float64. A micro-batch that runs a layer c times counts as
c updates; the formula is exact if c is the same for all micro-batches of the step.

All other buffers get the values that micro-batch 0 gives them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from samestep.errors import InvalidValue, UsageError
from samestep.plan.tree import Layout
from samestep.torch_internals import get_buffers, read_version

PASSES_COMPARED = 4  # first passes of a start, in which all buffers on the CPU are compared in full
SAMPLE = 512  # elements of a large buffer that are compared afterwards


def check_module(name: str, module: nn.Module) -> None:
    """Refuse modules whose results depend on the world size.

    Raises:
        Error: `module` holds a SyncBatchNorm.
    """
    for path, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise InvalidValue(
                f"{name}.{path} is a SyncBatchNorm, whose statistics depend on the number of ranks: use BatchNorm; "
                "it normalizes over one micro-batch, and its running statistics are those of a single device",
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


class BatchNormStatistics:
    """The running statistics of all tracking BatchNorm layers.

    Attributes:
        layers: the layers. Layers in eval mode count, because a micro-batch may change the mode.
        num_values: number of exchanged values per part: a weighted delta per statistic, a count per layer.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = {id(part): part for module in modules for part in module.modules() if isinstance(part, _BatchNorm)}
        self.layers = [part for part in found.values() if part.track_running_stats and part.running_mean is not None]
        by_kind: dict[tuple[torch.dtype, torch.device], list[_BatchNorm]] = {}
        for layer in self.layers:
            mean = cast(Tensor, layer.running_mean)
            by_kind.setdefault((mean.dtype, mean.device), []).append(layer)
        self._kinds = [_SameKind(layers) for layers in by_kind.values()]
        self.num_values = sum(kind.num_values for kind in self._kinds)

    def begin(self, layout: Layout, rank: int) -> None:
        """Begin a pass: the current values become b0."""
        for kind in self._kinds:
            kind.begin(layout, rank)

    def hold(self) -> None:
        """Remember the current values for `undo`."""
        for kind in self._kinds:
            kind.hold()

    def undo(self) -> None:
        """Restore the values that `hold` remembered."""
        for kind in self._kinds:
            kind.undo()

    def fold(self) -> None:
        """End a micro-batch: keep its changes, on the device, and restore b0."""
        for kind in self._kinds:
            kind.fold()

    def parts(self) -> NDArray[np.float64]:
        """Return this rank's parts [max_parts, num_values]: its weighted deltas, folded. One read-back per GPU."""
        return np.concatenate([kind.parts() for kind in self._kinds], axis=1) if self._kinds else np.zeros((0, 0))

    def finish(self, parts: Sequence[NDArray[np.float64]]) -> None:
        """Sum all ranks' parts along the tree, and update the statistics."""
        first = 0
        for kind in self._kinds:
            kind.finish([part[:, first : first + kind.num_values] for part in parts])
            first += kind.num_values


class _SameKind:
    """The statistics of layers with one dtype and device, as views of one flat tensor."""

    def __init__(self, layers: Sequence[_BatchNorm]) -> None:
        self.layers = layers
        buffers = [cast(Tensor, buffer) for layer in layers for buffer in (layer.running_mean, layer.running_var)]
        self.size = sum(buffer.numel() for buffer in buffers)
        self.num_values = self.size + len(layers)
        dtype = buffers[0].dtype
        device = buffers[0].device
        self._flat = torch.empty(self.size, dtype=dtype, device=device)
        self._counts = torch.empty(len(self.layers), dtype=torch.int64, device=device)
        # layer, name, its tensor, its view of the flat one
        self._homes: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        offset = 0
        for k, layer in enumerate(self.layers):
            for name in ("running_mean", "running_var"):
                buffer = cast(Tensor, get_buffers(layer)[name])
                self._homes.append((layer, name, buffer, self._flat[offset : offset + buffer.numel()]))
                offset += buffer.numel()
            count = cast(Tensor, layer.num_batches_tracked)
            self._homes.append((layer, "num_batches_tracked", count, self._counts[k]))
        self._move_in()
        self._start, self._start_counts = self._flat.to(torch.float64, copy=True), self._counts.clone()
        self._deltas: list[Tensor] = []  # per micro-batch of this rank [num_values]: of the statistics, of the counts
        self._scales: dict[tuple[int, int, tuple[int, ...], tuple[float | None, ...]], Tensor] = {}

    def begin(self, layout: Layout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        self._deltas = []
        self.hold()

    def _move_in(self) -> None:
        """Make all statistics views of the flat tensors. The layers keep their tensor objects.

        Called often, since a script or a layer's forward may have replaced a tensor.
        """
        for layer, name, buffer, view in self._homes:
            found = get_buffers(layer)[name]
            if found is not None and found.data_ptr() != view.data_ptr():
                view.copy_(found.detach().reshape(view.shape))
                buffer.data = view.view_as(buffer)
                get_buffers(layer)[name] = buffer

    def hold(self) -> None:
        self._move_in()
        self._start.copy_(self._flat)
        self._start_counts.copy_(self._counts)

    def undo(self) -> None:
        self._move_in()
        self._go_back()

    def _go_back(self) -> None:
        self._flat.copy_(self._start)
        self._counts.copy_(self._start_counts)

    def fold(self) -> None:
        self._move_in()
        self._deltas.append(torch.cat([torch.sub(self._flat, self._start), self._counts - self._start_counts]))
        self._go_back()

    def _scale(self, n: int, v: int, counts: tuple[int, ...]) -> Tensor:
        """Return the weight of micro-batch v's deltas [size], if each of n micro-batches makes `counts` updates."""
        key = (n, v, counts, tuple(layer.momentum for layer in self.layers))  # a script may change the momentum
        if key in self._scales:
            return self._scales[key]
        cumulative = any(layer.momentum is None for layer in self.layers)  # depends on the counts so far
        befores = self._start_counts.tolist() if cumulative else counts
        scale = torch.cat(
            [
                torch.full((2 * layer.num_features,), _weight(layer.momentum, before, count, n, v), dtype=torch.float64)
                for layer, before, count in zip(self.layers, befores, counts, strict=True)
            ]
        )
        if not cumulative:
            self._scales[key] = scale
        return scale

    def parts(self) -> NDArray[np.float64]:
        out = np.zeros((self._layout.max_parts, self.num_values))
        n = self._layout.num_micro_batches
        folded = list[Tensor]()
        rows = torch.stack(self._deltas).cpu() if len(self._deltas) > 1 else [delta.cpu() for delta in self._deltas]
        for v, row in zip(self._layout.ranges[self._rank], rows, strict=True):
            row[: self.size].mul_(self._scale(n, v, tuple(map(int, row[self.size :].tolist()))))
            for _ in range(self._layout.count_merges(self._rank, v)):
                row = folded.pop().add_(row)
            folded.append(row)
        for place, part in zip(out, folded, strict=False):
            place[:] = part.numpy()
        return out

    def finish(self, parts: Sequence[NDArray[np.float64]]) -> None:
        slots = np.concatenate(parts)
        for dst, src in self._layout.additions:
            slots[dst] += slots[src]
        total = torch.from_numpy(slots[self._layout.root]).to(self._flat.device)
        self._flat.copy_(self._start.add_(total[: self.size]))
        self._counts.copy_(self._start_counts + total[self.size :].long())


def _weight(momentum: float | None, before: int, count: int, n: int, v: int) -> float:
    if momentum is None:  # cumulative average: every update has the same weight
        return (before + count) / (before + count * n) if count else 0.0
    return float((1.0 - momentum) ** (count * (n - 1 - v)))


def _copy(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors. Large ones with the same bits, such as the attention masks of all layers, share one copy."""
    copies: list[Tensor] = []
    for tensor in tensors:
        is_large = tensor.layout is torch.strided and tensor.numel() > 8 * SAMPLE and not tensor.is_quantized
        same = (each for each in copies if is_large and _have_same_bits(each, tensor))
        copy = next(same, None)
        copies.append(tensor.clone() if copy is None else copy)
    return copies


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits. False for complex numbers of 128 bits."""
    kinds = [(each.layout, each.dtype, each.device, each.shape) for each in (one, other)]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.dtype.itemsize)
    return kinds[0] == kinds[1] and bits is not None and torch.equal(one.view(bits), other.view(bits))


class OtherBuffers:
    """All other buffers: each ends a step with the value that micro-batch 0 gives it.

    Attributes:
        changed: this rank ran micro-batch 0 of the current pass, which changed a buffer.
    """

    def __init__(self, modules: Mapping[str, nn.Module], statistics: BatchNormStatistics) -> None:
        self._handled = {id(buffer) for layer in statistics.layers for buffer in get_buffers(layer).values()}
        self._modules = {
            p: ".".join(filter(None, (n, path))) for n, m in modules.items() for path, p in m.named_modules()
        }
        self._dicts = [get_buffers(module) for module in self._modules]
        self._num_passes = 0
        self._find_all()

    def _find_all(self) -> None:
        self._known = self._list()
        self._places: list[tuple[dict[str, Tensor | None], str]] = []
        seen: set[int] = set()
        for buffers in self._dicts:
            for name, buffer in buffers.items():
                if buffer is not None and id(buffer) not in self._handled and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._places.append((buffers, name))
        self._tensors = [self._read(place) for place in self._places]
        self._start = _copy(self._tensors)
        self._versions = [read_version(tensor) for tensor in self._tensors]
        self._unseen = [False] * len(self._places)  # was changed without a change of its version
        self.changed = False

    def _list(self) -> list[list[tuple[str, bool]]]:
        return [[(name, buffer is None) for name, buffer in buffers.items()] for buffers in self._dicts]

    def _have_none(self) -> bool:
        """Return whether no module has or had a buffer. A shortcut for small models, whose steps are short."""
        return not self._places and not any(self._dicts) and not any(self._known)

    def _check_known(self) -> None:
        """Raise Error if a micro-batch added or removed a buffer: the modules of other ranks would differ."""
        if (found := self._list()) == self._known:
            return
        named = [
            {(path, *entry) for path, entries in zip(self._modules.values(), lists, strict=True) for entry in entries}
            for lists in (found, self._known)
        ]
        path, name, _ = min(named[0] ^ named[1])
        raise UsageError(
            f"buffer {path}.{name} was added or removed inside the micro-batch loop, on this rank only: register it in "
            "the module's __init__, as a tensor",
            code="SS208",
        )

    @staticmethod
    def _read(place: tuple[dict[str, Tensor | None], str]) -> Tensor:
        return cast(Tensor, place[0][place[1]])  # `_check_known` has found that none became None

    def begin(self) -> None:
        """Begin a pass: each of its micro-batches starts from the current values of the buffers."""
        self.changed = False
        if self._have_none():
            return
        if self._list() != self._known:  # changed by the script between two passes, on all ranks
            self._find_all()
        for k in self._find_changes():
            self._accept(k, self._read(self._places[k]))
        self._num_passes += 1

    def fold(self, v: int) -> None:
        """End micro-batch v: undo its changes; keep those of micro-batch 0 for `finish`."""
        if self._have_none():
            return
        self._check_known()
        changes = self._find_changes() if self._places else []
        if not changes:
            return
        if v == 0:
            self.changed = True
            self._first = {k: self._read(self._places[k]).clone() for k in changes}
        for k in changes:
            self._restore(k)

    def undo(self) -> None:
        """Undo the changes of a micro-batch of an evaluation."""
        for k in self._find_changes():
            self._restore(k)

    def copy_first(self) -> list[Tensor]:
        """Return copies of all buffers, to be broadcast from the rank of micro-batch 0, where they have its changes."""
        first = self._first if self.changed else {}
        return [first.get(k, tensor).clone() for k, tensor in enumerate(self._tensors)]

    def finish(self, buffers: Sequence[Tensor]) -> None:
        """Update the buffers to what that rank has broadcast."""
        with torch.no_grad():
            for tensor, value in zip(self._tensors, buffers, strict=True):
                tensor.copy_(value)

    def _find_changes(self) -> list[int]:
        """Return the places whose tensor was written or replaced.

        A tensor's version counts in-place writes, but not those through `.data`. To find these, values are compared on
        the CPU (on a GPU this would need a synchronization): all values in the first passes of a start, later only a
        sample of large buffers that never changed this way (attention masks).
        """
        changes = []
        for k, ((buffers, name), tensor) in enumerate(zip(self._places, self._tensors, strict=True)):
            if buffers[name] is not tensor or read_version(tensor) != self._versions[k]:
                changes.append(k)
            elif tensor.device.type == "cpu" and not self._is_equal(k, tensor, self._start[k]):
                self._unseen[k] = True
                changes.append(k)
        return changes

    def _is_equal(self, k: int, tensor: Tensor, start: Tensor) -> bool:
        if self._num_passes > PASSES_COMPARED and tensor.numel() > 8 * SAMPLE and not self._unseen[k]:
            if not tensor.is_contiguous():
                return torch.equal(tensor, start)
            stride = tensor.numel() // SAMPLE
            tensor = tensor.view(-1)[::stride]
            start = start.view(-1)[::stride]
        return torch.equal(tensor, start)

    def _accept(self, k: int, tensor: Tensor) -> None:
        self._tensors[k] = tensor
        self._start[k] = tensor.clone()
        self._versions[k] = read_version(tensor)

    def _restore(self, k: int) -> None:
        buffers, name = self._places[k]
        tensor = self._tensors[k]
        if tensor.shape != self._start[k].shape:
            raise UsageError(
                f"buffer {name} changed its shape during a step to {tuple(tensor.shape)}: keep its shape", code="SS208"
            )
        tensor.data.copy_(self._start[k])
        buffers[name] = tensor
        self._versions[k] = read_version(tensor)
