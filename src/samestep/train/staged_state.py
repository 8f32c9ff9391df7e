"""The prepared objects of a run with a pipeline: the model, which is cut, and the state that the ranks have of it."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from samestep.engine.ownership import StageOwnership
from samestep.errors import InvalidValue
from samestep.pipeline.schedule import find_held, list_positions
from samestep.pipeline.stages import StagedModel, give_up, list_tensors, move
from samestep.snapshot.async_copy import Share, locate
from samestep.snapshot.serialization import SavedState
from samestep.train.context import RunContext
from samestep.train.divided_state import DividedOptimizers, shard_as
from samestep.train.objects import STATE, Objects, refuse_shared_memory, save_module, strip_compiled
from samestep.train.sharded_init import ShardedInit
from samestep.world.group import Group


def cut_model(
    objects: Objects, context: RunContext, stages: Sequence[str] | None, *, keeps_devices: bool
) -> StagedModel | None:
    """Return the model of a run with a pipeline, cut into stages; None without a pipeline.

    Args:
        stages: as for `Run.prepare`.
        keeps_devices: whether `device_map` is "keep".

    Raises:
        InvalidValue: it cannot be cut, or an option does not support a pipeline.
    """
    config = context.config
    if config.pipeline is None:
        if stages is not None:
            raise InvalidValue(
                "run.prepare got stages, and the run has no pipeline: pass samestep.Run(pipeline=...) the number of "
                "stages, or leave stages out",
                code="SS104",
            )
        return None
    refused = {
        f'shard="{config.shard}"': config.shard is not None,
        "check_compute_every": config.check_compute_every is not None,
        'device_map="keep"': keeps_devices,
    }
    if name := next((each for each, is_there in refused.items() if is_there), ""):
        raise InvalidValue(f"{name} is not available with pipeline: leave one of them out", code="SS614")
    if len(objects.modules) != 1:
        raise InvalidValue(
            f"run.prepare got {len(objects.modules)} models ({', '.join(objects.modules)}), and a pipeline cuts one: "
            "pass one model",
            code="SS613",
        )
    refuse_shared_memory(objects)
    ((name, model),) = objects.modules.items()
    if objects.by_name[name] is not model:
        raise InvalidValue(
            f"{name} is compiled as a whole, so that it cannot be cut: compile the modules inside of its stages",
            code="SS613",
        )
    return StagedModel(name, model, [*(stages or ())], config.pipeline)


def divide_model(staged: StagedModel, group: Group, init: ShardedInit, objects: Objects) -> None:
    """Leave each rank its stages of a model, with the values of rank 0. On all ranks.

    A model that was built in `run.sharded_init` gets no other memory.
    """
    held = find_held(group.rank % group.ranks_per_replica, group.ranks_per_replica, staged.num_stages)
    tensors = [tensor for module in staged.stages for _, tensor in list_tensors(module)]
    group.broadcast_tensors([each for each in tensors if not each.is_meta])
    kept = staged.list_kept(held)
    foreign = {*staged.list_foreign(held)}
    # Built in `run.sharded_init`, another stage may initialize a parameter that this rank uses, too.
    empty = {param for param in kept if param.is_meta}
    creators = {module for module in foreign if not empty.isdisjoint(module.parameters(recurse=False))}
    for module in foreign - creators:
        give_up(module, kept)
    init.fill(staged.model, foreign - creators)
    for module in creators:
        give_up(module, kept)
    for module in staged.stages:
        move(module, group.device)
    elsewhere = {param for module in foreign for param in module.parameters(recurse=False)} - kept
    for optimizer in objects.optimizers.values():
        for param in elsewhere:
            optimizer.state.pop(param, None)  # of an optimizer that builds it at the start


class StagedState(DividedOptimizers):
    """The prepared objects of a run in which each rank has some stages of the model.

    The ranks that have the same stages make the same update. A snapshot has each tensor once, by its name: so any
    number of ranks resumes it.
    """

    def __init__(self, objects: Objects, group: Group, staged: StagedModel) -> None:
        super().__init__(objects, group, copies=1)
        self._owner_of = list_positions(group.ranks_per_replica, staged.num_stages)  # of each stage, in replica 0
        self._staged = staged
        owners: dict[nn.Parameter, int] = {}
        for module, stage in staged.stages.items():
            for param in module.parameters(recurse=False):
                owners.setdefault(param, self._owner_of[stage])  # of a tied one, the first stage
        self.ownership = StageOwnership(group, owners)

    def check_optimizers(self) -> None:
        """Raise InvalidValue if an optimizer needs the gradients of all stages at once."""
        self._refuse_lbfgs("stages", "use another optimizer, or start with --pipeline-ranks 1")

    def _send_updated(self, optimizer: Any, *_: Any) -> None:
        """No rank waits for the update of another one."""

    def outline(self) -> tuple[dict[str, Any], Share]:
        """Return the objects' states, with tensors on the meta device for those of other ranks. On all ranks.

        Raises:
            InvalidValue: an optimizer was not called alike on all ranks.
        """
        states, is_mine = self._outline()
        return states, Share(is_mine, self._group.rank, self._group.world_size)

    def _outline(self) -> tuple[dict[str, Any], Callable[[Tensor], bool]]:
        """Return the states of `outline`, and a function that returns whether this rank stores a tensor of them."""
        of_ranks = self._exchange_outlines()
        rank = self._group.rank
        stored = {locate(each): rank for each in tree_leaves(of_ranks[rank]) if isinstance(each, Tensor)}
        for module, stage in self._staged.stages.items():
            for _, tensor in list_tensors(module):
                if tensor.numel() and not tensor.is_meta:
                    stored.setdefault(locate(tensor), self._owner_of[stage])
        states = self._merge([*of_ranks.values()])
        of_model = states[self._staged.name]
        for names in self._staged.list_shared():  # one tensor, also where it is on the meta device
            saved = [name for name in map(strip_compiled, names) if name in of_model]
            for name in saved[1:]:
                of_model[name] = of_model[saved[0]]

        def is_mine(tensor: Tensor) -> bool:
            """Those of no stage are the same on all ranks."""
            return not tensor.is_meta and stored.get(locate(tensor), 0) == rank

        return states, is_mine

    def select(self, saved: SavedState) -> dict[str, Any]:
        """Return the objects' states in a snapshot, without those of other ranks' stages."""
        objects = dict(saved.contents["objects"])
        name = self._staged.name
        now = save_module(self._staged.model)
        objects[name] = copy(objects[name])  # with the versions of the modules
        for key, value in objects[name].items():
            objects[name][key] = shard_as(now.get(key), value)
        for name, params in self._name_params().items():
            foreign = {path for path, param in params.items() if param.is_meta}
            state = objects[name][STATE]
            objects[name] = {**objects[name], STATE: {path: state[path] for path in state if path not in foreign}}
        return objects

    def collect(self) -> dict[str, Any]:
        """Return the objects' states, whole on rank 0. On all ranks."""
        states, is_mine = self._outline()
        leaves, structure = tree_flatten(states)
        mine = [i for i, each in enumerate(leaves) if isinstance(each, Tensor) and is_mine(each)]
        for source, of_rank in enumerate(self._group.gather(mine)):
            if source == 0:
                continue
            if self._group.rank == 0:
                received = [torch.empty_like(leaves[i], device="cpu") for i in of_rank]
                self._group.receive(received, source)
                for i, tensor in zip(of_rank, received, strict=True):
                    leaves[i] = tensor
            elif self._group.rank == source:
                self._group.send([leaves[i] for i in of_rank], target=0)
        if self._group.rank:  # this rank has no values of the others
            leaves = [torch.empty(0) if isinstance(each, Tensor) and each.is_meta else each for each in leaves]
        return tree_unflatten(leaves, structure)  # type: ignore[no-any-return]
