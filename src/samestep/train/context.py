"""The values of a run that most modules need, without models and loop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from samestep.config import RunConfig
from samestep.engine.precision import MixedPrecision
from samestep.plan.tree import Layout, build_layout
from samestep.snapshot.location import Location
from samestep.world.environment import Environment
from samestep.world.group import Group


@dataclass(frozen=True)
class RunContext:
    """A run on this rank.

    Attributes:
        environment: the environment of this process.
        config: the run's options, checked.
        group: the ranks.
        device: device of this rank.
        precision: precision of the forward passes.
        say: prints a message, on rank 0.
        location: the location of the run.
        script_config: the `config` argument of `Run`, without secrets.
    """

    environment: Environment
    config: RunConfig
    group: Group
    device: torch.device
    precision: MixedPrecision
    say: Callable[[str], None]
    location: Location
    script_config: Mapping[str, Any]

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size

    def build_layout(self, num_micro_batches: int) -> Layout:
        """Return how the ranks share the micro-batches of a step or an evaluation."""
        return build_layout(num_micro_batches, self.group.world_size, self.config.shard == "fsdp2")
