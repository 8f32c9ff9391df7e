"""Models whose parameters are sharded: `fully_shard` gathers them unit by unit, and a pass sums their gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samestep.engine.sharded_unit import ShardedUnit


@dataclass(frozen=True, eq=False)
class ShardedModels:
    """The models of a run whose parameters are sharded.

    Attributes:
        units: their units.
        process_group: the ranks.
        block_size: ranks per block; the ranks of a block are on one host.
        stream: for the exchanges of gradients on a GPU; None on the CPU.
    """

    units: Sequence[ShardedUnit]
    process_group: Any
    block_size: int
    stream: torch.cuda.Stream | None

    def free_gathered(self) -> None:
        """Free whole parameters. A forward pass without a backward pass leaves some, and an update would not change
        them.
        """
        for unit in self.units:
            unit.free_gathered()

    def direct(self, receive: Callable[[int], None] | None) -> None:
        """Call `receive` with the number of each unit whose gradients a backward pass has computed from now on."""
        for k, unit in enumerate(self.units):
            unit.direct(None if receive is None else partial(receive, k))


@dataclass(frozen=True, eq=False)
class Shards:
    """The trained parameters of sharded models.

    Attributes:
        models: the models.
        numbers: per unit, the numbers of its parameters among the trained ones; None for one that is not trained.
    """

    models: ShardedModels
    numbers: Sequence[Sequence[int | None]]


def find_shards(models: ShardedModels, params: Sequence[Tensor]) -> Shards:
    """Return which units hold the trained parameters `params`."""
    places = {id(param): i for i, param in enumerate(params)}
    return Shards(models, [[places.get(id(param)) for param in unit.params] for unit in models.units])
