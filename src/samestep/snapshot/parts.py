"""The parts of a snapshot: what each rank holds of the state, in a file of its own. A whole state is one part.

A rank other than 0 describes its part in a small file beside it, the receipt, which rank 0 reads for the manifest.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.decoding import decode
from samestep.errors import InvalidValue
from samestep.files import open_regular, read_bytes, replace_file
from samestep.snapshot.manifest import METADATA, Pieces
from samestep.snapshot.serialization import digest_of, list_tensors, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

BUFFER_BYTES = 1 << 20
_MAX_RECEIPT_BYTES = 1 << 30


def name_part(rank: int) -> str:
    """Return the name of a rank's file. Sorted by name, the files are in the order of the ranks."""
    return f"tensors-{rank:05d}.safetensors"


def _name_receipt(rank: int) -> str:
    return f".receipt-{rank:05d}"


def write_part(directory: Path, rank: int, tensors: "Mapping[str, Tensor]") -> Pieces:
    """Write the part of a rank, and its receipt. Return the pieces of the file.

    Raises:
        OSError: the disk is full or gone. The rank's file is removed.
    """
    file = directory / name_part(rank)
    try:
        with open(file, "xb", BUFFER_BYTES, opener=open_regular) as opened:
            pieces = write_tensors(opened, tensors)
        if rank:
            replace_file(directory / _name_receipt(rank), json.dumps(pieces).encode())
    except BaseException:
        with suppress(OSError):
            file.unlink()
        raise
    return pieces


def take_receipts(directory: Path, num_ranks: int) -> list[Pieces]:
    """Read and remove the receipts of the ranks other than 0, which have written their parts. Raises OSError."""
    paths = [directory / _name_receipt(rank) for rank in range(1, num_ranks)]
    parts = [decode(read_bytes(path, _MAX_RECEIPT_BYTES), Pieces) for path in paths]
    for path in paths:
        path.unlink()
    return parts


def merge_parts(structure: Any, parts: Sequence[Pieces]) -> tuple[dict[str, Pieces], str | None]:
    """Return the files of all parts, and the digest of the state if no tensor is in several files, else None.

    Args:
        parts: in the order of the ranks.

    Raises:
        InvalidValue: together they are not the tensors of the structure.

    Example::

        >>> from samestep.snapshot.manifest import Piece
        >>> structure = {"w": {"$": "tensor", "name": "w", "dtype": "float32", "shape": [2]}}
        >>> files, digest = merge_parts(structure, [[Piece("w", 4, "a")], [Piece("w", 4, "b")]])
        >>> [*files], digest
        (['tensors-00000.safetensors', 'tensors-00001.safetensors'], None)
    """
    pieces = [piece for part in parts for piece in part if piece.name != METADATA]
    sizes = {piece.name: 0 for piece in pieces}
    for piece in pieces:
        sizes[piece.name] += piece.num_bytes
    for name, wanted in list_tensors(structure).items():
        if sizes.get(name) != wanted:
            raise InvalidValue(
                f"the ranks have not written all of the state: {name} has {sizes.get(name, 0)} of {wanted} bytes: make "
                "the objects for run.prepare the same on all ranks",
                code="SS504",
            )
    files = {name_part(rank): part for rank, part in enumerate(parts)}
    is_split = len(sizes) < len(pieces)
    return files, None if is_split else digest_of(structure, {piece.name: piece.sha256 for piece in pieces})
