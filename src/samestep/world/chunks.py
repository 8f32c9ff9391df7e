"""Divides tensors into chunks that are sent together."""

from collections.abc import Iterator, Sequence

from torch import Tensor


def split_chunks(tensors: Sequence[Tensor], chunk_bytes: int) -> Iterator[list[Tensor]]:
    """Yield the tensors in lists of at most `chunk_bytes`, or of one tensor. Empty ones are left out.

    Example::

        >>> import torch
        >>> [len(chunk) for chunk in split_chunks([torch.zeros(2), torch.zeros(2), torch.zeros(9), torch.zeros(0)], 16)]
        [2, 1]
    """
    chunk: list[Tensor] = []
    for tensor in tensors:
        if chunk and sum(each.nbytes for each in chunk) + tensor.nbytes > chunk_bytes:
            yield chunk
            chunk = []
        if tensor.numel():
            chunk.append(tensor)
    if chunk:
        yield chunk
