"""The directory `orders/` of a run, from which the samples of each step can be computed again.

It holds the order of each epoch if a sampler gave it, and for each source that the run has used the list of its shards.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from samestep.data.source import Shard, format_shards, parse_shards
from samestep.files import open_regular, read_bytes, replace_file
from samestep.plan.order import Indices, check_order

ORDERS = "orders"


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
    return [shard.num_samples for shard in parse_shards(read_bytes(run_dir / shards_file(shards_hash)))]


def keep_shards(run_dir: Path, shards_hash: str, shards: Sequence[Shard]) -> str:
    """Write the list of a source's shards. Returns a warning, or ""."""
    return _keep(run_dir / shards_file(shards_hash), format_shards(shards))


def _keep(path: Path, content: bytes) -> str:
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, content, sync=True)
    except OSError as error:
        return f"{path.parent.name}/{path.name} could not be written ({error}): the run continues"
    return ""
