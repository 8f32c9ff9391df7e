"""The bytes of tensors."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def view_bytes(tensor: "Tensor") -> memoryview:
    """Return a tensor's elements in row-major order as bytes. Copies only if host memory has no such bytes."""
    import torch

    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = host.as_strided((host.numel(),), (1,))  # reshape(-1) keeps unusual strides of tensors with 0 or 1 elements
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
