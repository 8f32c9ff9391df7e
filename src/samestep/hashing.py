"""Hash functions: SHA-256 for content, and 64 bits of BLAKE2b for short identities; the bytes of tensors and batches.

Other modules call these functions, so that the length of a hash shows its kind. Exceptions are seeds, keys and proofs
(HMAC), and the checksum of gradients, for which BLAKE2b would be too slow.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def hash_bytes(data: bytes | memoryview) -> str:
    """Return the SHA-256 of some content: 64 hexadecimal digits. Where fewer suffice, callers keep the first ones.

    It identifies content in files and between machines, and resists deliberate collisions. Hashing of large data
    releases the GIL.

    Example::

        >>> hash_bytes(b"samestep")[:16]
        '05fb1479ed6c9f38'
    """
    return hashlib.sha256(data).hexdigest()


def hash_chunks(chunks: Iterable[bytes | memoryview]) -> str:
    """Return `hash_bytes` of consecutive chunks, of which only one is in memory at a time."""
    sha = hashlib.sha256()
    for chunk in chunks:
        sha.update(chunk)
    return sha.hexdigest()


def hash_short(data: bytes | memoryview) -> int:
    """Return 64 bits of BLAKE2b, for identities that are compared often or packed into few bytes. Takes about 1 us.

    Example::

        >>> hash_short(b"samestep") < 2**64
        True
    """
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def view_bytes(tensor: "Tensor") -> memoryview:
    """Return a tensor's elements in row-major order as bytes. Copies only if host memory has no such bytes."""
    import torch

    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = host.as_strided((host.numel(),), (1,))  # reshape(-1) keeps unusual strides of tensors with 0 or 1 elements
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def hash_content(batch: Any) -> str:
    """Return a hash of all tensors and numbers; "" without any. Strings are left out, because paths may differ."""
    digest = hash_chunks(_find_bytes(batch))
    return "" if digest == hash_chunks(()) else digest[:16]


def _find_bytes(batch: Any) -> Iterator[bytes | memoryview]:
    import numpy as np
    import torch

    for value in find_leaves(batch):
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            yield f"{value.dtype}{value.shape}".encode()
            yield value.tobytes()
        elif isinstance(value, torch.Tensor):
            dense = value.to_dense() if value.layout is not torch.strided else value
            yield f"{dense.dtype}{tuple(dense.shape)}".encode()
            yield view_bytes(dense)
        elif isinstance(value, bool | int | float | complex | np.number):
            yield repr(value).encode()


def find_leaves(value: Any) -> Iterator[Any]:
    """Yield the values in nested mappings, sequences and dataclasses."""
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, Mapping):
        value = [*value.values()]
    if not isinstance(value, list | tuple):
        yield value
        return
    for item in value:
        yield from find_leaves(item)
