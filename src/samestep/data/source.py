"""Sources: data sets that are stored in shards and read by micro-batch, and the comparison of their shards."""

import errno
import json
import os
import stat
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from samestep.decoding import Count, decode
from samestep.errors import InvalidType, InvalidValue
from samestep.hashing import hash_pieces

MAX_NAMED = 3  # shards in a message
BLOCK = 4096  # bytes that are hashed at the start, in the middle and at the end of a shard's file

# The mark of a shard's file: the time at which it was written, in nanoseconds, and a hash of three of its blocks.
Mark = tuple[int, str]


class Shard(NamedTuple):
    """A part of a source that is stored together, such as a file.

    Attributes:
        name: unique in its source, and independent of where the data are stored.
        num_samples: number of samples, which may be 0.
        num_bytes: size on the disk.

    Example: see `Source`.
    """

    name: str
    num_samples: int
    num_bytes: int


class Source(Protocol):
    """A data set with random access by micro-batch. Pass it to `Run.epochs`, `Run.steps` or `Run.evaluate`.

    Every map-style data set is accepted there. A source reads all samples of a micro-batch in one call, and names its
    shards. So the order of an epoch can mix the samples of a few shards at a time, which keeps reads local, and a
    resumed run can refuse shards that have changed. docs/streaming.md describes both.

    A data set whose reading draws no random numbers may also have `read_batch(indices)`. It gets an array of int64 and
    returns the micro-batch that the loop yields. It is called instead of `__getitems__` if no `collate_fn` is given,
    and saves 20 us per micro-batch, because the generators need no seed and the indices no list.

    A source may also have `shard_files`, a list with the path of each shard's file. A resumed run then also refuses
    files whose content has changed.

    Example::

        >>> import samestep, torch
        >>> class Squares:
        ...     shards = [samestep.Shard(f"{k}.bin", num_samples=4, num_bytes=16) for k in range(3)]
        ...     def __len__(self):
        ...         return 12
        ...     def __getitems__(self, indices):
        ...         return torch.tensor(indices, dtype=torch.float32).square()
        ...
        >>> run = samestep.Run(None, batch_size=12)
        >>> run.prepare(model=torch.nn.Linear(1, 1))
        >>> run.evaluate(lambda x: {"mean": x.mean()}, Squares(), micro_batch_size=4)
        {'mean': 42.166666666666664}
    """

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards, in the order of their samples.

        Example: see `Source`.
        """
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitems__(self, indices: list[int], /) -> Any:
        """Return the samples at `indices`: a list of samples, or anything else that `collate_fn` takes.

        Without a `collate_fn`, a list is stacked by `default_collate`. Anything else, such as a dict of arrays with one
        row per sample, is a micro-batch already: its arrays become tensors.
        """
        ...


def read_shards(dataset: Any) -> tuple[tuple[Shard, ...], NDArray[np.int64], str]:
    """Return the shards of a source, their numbers of samples, and a hash of their names and sizes.

    Takes 0.4 us per shard. For another data set, there are no shards, and the hash is "".

    Raises:
        InvalidValue: the shards do not fit the length of the source, or a name is used twice.
    """
    shards = getattr(dataset, "shards", None)
    if not isinstance(shards, Sequence) or {*map(type, shards)} != {Shard}:
        return (), np.empty(0, np.int64), ""
    names, *columns = zip(*shards, strict=True)
    sizes = np.array(columns, "<i8")
    if (total := int(sizes[0].sum())) != len(dataset):
        name = type(dataset).__name__
        raise InvalidValue(
            f"the shards of {name} have {total} samples, and its len() is {len(dataset)}: correct one", code="SS309"
        )
    if len({*names}) < len(names):
        raise InvalidValue(
            f"two shards of {type(dataset).__name__} have the same name: give each a name of its own", code="SS309"
        )
    mark = hash_pieces(["\0".join(names).encode(), sizes.tobytes()])[:16]
    return tuple(shards), sizes[0], mark


def mark_shards(dataset: Any, before: Sequence[Mark]) -> list[Mark]:
    """Return the marks of a source's shards; [] if it does not name their files.

    Only files that were written at a different time than in `before` are read, in 40 us per file; others take 5 us.

    Args:
        before: earlier marks; [] if there are none.

    Raises:
        InvalidValue: a file cannot be read, or there is not one for each shard.
    """
    given: Any = getattr(dataset, "shard_files", ())
    try:
        files = [os.fspath(file) for file in given]  # a Path takes 10 us more
        is_list = not isinstance(given, str)
    except TypeError:
        is_list = False
    if not is_list:
        raise InvalidType(
            f"{type(dataset).__name__}.shard_files must be a list with the path of each shard's file, "
            f"not {given!r:.100}",
            code="SS309",
        )
    if files and len(files) != len(dataset.shards):
        name = type(dataset).__name__
        count = len(dataset.shards)
        raise InvalidValue(
            f"{name} has {count} shards and {len(files)} shard_files: give the file of each shard", code="SS309"
        )
    known = dict(zip(files, before, strict=False))
    marks = dict[str, Mark]()
    for file in dict.fromkeys(files):
        try:
            marks[file] = _mark_file(file, known.get(file))
        except (OSError, ValueError) as error:  # ValueError: the name holds a NUL character
            why = getattr(error, "strerror", None) or error
            raise InvalidValue(f"the shard {file} cannot be read ({why}): restore it", code="SS310") from None
    return [marks[file] for file in files]


def _mark_file(file: str, before: Mark | None) -> Mark:
    status = os.stat(file)
    if stat.S_ISFIFO(status.st_mode):  # `open` would block
        raise OSError(errno.EINVAL, "it is a FIFO")
    if before is not None and before[0] == status.st_mtime_ns:
        return before
    with open(file, "rb", buffering=0) as opened:
        places = (0, status.st_size // 2, max(0, status.st_size - BLOCK))
        blocks = [os.pread(opened.fileno(), BLOCK, place) for place in places]
    return status.st_mtime_ns, hash_pieces(blocks)[:16]


def explain_rewrite(shards: Sequence[Shard], before: Sequence[Mark], now: Sequence[Mark]) -> str:
    """Describe which shards have different content than before at the same size; "" if none is known."""
    pairs = zip(shards, before, now, strict=False)
    return _list([f"{shard.name} has other content" for shard, was, found in pairs if was[1] != found[1]])


class _Row(Struct, array_like=True):
    name: str
    num_samples: Count
    num_bytes: Count
    written_ns: int = 0
    content: str = ""


def format_shards(shards: Iterable[Shard], marks: Iterable[Mark]) -> bytes:
    """Return the content of a file with the shards; `parse_shards` reads it."""
    rows = [(*shard, *mark) for shard, mark in zip_longest(shards, marks, fillvalue=())]
    return json.dumps(rows, separators=(",", ":")).encode()


def parse_shards(text: bytes) -> tuple[list[Shard], list[Mark]]:
    """Return the shards and marks from the text of `format_shards`. Raises ValueError if the text is damaged."""
    rows = decode(text, list[_Row])
    shards = [Shard(row.name, row.num_samples, row.num_bytes) for row in rows]
    marks = [(row.written_ns, row.content) for row in rows if row.content]
    return shards, marks if len(marks) == len(shards) else []  # a source without `shard_files`


def explain_change(before: Sequence[Shard], now: Sequence[Shard]) -> str:
    """Describe how shards differ from the earlier ones; "" if they do not."""
    was, found = ({shard.name: shard for shard in shards} for shards in (before, now))
    missing = [f"{name} is missing" for name in was if name not in found]
    changed = [
        f"{name} has changed ({old.num_samples} samples in {old.num_bytes} bytes before, "
        f"{found[name].num_samples} in {found[name].num_bytes} now)"
        for name, old in was.items()
        if name in found and found[name] != old
    ]
    added = [f"{name} is new" for name in found if name not in was]
    named = [*missing, *changed, *added]
    if not named:
        return "" if [*was] == [*found] else "they are in another order"
    return _list(named)


def _list(named: Sequence[str]) -> str:
    return ", ".join(named[:MAX_NAMED]) + (f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else "")
