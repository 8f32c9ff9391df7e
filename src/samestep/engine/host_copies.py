"""Values that the host reads from a GPU without waiting for what the GPU has to do after them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def copy_to_host(tensors: Iterable[Tensor]) -> Callable[[], list[Tensor]]:
    """Begin to copy tensors to the host. Returns a function that waits for the copies, and returns them.

    A tensor on the CPU is returned itself.
    """
    copies: list[Tensor] = []
    events: list[Any] = []
    for tensor in tensors:
        copies.append(tensor.to("cpu", non_blocking=True))
        if tensor.is_cuda:
            events.append(event := torch.cuda.Event())
            event.record(torch.cuda.current_stream(tensor.device))

    def wait() -> list[Tensor]:
        for event in events:
            event.synchronize()
        return copies

    return wait


class HostValue:
    """The value that a tensor with one element has now on a GPU, whose copy to the host is only queued.

    Reading it waits for what was queued before it. So a loss that is taken before its backward pass is read while the
    GPU computes that pass, and the host can queue the update meanwhile. `Tensor.item` would wait for all of it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._wait = copy_to_host([tensor])

    def __float__(self) -> float:
        return float(self._wait()[0])


def read_later(tensor: Tensor) -> float | HostValue:
    """Return the value that a tensor with one element has now: the script may write to it after the call.

    Example::

        >>> import torch
        >>> from samestep.engine.host_copies import read_later
        >>> read_later(torch.tensor(0.5))
        0.5
    """
    return tensor.item() if tensor.device.type == "cpu" else HostValue(tensor.detach())
