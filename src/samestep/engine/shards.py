"""Sharded parameters: `fully_shard` gathers them unit by unit, and leaves the sums of their gradients to a pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from samestep.errors import UsageError
from samestep.torch_internals import ShardedUnit, list_units


class Receiver(Protocol):
    """Gets the gradients of units during a backward pass."""

    def complete(self, k: int) -> None:
        """Unit k has its gradients, unsharded."""

    def reduce(self, k: int, flat: Tensor, process_group: Any) -> None:
        """Sum the gradients of unit k, which are flat, one chunk per rank."""


class ShardedModels:
    """The models of a run whose parameters are sharded. Directs the gradients of their units to a receiver.

    Args:
        modules: the models by name.
        block_size: ranks per block; the ranks of a block are on one host.

    Attributes:
        units: their units.
        names: per unit, a name for messages.
    """

    def __init__(self, modules: Mapping[str, nn.Module], block_size: int) -> None:
        self.block_size = block_size
        self._receiver: Receiver | None = None
        found = [
            (unit, f"{name}.{unit.path}" if unit.path else name)
            for name, module in modules.items()
            for unit in list_units(module)
        ]
        self.units: Sequence[ShardedUnit] = [unit for unit, _ in found]
        self.names = [name for _, name in found]
        for k, unit in enumerate(self.units):
            unit.intercept(partial(self._complete, k), partial(self._reduce, k))

    def free_gathered(self) -> None:
        """Free whole parameters. A forward pass without a backward pass leaves some, and an update would not change
        them.
        """
        for unit in self.units:
            unit.free_gathered()

    def direct(self, receiver: Receiver | None) -> None:
        """Pass the gradients of the backward passes that follow to `receiver`."""
        self._receiver = receiver

    def _complete(self, k: int) -> None:
        self._find_receiver().complete(k)

    def _reduce(self, k: int, flat: Tensor, process_group: Any) -> None:
        self._find_receiver().reduce(k, flat, process_group)

    def _find_receiver(self) -> Receiver:
        if self._receiver is None:
            raise UsageError(
                "a backward pass ran outside of step.backward (loss.backward(), or torch.autograd.grad for a gradient "
                'penalty), which shard="fsdp2" does not support: use step.backward alone, or shard="optimizer"',
                code="SS609",
            )
        return self._receiver


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
