"""Explains an allocation that has failed: what the state of the run needs, what there is, and which `shard` fits."""

import traceback
from collections.abc import Mapping

import torch
from torch import nn

from samestep.errors import Error, is_out_of_memory
from samestep.plan.memory import compute_memory, find_fitting
from samestep.train.context import RunContext
from samestep.train.state.param_sizes import measure_sizes
from samestep.train.state.sharded_state import ELEMENTWISE, Blocks
from samestep.train.state.stateful import Objects, name_optimizers
from samestep.units import format_bytes, format_ranks
from samestep.world.memory_room import find_own_room

WHAT = "parameters, gradients and the optimizers' state"


class MemoryExplainer:
    """Explains why a run has no memory left. Nothing is predicted: it is asked after an allocation has failed.

    Created before the run allocates anything else than the models.

    Args:
        blocks: as `shard_blocks` of `Run.prepare`.
    """

    def __init__(
        self,
        objects: Objects,
        modules: Mapping[str, nn.Module],
        blocks: Blocks | None,
        context: RunContext,
    ) -> None:
        self._objects = objects
        self._modules = modules
        self._blocks = blocks
        self._config = context.config
        self._rank = context.rank
        self._world_size = context.world_size
        device = context.device
        if device.type == "cuda":
            self._room_bytes = torch.cuda.get_device_properties(device).total_memory
            self._limit = "memory of the GPU"
            return
        room_bytes, self._limit = find_own_room(context.environment.local_world_size)
        params = {id(param): param.nbytes for module in modules.values() for param in module.parameters()}
        self._room_bytes = room_bytes + sum(params.values())

    def explain(self, error: BaseException) -> Error | None:
        """Return an error that says what the run needs; None if this is not a failed allocation of a step.

        The reading of a sample is no part of it.
        """
        frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not is_out_of_memory(error) or any(name.startswith("samestep.data.") for name in frames):
            return None
        config = self._config
        sizes = measure_sizes(self._objects, self._modules, self._blocks)
        needed_bytes = compute_memory(sizes, config.shard, self._world_size).total
        mode = f'shard="{config.shard}" on {format_ranks(self._world_size)}' if config.shard else "shard=None"
        found = (
            f"{WHAT} need {format_bytes(needed_bytes)} on each rank with "
            f"{mode}, and there are {format_bytes(self._room_bytes)} for them ({self._limit})"
        )
        if needed_bytes <= self._room_bytes:
            is_shardable = config.shard != "fsdp2" and "fsdp2" in self._list_shards()
            other = ', or shard="fsdp2"' if is_shardable else ""
            return Error(
                f"rank {self._rank} has run out of memory: {found}, so activations and messages need too much: use a "
                f"smaller micro_batch_size{other}",
                code="SS604",
            )
        most = config.batch_size // config.micro_batch_size
        fitting = find_fitting(sizes, self._room_bytes, self._list_shards(), most)
        if fitting is None:
            advice = f"no shard fits on up to {format_ranks(most)}, use a smaller model or more memory"
        else:
            bytes_then = compute_memory(sizes, *fitting).total
            advice = (
                f'use shard="{fitting[0]}" on {format_ranks(fitting[1])} or more, which needs '
                f"{format_bytes(bytes_then)} besides activations"
            )
        return Error(f"rank {self._rank} has run out of memory: {found}: {advice}", code="SS604")

    def _list_shards(self) -> list[str]:
        """Return the values of `shard` that the optimizers support."""
        optimizers = name_optimizers(self._objects).values()
        shards = [] if any(isinstance(each, torch.optim.LBFGS) for each in optimizers) else ["optimizer"]
        return [*shards, "fsdp2"] if all(type(each) in ELEMENTWISE for each in optimizers) else shards
