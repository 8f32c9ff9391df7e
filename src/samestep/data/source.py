"""Sources: data sets that are stored in shards and read by micro-batch, and the comparison of their shards."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from samestep.errors import Error

MOST_NAMED = 3  # shards in a message


class Shard(NamedTuple):
    """A part of a source that is stored together, such as a file or a row group of one.

    Attributes:
        name: unique in its source, and the same wherever the data lie.
        num_samples: its number of samples, which may be 0.
        num_bytes: its size on the disk.

    Example: see `Source`.
    """

    name: str
    num_samples: int
    num_bytes: int


class Source(Protocol):
    """A data set with random access by micro-batch. Pass it to `Run.epochs`, `Run.steps` or `Run.evaluate`.

    Every map-style data set is accepted there. A source reads all samples of a micro-batch in one call, and names its
    shards, which has two effects: the order of an epoch mixes the samples of a few shards at a time, so that reads
    stay local, and a resumed run refuses shards that have changed. docs/streaming.md describes both.

    A data set whose reading draws no random numbers may also have `read_batch(indices)`. It gets an array of int64 and
    returns the micro-batch that the loop yields. It is called instead of `__getitems__` if no `collate_fn` is given,
    and saves 20 us per micro-batch, because the generators need no seed and the indices no list.

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
        """The shards, in the order of their samples."""
        ...

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def __getitems__(self, indices: list[int], /) -> Any:
        """Return the samples at `indices`: a list of samples, or what `collate_fn` takes instead.

        Without a `collate_fn`, a list is stacked by `default_collate`. Anything else, such as a dict of arrays with one
        row per sample, is a micro-batch already: its arrays become tensors.
        """
        ...


def read_shards(dataset: Any) -> tuple[Shard, ...]:
    """Return the shards of a source; () for another data set.

    Raises:
        Error: they do not fit the length of the source, or a name is used twice.
    """
    shards = getattr(dataset, "shards", None)
    if not isinstance(shards, Sequence) or {*map(type, shards)} != {Shard}:
        return ()
    names, counts, _ = zip(*shards, strict=True)
    if (total := sum(counts)) != len(dataset):
        name = type(dataset).__name__
        raise Error(f"the shards of {name} have {total} samples, and its len() is {len(dataset)}: make them equal")
    if len({*names}) < len(names):
        raise Error(f"two shards of {type(dataset).__name__} have the same name: give each a name of its own")
    return tuple(shards)


def fingerprint_shards(shards: Sequence[Shard]) -> str:
    """Return a hash of the names and sizes of shards, in order. Takes 0.5 us per shard."""
    names, *sizes = zip(*shards, strict=True)
    sha = hashlib.sha256("\0".join(names).encode())
    sha.update(np.array(sizes, "<i8").tobytes())
    return sha.hexdigest()[:16]


def format_shards(shards: Iterable[Shard]) -> bytes:
    """Return the content of a file with the shards; `parse_shards` reads it."""
    return json.dumps([*shards], separators=(",", ":")).encode()


def parse_shards(text: bytes) -> list[Shard]:
    """Return the shards that `format_shards` has written. Raises ValueError if the text is damaged."""
    try:
        return [Shard(str(name), int(num_samples), int(num_bytes)) for name, num_samples, num_bytes in json.loads(text)]
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def explain_change(before: Sequence[Shard], now: Sequence[Shard]) -> str:
    """Describe how shards differ from those before; "" if they do not."""
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
    return ", ".join(named[:MOST_NAMED]) + (f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else "")
