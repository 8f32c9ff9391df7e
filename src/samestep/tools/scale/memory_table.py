"""The memory of a rank for each value of `shard`, from the sizes that `samestep scale` has measured on one rank."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from samestep.config import Shard
from samestep.plan.memory import ParamSize, RankMemory, compute_memory
from samestep.units import format_bytes

SHARDS: tuple[str | None, ...] = (None, *get_args(Shard))
NOTE = (
    "memory: the sizes of the tensors are measured on 1 rank, their division is computed; without activations, "
    "messages, buffers of the model and copies for snapshots"
)


def read_sizes(result: Mapping[str, Any]) -> list[ParamSize]:
    """Return the sizes in a file of `samestep scale`; [] if it has none.

    Raises:
        ValueError, TypeError, KeyError, IndexError: it is damaged.
    """
    rows = (result.get("strong") or result["weak"])["sizes"][0]["facts"].get("memory", [])
    if any(type(each) is not int or each < 0 for row in rows for each in row):
        raise ValueError("a size is no number")
    return [ParamSize(*row) for row in rows]


def list_memory(sizes: Sequence[ParamSize], world_sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the memory of a rank at each number of ranks, for each value of `shard`. One rank divides nothing."""
    return [
        {"world_size": world_size, "shard": shard or "none", **asdict(memory), "total": memory.total}
        for world_size in world_sizes
        for shard in (SHARDS if world_size > 1 else SHARDS[:1])
        for memory in [compute_memory(sizes, shard, world_size)]
    ]


def build_memory(found: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table of `list_memory`."""
    parts = [*RankMemory.__dataclass_fields__, "total"]
    header = ["ranks", "shard", *(part.replace("_", " ") for part in parts)]
    rows = [[str(row["world_size"]), row["shard"], *(format_bytes(row[part]) for part in parts)] for row in found]
    return header, rows
