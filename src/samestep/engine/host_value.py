"""Numbers that the host reads from a GPU without waiting for what the GPU has to do after them."""

from typing import Any

import torch
from torch import Tensor


class HostValue:
    """The value that a tensor with one element has now. For a tensor on a GPU, the copy to the host is only queued.

    Reading it waits for what was queued before it. So a loss that is taken before its backward pass is read while the
    GPU computes that pass, and the host can queue the update meanwhile. `Tensor.item` would wait for all of it.

    Example::

        >>> import torch
        >>> from samestep.engine.host_value import HostValue
        >>> loss = torch.tensor(0.5)
        >>> value = HostValue(loss)
        >>> float(value)
        0.5
    """

    def __init__(self, tensor: Tensor) -> None:
        self._value = tensor.detach()
        self._copied: Any = None
        if tensor.is_cuda:
            self._value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._value.copy_(tensor.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def __float__(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._value)
