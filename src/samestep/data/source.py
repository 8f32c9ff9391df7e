"""Sources, which are stored in shards and read by micro-batch, and the directory `orders/` of a run.

The directory holds what the samples of each step can be computed from again: the order of each epoch if a sampler gave
it, and for each source that the run has used the list of its shards.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from samestep.decoding import Count, decode
from samestep.errors import InvalidValue
from samestep.files import open_regular, read_bytes, replace_file
from samestep.hashing import hash_chunks
from samestep.plan.order import Indices, check_order

ORDERS = "orders"


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

    Unlike another map-style data set, a source reads all samples of a micro-batch in one call, and names its shards. So
    an epoch can mix the samples of a few shards at a time, and a resumed run can refuse shards that have changed; see
    docs/streaming.md.

    A data set whose reading draws no random numbers may also have `read_batch(indices)`. It gets an array of int64 and
    returns the micro-batch that the loop yields. It is called instead of `__getitems__` if no `collate_fn` is given,
    and saves 20 us per micro-batch.

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

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitems__(self, indices: list[int], /) -> Any:
        """Return the samples at `indices`: a list of samples, or anything else that `collate_fn` takes.

        Without a `collate_fn`, a list is stacked by `default_collate`. Anything else, such as a dict of arrays with one
        row per sample, is a micro-batch already: its arrays become tensors.
        """


def read_shards(dataset: Any) -> tuple[tuple[Shard, ...], Indices, str]:
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
    return tuple(shards), sizes[0], hash_chunks(["\0".join(names).encode(), sizes.tobytes()])[:16]


def list_orders(run_dir: Path) -> list[str]:
    """Return the paths of the files of orders and shards, relative to the run directory."""
    return sorted(f"{ORDERS}/{path.name}" for path in (run_dir / ORDERS).glob("[es]*.*"))


def order_file(epoch: int) -> str:
    """Return the path of an epoch's order, relative to the run directory."""
    return f"{ORDERS}/epoch-{epoch:08d}.npy"


def shards_file(shards_hash: str) -> str:
    """Return the path of the list of a source's shards, relative to the run directory. The hash is `read_shards`'s."""
    return f"{ORDERS}/shards-{shards_hash}.json"


def read_order(run_dir: Path, epoch: int) -> Indices:
    """Return the order that a sampler gave for an epoch. Raises OSError, ValueError or EOFError if it is damaged."""
    with open(run_dir / order_file(epoch), "rb", opener=open_regular) as file:
        indices = np.load(file, allow_pickle=False)
    return check_order(indices, int(indices.max()) + 1, epoch)


def keep_order(run_dir: Path, epoch: int, indices: Indices) -> str:
    """Write the order that a sampler gave for an epoch. Returns a warning, or ""."""
    content = io.BytesIO()
    np.save(content, indices)
    return _keep(run_dir / order_file(epoch), content.getvalue())


def read_shard_sizes(run_dir: Path, shards_hash: str) -> list[int]:
    """Return the number of samples of each shard. Raises OSError or ValueError if the list is damaged."""
    shards = decode(read_bytes(run_dir / shards_file(shards_hash)), list[tuple[str, Count, Count]])
    return [num_samples for _, num_samples, _ in shards]


def keep_shards(run_dir: Path, shards_hash: str, shards: Sequence[Shard]) -> str:
    """Write the list of a source's shards. Returns a warning, or ""."""
    return _keep(run_dir / shards_file(shards_hash), json.dumps([*shards], separators=(",", ":")).encode())


def _keep(path: Path, content: bytes) -> str:
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, content, sync=True)
    except OSError as error:
        return f"{path.parent.name}/{path.name} could not be written ({error}): the run continues"
    return ""
