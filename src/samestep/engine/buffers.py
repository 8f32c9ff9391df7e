"""Modules' buffers: after a step they are what one device would have, whatever the number of ranks.

Every micro-batch starts from the buffers of the step's beginning, b0.

BatchNorm's running statistics end where single-device accumulation over the n micro-batches ends: with momentum
m, that is `b0 + sum_v (1 - m)^(n - 1 - v) * delta_v`, where `delta_v` is what micro-batch v alone makes of b0.
The sum runs along the canonical tree, in float64. (A micro-batch that runs a layer c times counts c updates; the
formula is exact when c is the same for all micro-batches of the step, as it is outside of exotic models.)

All other buffers end as micro-batch 0 leaves them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from samestep.errors import Error
from samestep.plan.tree import Layout, merges


def check_module(name: str, module: nn.Module) -> None:
    """Refuses what cannot be the same at every world size.

    Raises:
        Error: `module` holds a SyncBatchNorm.
    """
    for path, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise Error(
                f"{name}.{path} is a SyncBatchNorm, whose statistics depend on the number of ranks: use BatchNorm; "
                "its statistics are those of one micro-batch, and its running ones those of a single device"
            )


def spread_buffers(module: nn.Module) -> None:
    """Gives buffers that `expand` has made, several elements in one place, memory of their own, to be written to."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.layout is torch.strided and 0 in buffer.stride():
                part._buffers[name] = buffer.contiguous()


