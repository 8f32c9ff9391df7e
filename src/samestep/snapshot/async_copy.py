"""A state that is to be saved, and the copy of its tensors in host memory, made and checked while training continues.

Parameters and the optimizer's state change only in an update. Their copy may run during the next forward and backward
pass, and must be complete before the next update. All other tensors are copied at once.
"""

import cmath
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.errors import InvalidValue
from samestep.processes import at_rest
from samestep.snapshot.serialization import is_dense
from samestep.torch_internals import read_version
from samestep.watch.replica_checksums import checksum

LARGE_BYTES = 1 << 18  # smaller tensors are copied at once, which takes no longer than detecting writes to them
_CHUNK = 1 << 17  # elements, so that `look` finds them in the cache: 0.11 s for 500 MB instead of 0.18 s
_GPU_CHUNK = 1 << 24
_NUM_SAMPLED = 32
_MASK = 2**64 - 1  # checksums of slices add up modulo 2**64, as those of elements do


Place = tuple[int, torch.Size, tuple[int, ...]]  # address, shape, strides


@dataclass(frozen=True)
class Share:
    """What a rank stores of a state that the ranks divide.

    Attributes:
        is_mine: as in `encode`.
        number: of this rank's part.
        num_parts: of all ranks together. If a rank dies before all are written, they are no snapshot.
    """

    is_mine: Callable[[Tensor], bool] | None = None
    number: int = 0
    num_parts: int = 1


WHOLE = Share()


@dataclass(frozen=True)
class TrainingState:
    """The content of a snapshot. The tensors are those of the models and optimizers, not copies.

    Attributes:
        contents: the whole state, for `encode`.
        notes: further entries of the manifest's `meta`, see `RunDirectory.mark`.
        checked: tensors that must be finite, with names for messages.
        stable: tensors that change only in an update, so that they can be copied during the next step.
        replicated: parameters to compare over the ranks, by name; none if no comparison is due.
        compare: compares the checksums of these tensors over the ranks, and raises Error if they differ. All ranks call
            it, also one that has no parameters. None: no comparison is due.
        same: tensors that are the same on all ranks.
        share: what this rank stores, if the ranks divide the state. `contents` then has the tensors of this share.
    """

    contents: Mapping[str, Any]
    notes: Mapping[str, Any]
    checked: Sequence[tuple[str, Tensor]]
    stable: Sequence[Tensor]
    replicated: Sequence[tuple[str, Tensor]]
    compare: Callable[[Mapping[str, int]], None] | None
    same: Sequence[Tensor] = ()
    share: Share = WHOLE


@dataclass(frozen=True)
class SnapshotOrder:
    """Snapshots of one step to be written.

    Attributes:
        names: names of the snapshots; None for a numbered one.
        structure, tensors: the encoded state; once it is copied, the copies of its tensors.
        meta: see `RunDirectory.mark`.
        is_last: whether the loop ends here.
        drafts: the directories in which they are written, see `Store.begin`. Empty on ranks that do not write.
        share: which part of the state this rank writes.
    """

    step: int
    names: Sequence[str | None] = ()
    structure: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    is_last: bool = False
    drafts: Sequence[str] = ()
    share: Share = WHOLE


class WriteDetector:
    """Finds out which of some tensors were written to after its creation.

    Version counters miss writes through `.data`. Comparing a sample of the bytes finds those, unless only a few bytes
    change. A sample stays on its tensor's device, so only `find_changed` waits for a GPU.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._seen = [(tensor, read_version(tensor), _sample(tensor).clone()) for tensor in tensors]

    def find_changed(self) -> list[Tensor]:
        """Return the tensors that have changed."""
        if not self._seen:
            return []
        differences = [(_sample(tensor) != sampled).any() for tensor, _, sampled in self._seen]
        together = torch.stack([each.to(differences[0].device) for each in differences])  # for one transfer to the host
        return [
            tensor
            for (tensor, version, _), differs in zip(self._seen, together.tolist(), strict=True)
            if differs or read_version(tensor) != version
        ]


class Staging:
    """Host memory for the copies, allocated once for all snapshots."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a tensor in host memory for each of `tensors`, with the same dtype, shape and (if dense) strides."""
        kept = self._buffers
        self._buffers = {}
        for name, tensor in tensors.items():
            key = name, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_cuda
            if key in kept:
                self._buffers[key] = kept[key]
            else:  # pinned: otherwise copies from a GPU would be synchronous
                self._buffers[key] = torch.empty_like(
                    tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda
                )
        return {name: buffer for (name, *_), buffer in self._buffers.items()}


class _Slice(NamedTuple):
    """A tensor, or a slice of one.

    Attributes:
        place: that of the tensor.
        target: where its copy goes; None if it is not copied.
    """

    place: Place
    source: Tensor
    target: Tensor | None


