"""What crosses a cut between two ranks: tensors of one stage for the next one, and their gradients."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from samestep.errors import InvalidType, PeerFailed, UsageError
from samestep.world.group import Group
from samestep.world.process_group import Transfer

MAX_UNDER_WAY = 2  # messages to one rank, so that a rank that is far ahead does not fill the memory
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


class Messages:
    """Sends tensors to the other ranks of this one's pipeline, and receives theirs, through host memory.

    Other ranks are named by their positions. If one is gone, methods that send or receive raise PeerFailed.

    Attributes:
        group: all ranks of all pipelines.
        position: of this rank in its pipeline. It stays when ranks die.
        waited_s: seconds in which this rank has waited for tensors.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.position = group.rank % group.ranks_per_replica
        self.waited_s = 0.0
        self.begin()

    def begin(self) -> None:
        """Begin anew: no rank knows what another one sends."""
        self._under_way: dict[int, deque[list[Transfer]]] = {}  # by the position of the rank that gets them
        # The dtypes of what crosses the cuts before and after this rank, by the shapes.
        self._received: dict[tuple[torch.Size, ...], list[int]] = {}
        self._sent: dict[tuple[torch.Size, ...], list[int]] = {}

    def _find_rank(self, position: int) -> int:
        return self.group.rank - self.position + position

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except PeerFailed:
            self._under_way.clear()  # what is under way keeps connections to the other ranks open
            raise

    def send(self, tensors: Sequence[Tensor], target: int) -> None:
        """Begin to send tensors, whose shapes and dtypes the other rank knows."""
        under_way = self._under_way.setdefault(target, deque())
        with self._noticing_loss():
            if len(under_way) == MAX_UNDER_WAY:
                self.group.wait_for(under_way.popleft())
            rank = self._find_rank(target)
            under_way.append([self.group.begin_send(each, rank) for each in tensors if each.numel()])

    def receive(self, outlines: Sequence[Tensor], source: int) -> list[Tensor]:
        """Return the next tensors from a rank, which are like these."""
        tensors = [torch.empty(each.shape, dtype=each.dtype) for each in outlines]
        began_s = time.monotonic()
        with self._noticing_loss():
            self.group.receive(tensors, self._find_rank(source))
        self.waited_s += time.monotonic() - began_s
        return [each.to(self.group.device) for each in tensors]

    def send_on(self, tensors: Sequence[Tensor], target: int) -> None:
        """Send the tensors that cross a cut. The next rank knows their shapes, and learns their dtypes.

        Raises:
            InvalidType: one cannot be sent.
            UsageError: they had other dtypes before.
        """
        dtypes = [_number(each) for each in tensors]
        shapes = tuple(each.shape for each in tensors)
        known = self._sent.setdefault(shapes, dtypes)
        if known is dtypes:
            self.send([torch.tensor(dtypes)], target)
        elif known != dtypes:
            raise UsageError(
                f"what crosses a cut has the dtypes {_name(dtypes)}, and had {_name(known)} in an earlier micro-batch "
                "of the same shape: let the dtypes depend on the shapes only",
                code="SS224",
            )
        self.send(tensors, target)

    def receive_on(self, outlines: Sequence[Tensor], source: int) -> list[Tensor]:
        """Return the tensors of `send_on`. Those that this rank has computed without values have other dtypes.

        Autocast does not change them there.
        """
        shapes = tuple(each.shape for each in outlines)
        if shapes not in self._received:
            (dtypes,) = self.receive([torch.empty(len(outlines), dtype=torch.int64)], source)
            self._received[shapes] = dtypes.tolist()
        pairs = zip(outlines, self._received[shapes], strict=True)
        return self.receive([torch.empty(each.shape, dtype=DTYPES[k], device="meta") for each, k in pairs], source)

    def send_if_any(self, tensor: Tensor | None, target: int) -> None:
        """Send a copy of a tensor that may be absent."""
        self.send([torch.tensor([tensor is not None])], target)
        if tensor is not None:
            self.send([tensor.clone()], target)

    def receive_if_any(self, outline: Tensor, source: int) -> Tensor | None:
        """Return the tensor of `send_if_any`."""
        (is_there,) = self.receive([torch.empty(1, dtype=torch.bool)], source)
        return self.receive([outline], source)[0] if is_there else None

    def finish(self) -> None:
        """Wait until all messages have been sent."""
        with self._noticing_loss():
            for under_way in self._under_way.values():
                while under_way:
                    self.group.wait_for(under_way.popleft())


def _number(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        raise InvalidType(
            f"a tensor of {tensor.layout} layout and {tensor.dtype} crosses a cut: cut the model where dense tensors "
            "of real numbers cross",
            code="SS224",
        )
    return DTYPES.index(tensor.dtype)


def _name(dtypes: Sequence[int]) -> str:
    return ", ".join(str(DTYPES[each]) for each in dtypes)
