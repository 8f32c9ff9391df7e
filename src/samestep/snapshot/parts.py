"""The parts of a snapshot whose state is divided among the ranks: each rank writes what it holds to a file of its own.

The ranks write in threads, which call no collective. A rank that has written its part creates a small file beside it,
the receipt. Rank 0 waits for all receipts, and then writes the manifest.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from samestep.decoding import decode
from samestep.errors import InvalidValue
from samestep.files import open_regular, read_bytes, replace_file
from samestep.snapshot.manifest import Pieces
from samestep.snapshot.serialization import digest_of, list_tensors, write_tensors
from samestep.world.forking import at_rest

if TYPE_CHECKING:
    from torch import Tensor

BUFFER_BYTES = 1 << 20
PATIENCE_S = 10.0  # after the last growth of a file, when ranks may have ended
_POLL_S = 0.02
_MAX_RECEIPT_BYTES = 1 << 30


class Part(Struct):
    """A receipt: the content of the file of one rank.

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


def write_part(directory: Path, file: str, tensors: "Mapping[str, Tensor]") -> Part:
    """Write the tensors that a rank stores. Raises OSError."""
    with open(directory / file, "xb", BUFFER_BYTES, opener=open_regular) as opened:
        pieces, hashes = write_tensors(opened, tensors)
    return Part(pieces, {name: ([*tensor.shape], hashes[name]) for name, tensor in tensors.items()})


def deliver_part(
    directory: Path, rank: int, tensors: "Mapping[str, Tensor]", confirm: Callable[[], None] = lambda: None
) -> None:
    """Write the part of a rank other than 0, and its receipt. Calls `confirm`, which may raise, in between.

    Raises:
        OSError: the disk is full or gone, or rank 0 has given up. The rank's files are removed.
    """
    file = directory / name_part(rank)
    try:
        part = write_part(directory, file.name, tensors)
        confirm()
        receipt = json.dumps([part.pieces, part.tensors]).encode()
        replace_file(directory / _name_receipt(rank), receipt)
    except BaseException:
        with suppress(OSError):
            file.unlink()
        raise


class OtherParts:
    """The parts of one snapshot that the ranks other than 0 write. Rank 0 waits for them in a thread.

    Args:
        world_size: the number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._ranks = range(1, world_size)
        self._limit: tuple[str, float] | None = None

    def limit_wait(self, reason: str, patience_s: float = 0.0) -> None:
        """Let `wait` fail once no file has grown for some time. Any thread may call it. `reason`: for the error."""
        self._limit = reason, patience_s

    def wait(self, directory: Path) -> dict[int, Part]:
        """Return the parts by rank, once all ranks have written theirs.

        Raises:
            OSError: a part will not come, see `limit_wait`, or cannot be read, or the directory is gone.
        """
        parts: dict[int, Part] = {}
        sizes: list[int] = []
        grown_s = time.monotonic()
        while True:
            limit = self._limit  # read before the receipts, which the ranks write before they end
            for rank in self._ranks:
                if rank not in parts and (directory / _name_receipt(rank)).exists():
                    parts[rank] = _read_receipt(directory / _name_receipt(rank))
            missing = [rank for rank in self._ranks if rank not in parts]
            if not missing:
                break
            directory.stat()  # raises if it is gone, and with it receipts that were not read yet
            if limit is not None:
                before, sizes = sizes, [_measure(directory / name_part(rank)) for rank in missing]
                if sizes != before:
                    grown_s = time.monotonic()
                reason, patience_s = limit
                if time.monotonic() - grown_s >= patience_s:
                    raise OSError(f"{name_part(missing[0])} is missing: {reason}")
            elif not threading.main_thread().is_alive():
                self.limit_wait("the ranks have ended", patience_s=PATIENCE_S)
            with at_rest():
                time.sleep(_POLL_S)
        for rank in self._ranks:
            (directory / _name_receipt(rank)).unlink()
        return parts


def _read_receipt(path: Path) -> Part:
    pieces, tensors = decode(read_bytes(path, _MAX_RECEIPT_BYTES), tuple[Pieces, dict[str, tuple[list[int], str]]])
    return Part(pieces, tensors)


def _measure(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def merge_parts(structure: Any, parts: Mapping[int, Part]) -> tuple[dict[str, Pieces], str | None]:
    """Return the files of all parts, and the digest of the state if no tensor is in several files, else None.

    Raises:
        InvalidValue: together they are not the tensors of the structure.

    Example::

        >>> structure = {"w": {"$": "tensor", "name": "w", "dtype": "float32", "shape": [2]}}
        >>> files, digest = merge_parts(structure, {0: Part([], {"w": ([1], "a")}), 1: Part([], {"w": ([1], "b")})})
        >>> [*files], digest
        (['tensors-00000.safetensors', 'tensors-00001.safetensors'], None)
    """
    shapes: dict[str, list[int]] = {}
    hashes: dict[str, str] = {}
    is_split = False
    for rank in sorted(parts):
        for name, (shape, checksum) in parts[rank].tensors.items():
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
    files = {name_part(rank): parts[rank].pieces for rank in sorted(parts)}
    return files, None if is_split else digest_of(structure, hashes)