class Copy:
    """The copy of a state's tensors. The constructor copies small and unstable ones; `run` copies the others.

    Args:
        tensors: by name.
        targets: host memory by name. Tensors without one are not copied, only looked at.
        stable: the places (`locate`) of detectable tensors that change only in an update.
        inspection: looks at each tensor, and at those of its own that are not among them.

    Attributes:
        torn: the places of tensors that were written to before the copy was complete.
        has_failed: whether `run` raised an exception, so that the copy is incomplete.
        inspection: as the argument. The main thread asks for its result, or the thread of the copy if that ends before.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        *,
        stable: Collection[Place],
        inspection: "Inspection",
    ) -> None:
        self.torn: list[Place] = []
        self.has_failed = self._is_joined = False
        self.inspection = inspection
        self._copied = threading.Event()
        wholes = [_Slice(locate(tensor), tensor.detach(), targets.get(name)) for name, tensor in tensors.items()]
        places = {each.place for each in wholes}
        wholes += [_Slice(at, each.detach(), None) for at, each in inspection.tensors.items() if at not in places]
        devices = {each.source.device for each in wholes if each.source.is_cuda}
        self._streams = {device: _open_stream(device) for device in devices}
        self._later: list[_Slice] = []
        at_once: dict[Any, list[_Slice]] = {}  # by device
        for whole in wholes:
            slices = self._later if whole.place in stable else at_once.setdefault(whole.source.device, [])
            slices.append(whole)
        self._detector = WriteDetector(each.source for each in self._later)
        for slices in at_once.values():
            self._take(slices)

    def run(self) -> None:
        """Copy the remaining tensors. Call in a background thread."""
        try:
            for whole in self._later:
                for each in _split(whole):
                    with at_rest():
                        pass  # a waiting fork happens here
                    self._take([each])
        except BaseException:
            self.has_failed = True
            raise
        finally:
            self._copied.set()

    def join(self) -> None:
        """Wait for the copy and find torn tensors. Call before the next update, in the thread that makes it."""
        self._copied.wait()
        if not self._is_joined:
            self.torn = [locate(tensor) for tensor in self._detector.find_changed()]
            self._is_joined = True

    def _take(self, slices: Sequence[_Slice]) -> None:
        """Copy slices of one device, and look at the copies, since these are what is written."""
        stream = self._streams.get(slices[0].source.device)
        # In any thread, of which a new one begins on the first GPU. This selects the device, too.
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for each in slices:
                if each.target is not None:
                    each.target.copy_(each.source, non_blocking=True)
            if stream is not None:
                stream.synchronize()
            for each in slices:
                self.inspection.look(each.place, each.source if each.target is None else each.target)


def _open_stream(device: Any) -> Any:
    """Return a stream in which copies run beside the computation on a GPU, after what this thread has queued there."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _split(whole: _Slice) -> Iterator[_Slice]:
    """Divide a dense tensor into slices."""
    if whole.target is not None and whole.target.stride() != whole.source.stride():
        yield whole
        return
    source = _flatten(whole.source)
    target = None if whole.target is None else _flatten(whole.target)
    size = _GPU_CHUNK if whole.source.is_cuda else _CHUNK
    for start in range(0, source.numel(), size):
        elements = slice(start, start + size)
        yield _Slice(whole.place, source[elements], None if target is None else target[elements])


class Inspection:
    """Checks whether a state is finite and the same on all ranks. `look` may be called in another thread.

    Attributes:
        tensors: the tensors to look at, by their places (`locate`).
    """

    def __init__(self, state: TrainingState, step: int) -> None:
        self._step = step
        self._compare = state.compare
        self._labels = {locate(tensor): label for label, tensor in reversed(state.checked)}
        self._names = {locate(tensor): name for name, tensor in reversed(state.replicated)}
        self.tensors: Mapping[Place, Tensor] = {
            locate(tensor): tensor for _, tensor in [*state.checked, *state.replicated]
        }
        self._not_finite: set[str] = set()
        self._checksums: dict[str, int] = {}

    def look(self, place: Place, tensor: Tensor) -> None:
        """Look at a tensor or its copy, whole or in consecutive slices. `place`: that of the tensor itself."""
        label = self._labels.get(place)
        name = self._names.get(place)
        if label is not None and not is_finite(tensor):
            self._not_finite.add(label)
        if name is not None:
            self._checksums[name] = self._checksums.get(name, 0) + int(checksum(tensor))

    def look_again(self) -> None:
        """Look at all tensors again, after a copy that failed half-way: other ranks have looked at all of theirs."""
        self._not_finite = set()
        self._checksums = {}
        for place, tensor in self.tensors.items():
            self.look(place, tensor)

    def find_infinite(self) -> str:
        """Return the label of the first tensor of this rank that is not finite; "" if all are finite."""
        return next((label for label in reversed(self._labels.values()) if label in self._not_finite), "")

    def conclude(self, label: str) -> None:
        """Compare the ranks. All ranks call this, after looking at all tensors.

        Args:
            label: of a tensor that is not finite, from `find_infinite`.

        Raises:
            InvalidValue: a tensor is not finite, or not the same on all ranks.
        """
        if label:
            raise InvalidValue(
                f"{label} is not finite after step {self._step}: this state is not saved, and the previous snapshot "
                "is kept; check the learning rate, clipping and precision",
                code="SS206",
            )
        if self._compare is not None:
            self._compare(
                {
                    name: self._checksums[name] & _MASK
                    for name in reversed(self._names.values())
                    if name in self._checksums
                }
            )


def locate(tensor: Tensor) -> Place:
    """Return the place of a tensor. Views of one tensor are at its address, too."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite; True for types other than floating-point and complex."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    # A sum takes one pass. It is not finite if an element is not finite; otherwise it rarely overflows.
    return cmath.isfinite(tensor.detach().sum().item()) or bool(torch.isfinite(tensor).all())


def list_detectable(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that are large and dense, so that `WriteDetector` can detect writes to them."""
    large = [tensor for tensor in tensors if tensor.nbytes >= LARGE_BYTES]
    return [each for each in large if not (each.is_inference() or each.is_conj() or each.is_neg()) and is_dense(each)]


def _flatten(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _sample(tensor: Tensor) -> Tensor:
    """Return a view of some bytes of a large tensor, on its device."""
    start = tensor.storage_offset() * tensor.element_size()
    step = tensor.nbytes // _NUM_SAMPLED | 1
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return content.set_(tensor.untyped_storage(), start, (-(-tensor.nbytes // step),), (step,))
