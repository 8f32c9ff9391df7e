"""The parts of a snapshot: what each rank holds of the state, in a file of its own. A whole state is one part.

A rank other than 0 describes its part in a small file beside it, the receipt, which rank 0 reads for the manifest.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from samestep.decoding import decode
from samestep.errors import InvalidValue
from samestep.files import open_regular, read_bytes, replace_file
from samestep.snapshot.manifest import Pieces
from samestep.snapshot.serialization import digest_of, list_tensors, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

BUFFER_BYTES = 1 << 20
_MAX_RECEIPT_BYTES = 1 << 30


class Part(Struct, array_like=True):
    """The content of the file of one rank.

    Attributes:
        pieces: of the file.
        tensors: shape and sha256 of each tensor, or of the rows that the rank holds, by name.
    """

    pieces: Pieces
    tensors: dict[str, tuple[list[int], str]]


def name_part(rank: int) -> str:
    """Return the name of a rank's file. Sorted by name, the files are in the order of the ranks."""
    return f"tensors-{rank:05d}.safetensors"


def _name_receipt(rank: int) -> str:
    return f".receipt-{rank:05d}"


def write_part(directory: Path, rank: int, tensors: "Mapping[str, Tensor]") -> Part:
    """Write the part of a rank, and its receipt.

    Raises:
        OSError: the disk is full or gone. The rank's file is removed.
    """
    file = directory / name_part(rank)
    try:
        with open(file, "xb", BUFFER_BYTES, opener=open_regular) as opened:
            pieces, hashes = write_tensors(opened, tensors)
        part = Part(pieces, {name: ([*tensor.shape], hashes[name]) for name, tensor in tensors.items()})
        if rank:
            replace_file(directory / _name_receipt(rank), json.dumps([part.pieces, part.tensors]).encode())
    except BaseException:
        with suppress(OSError):
            file.unlink()
        raise
    return part


def take_receipts(directory: Path, num_ranks: int) -> list[Part]:
    """Read and remove the receipts of the ranks other than 0, which have written their parts. Raises OSError."""
    paths = [directory / _name_receipt(rank) for rank in range(1, num_ranks)]
    parts = [decode(read_bytes(path, _MAX_RECEIPT_BYTES), Part) for path in paths]
    for path in paths:
        path.unlink()
    return parts


def merge_parts(structure: Any, parts: Sequence[Part]) -> tuple[dict[str, Pieces], str | None]:
    """Return the files of all parts, and the digest of the state if no tensor is in several files, else None.

    Args:
        parts: in the order of the ranks.

    Raises:
        InvalidValue: together they are not the tensors of the structure.

    Example::

        >>> structure = {"w": {"$": "tensor", "name": "w", "dtype": "float32", "shape": [2]}}
        >>> files, digest = merge_parts(structure, [Part([], {"w": ([1], "a")}), Part([], {"w": ([1], "b")})])
        >>> [*files], digest
        (['tensors-00000.safetensors', 'tensors-00001.safetensors'], None)
    """
    shapes: dict[str, list[int]] = {}
    hashes: dict[str, str] = {}
    is_split = False
    for part in parts:
        for name, (shape, checksum) in part.tensors.items():
            if name in shapes:
                is_split = True
                shapes[name] = [shapes[name][0] + shape[0], *shape[1:]] if shape else []
            else:
                shapes[name] = shape
                hashes[name] = checksum
    for name, wanted in list_tensors(structure).items():
        if name not in shapes or wanted not in (None, shapes[name]):
            found = f"has the shape {shapes[name]} in all of them" if name in shapes else "is in none of them"
            raise InvalidValue(
                f"the ranks have not written all of the state: {name} {found}: make the objects for run.prepare the "
                "same on all ranks",
                code="SS504",
            )
    files = {name_part(rank): part.pieces for rank, part in enumerate(parts)}
    return files, None if is_split else digest_of(structure, hashes)
