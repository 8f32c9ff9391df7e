"""Compares what the ranks do with optimizers of which each rank has a part: their replicas cannot be compared."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from samestep.errors import InvalidValue
from samestep.snapshot.serialization import digest


class AlikeUpdates:
    """Compares how often the ranks have called each optimizer, and with which settings.

    Args:
        optimizers: the optimizers by name.
        gather: gathers a value of each rank.
        shard: the mode, for messages.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], gather: Callable[[Any], list[Any]], shard: str) -> None:
        self._optimizers = optimizers
        self._gather = gather
        self._shard = shard
        self._num_updates = dict.fromkeys(optimizers, 0)
        for name, optimizer in optimizers.items():
            optimizer.register_step_post_hook(lambda *_, name=name: self._count(name))

    def _count(self, name: str) -> None:
        self._num_updates[name] += 1

    def check(self) -> None:
        """Raise InvalidValue if an optimizer has had other updates, or has other settings, on another rank.

        On all ranks.
        """
        own: dict[str, list[Any]] = {
            name: [self._num_updates[name], digest([_drop_params(group) for group in each.param_groups])]
            for name, each in self._optimizers.items()
        }
        first, *others = self._gather(own)
        for rank, other in enumerate(others, start=1):
            for name in own:
                if other[name][0] != first[name][0]:
                    raise InvalidValue(
                        f"{name}.step() was called {other[name][0]} times on rank {rank} and {first[name][0]} times on "
                        f'rank 0, and with shard="{self._shard}" each rank updates a part: base the decision to update '
                        "on values that are the same on all ranks, such as step.loss",
                        code="SS606",
                    )
                if other[name][1] != first[name][1]:
                    raise InvalidValue(
                        f"{name} has other settings (param_groups) on rank {rank} than on rank 0, and with "
                        f'shard="{self._shard}" each rank updates a part: set them alike on all ranks; if the '
                        "optimizer computes them from all gradients, as Prodigy does, leave out shard",
                        code="SS606",
                    )


def _drop_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