def refuse_lone_sample(modules: Mapping[str, nn.Module], step: int, v: int, rank: int) -> list[RemovableHandle]:
    """Lets BatchNorm layers refuse micro-batch v, which has one sample, by their own name. Returns the hooks.

    Raises:
        Error: (from a layer's forward) a layer in training would normalise a single value per channel.
    """

    def build_check(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def check(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            shape = inputs[0].shape
            if layer.training and inputs[0].numel() == shape[1]:
                raise Error(
                    f"micro-batch {v} of step {step} (rank {rank}) has one sample, and {path} cannot normalise one "
                    f"value per channel (shape {tuple(shape)}): choose a larger micro_batch_size that leaves no "
                    "remainder of 1, or drop_last=True",
                    rank=rank,
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
    """The running statistics of all tracking BatchNorm layers, moved into one flat tensor that they view."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = {id(part): part for module in modules for part in module.modules() if isinstance(part, _BatchNorm)}
        self.layers = [part for part in found.values() if part.track_running_stats and part.running_mean is not None]
        buffers = [
            buffer for layer in self.layers for buffer in (layer.running_mean, layer.running_var) if buffer is not None
        ]
        self.size = sum(buffer.numel() for buffer in buffers)
        # Even when all are in eval mode: a micro-batch may change that, on the ranks that have one.
        self.active = bool(self.layers)
        self._no_parts = np.zeros((0, 0))
        self._parts: list[Tensor] = []
        if not self.layers:
            return
        kinds = {(buffer.dtype, buffer.device) for buffer in buffers}
        if len(kinds) > 1:
            raise Error(f"the models' BatchNorm layers are of {len(kinds)} kinds ({kinds}): use one dtype and device")
        dtype, device = kinds.pop()
        self._flat = torch.empty(self.size, dtype=dtype, device=device)
        self._counts = torch.empty(len(self.layers), dtype=torch.int64, device=device)
        self._homes: list[tuple[nn.Module, str, Tensor, Tensor]] = []  # layer, name, its tensor, where that lives
        offset = 0
        for k, layer in enumerate(self.layers):
            for name in ("running_mean", "running_var"):
                buffer = cast(Tensor, layer._buffers[name])
                self._homes.append((layer, name, buffer, self._flat[offset : offset + buffer.numel()]))
                offset += buffer.numel()
            count = cast(Tensor, layer.num_batches_tracked)
            self._homes.append((layer, "num_batches_tracked", count, self._counts[k]))
        self._move_in()
        self._start, self._start_counts = self._flat.to(torch.float64, copy=True), self._counts.clone()
        self._scales: dict[tuple[int, int, tuple[int, ...], tuple[float | None, ...]], Tensor] = {}

    def begin(self, layout: Layout) -> None:
        """A pass begins: remembers b0."""
        self._layout = layout
        self._parts = []
        self.hold()

    def _move_in(self) -> None:
        """Lets all of them live in the flat tensors, still the same objects.

        Again and again: a script, or a layer's own forward, may have put another tensor in one's place.
        """
        for layer, name, buffer, view in self._homes:
            found = layer._buffers[name]
            if found is not None and found.data_ptr() != view.data_ptr():
                view.copy_(found.detach().reshape(view.shape))
                buffer.data = view.view_as(buffer)
                layer._buffers[name] = buffer

    def hold(self) -> None:
        """What they are now is what `undo` goes back to."""
        if self.active:
            self._move_in()
            self._start.copy_(self._flat)
            self._start_counts.copy_(self._counts)

    def undo(self) -> None:
        """A micro-batch of an evaluation is done: what it changed is undone."""
        if self.active:
            self._move_in()
            self._go_back()

    def _go_back(self) -> None:
        self._flat.copy_(self._start)
        self._counts.copy_(self._start_counts)

    def fold(self, first: int, v: int) -> None:
        """Micro-batch v of a range that starts at `first` is done: takes its weighted delta, goes back to b0."""
        if not self.active:
            return
        self._move_in()
        n = self._layout.num_micro_batches
        counts = self._counts - self._start_counts
        delta = torch.sub(self._flat, self._start).mul_(self._scale(n, v, tuple(counts.tolist())))
        part = torch.cat([delta, counts.double()])
        for _ in merges(n, first, v):
            part = self._parts.pop().add_(part)
        self._parts.append(part)
        self._go_back()

    def _scale(self, n: int, v: int, counts: tuple[int, ...]) -> Tensor:
        """What micro-batch v's deltas count in the end [size], if each of n micro-batches makes `counts` updates."""
        key = (n, v, counts, tuple(layer.momentum for layer in self.layers))  # a script may change the momentum
        if key in self._scales:
            return self._scales[key]
        befores = self._start_counts.tolist()
        scale = torch.cat(
            [
                torch.full((2 * layer.num_features,), _weight(layer.momentum, before, count, n, v), dtype=torch.float64)
                for layer, before, count in zip(self.layers, befores, counts, strict=True)
            ]
        ).to(self._flat.device)
        if all(layer.momentum is not None for layer in self.layers):  # else it depends on the counts so far
            self._scales[key] = scale
        return scale

    @property
    def num_values(self) -> int:
        """Values that travel per part: a weighted delta per statistic, a count per layer."""
        return self.size + len(self.layers)

    def parts(self) -> NDArray[np.float64]:
        """This rank's parts [max_parts, num_values], to be told to all ranks."""
        if not self.active:
            return self._no_parts
        out = np.zeros((self._layout.max_parts, self.num_values))
        for row, part in zip(out, self._parts, strict=False):
            row[:] = part.cpu().numpy()
        return out

    def finish(self, parts: Sequence[NDArray[np.float64]]) -> None:
        """Takes all ranks' parts, adds them up along the tree and moves the statistics on."""
        if not self.active:
            return
        slots = np.concatenate(parts)
        for dst, src in self._layout.additions:
            slots[dst] += slots[src]
        total = torch.from_numpy(slots[self._layout.root]).to(self._flat.device)
        self._flat.copy_(self._start.add_(total[: self.size]))
        self._counts.copy_(self._start_counts + total[self.size :].long())


def _weight(momentum: float | None, before: int, count: int, n: int, v: int) -> float:
    if momentum is None:  # cumulative average: every update counts the same
        return (before + count) / (before + count * n) if count else 0.0
    return float((1.0 - momentum) ** (count * (n - 1 - v)))


class OtherBuffers:
    """Every buffer that is not a running statistic: kept as micro-batch 0 of a step leaves it."""

    def __init__(self, modules: Mapping[str, nn.Module], statistics: BatchNormStatistics) -> None:
        self._handled = {id(buffer) for layer in statistics.layers for buffer in layer._buffers.values()}
        self._modules = {
            p: ".".join(filter(None, (n, path))) for n, m in modules.items() for path, p in m.named_modules()
        }
        self._dicts = [module._buffers for module in self._modules]
        self._find_all()

    def _find_all(self) -> None:
        self._known = self._list()
        self._places: list[tuple[nn.Module, str]] = []
        seen: set[int] = set()
        for part in self._modules:
            for name, buffer in part._buffers.items():
                if buffer is not None and id(buffer) not in self._handled and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._places.append((part, name))
        self._tensors = [self._read(place) for place in self._places]
        self._start = [tensor.clone() for tensor in self._tensors]
        self._versions = [tensor._version for tensor in self._tensors]
        self.changed = False

    def _list(self) -> list[tuple[str, str, bool]]:
        return [(path, name, b is None) for part, path in self._modules.items() for name, b in part._buffers.items()]

    def _have_none(self) -> bool:
        """Whether no module has, or had, any: most small models, whose steps are quick."""
        return not self._known and not any(self._dicts)

    def _check_known(self) -> None:
        """Raises Error where a micro-batch has given a module a buffer, or taken one: other ranks' modules differ."""
        if (found := self._list()) != self._known:
            path, name, _ = min({*found} ^ {*self._known})
            raise Error(
                f"buffer {path}.{name} came or went inside the micro-batch loop, on this rank alone: register it in "
                "the module's __init__, as a tensor"
            )

    @staticmethod
    def _read(place: tuple[nn.Module, str]) -> Tensor:
        return cast(Tensor, place[0]._buffers[place[1]])  # `_check_known` has found that none became None

    def begin(self) -> None:
        """A pass begins: what the buffers hold now is where each of its micro-batches starts."""
        self.changed = False
        if self._have_none():
            return
        if self._list() != self._known:  # changed by the script between two passes, alike on all ranks
            self._find_all()
        for k in self._find_changes():
            self._accept(k, self._read(self._places[k]))

    def fold(self, v: int) -> None:
        """Micro-batch v is done: what it changed is kept for later when v is 0, and undone."""
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
        """A micro-batch of an evaluation is done: what it changed is undone."""
        for k in self._find_changes():
            self._restore(k)

    def finish(self) -> list[Tensor]:
        """On the rank of micro-batch 0, when it changed something: the buffers move on. All buffers, to broadcast."""
        if self.changed:
            with torch.no_grad():
                for k, value in self._first.items():
                    self._tensors[k].copy_(value)
        return self._tensors

    def _find_changes(self) -> list[int]:
        """Places whose tensor was written or replaced.

        A version counter sees in-place writes at no cost. Those through `.data` it does not see, and then the values
        are compared, except on a GPU, which the host would have to wait for.
        """
        return [
            k
            for k, ((part, name), tensor) in enumerate(zip(self._places, self._tensors, strict=True))
            if part._buffers[name] is not tensor
            or tensor._version != self._versions[k]
            or (tensor.device.type == "cpu" and not torch.equal(tensor, self._start[k]))
        ]

    def _accept(self, k: int, tensor: Tensor) -> None:
        self._tensors[k], self._start[k] = tensor, tensor.clone()
        self._versions[k] = tensor._version

    def _restore(self, k: int) -> None:
        part, name = self._places[k]
        tensor = self._tensors[k]
        if tensor.shape != self._start[k].shape:
            raise Error(f"buffer {name} changed its shape during a step: {tuple(tensor.shape)}")
        tensor.data.copy_(self._start[k])
        part._buffers[name] = tensor
        self._versions[k] = tensor._version
