"""The prepared objects of a run with a pipeline: the model, which is cut, and the state that the ranks have of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from samestep.engine.ownership import StageOwnership
from samestep.errors import InvalidValue
from samestep.pipeline.schedule import find_held, list_positions
from samestep.pipeline.stages import StagedModel, give_up, list_tensors, move
from samestep.snapshot.async_copy import Place, locate
from samestep.train.context import RunContext, refuse_beside
from samestep.train.divided_state import DividedOptimizers
from samestep.train.objects import Objects, refuse_shared_memory, strip_compiled
from samestep.train.sharded_init import ShardedInit
from samestep.world.group import Group


def cut_models(
    objects: Objects, context: RunContext, stages: Sequence[str] | None, *, keeps_devices: bool
) -> list[StagedModel]:
    """Return the model of a run with a pipeline, and averages of it, cut into stages; none without a pipeline.

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
        return []
    refuse_beside(
        "pipeline",
        {
            'shard="fsdp2"': config.shard == "fsdp2",
            f"shard_copies={config.shard_copies}": config.shard is not None and config.shard_copies > 1,
            "check_compute_every": config.check_compute_every is not None,
            'device_map="keep"': keeps_devices,
        },
        code="SS614",
    )
    averages = {name: each for name, each in objects.modules.items() if isinstance(each, AveragedModel)}
    models = {name: each for name, each in objects.modules.items() if name not in averages}
    if len(models) != 1:
        raise InvalidValue(
            f"run.prepare got {len(models)} models ({', '.join(models)}), and a pipeline cuts one: pass one model, and "
            "averages of it as AveragedModel",
            code="SS613",
        )
    refuse_shared_memory(objects)
    if compiled := next((name for name, each in objects.modules.items() if objects.by_name[name] is not each), ""):
        raise InvalidValue(
            f"{compiled} is compiled as a whole, so that it cannot be cut: compile the modules inside of its stages",
            code="SS613",
        )
    cuts = [*(stages or ())]
    ((name, model),) = models.items()
    return [StagedModel(name, model, cuts, config.pipeline)] + [
        StagedModel(name, each.module, cuts, config.pipeline, within="module") for name, each in averages.items()
    ]


def divide_models(models: Sequence[StagedModel], group: Group, init: ShardedInit, objects: Objects) -> None:
    """Leave each rank its stages of models, with the values of rank 0. On all ranks.

    A model that was built in `run.sharded_init` gets no other memory.
    """
    for staged in models:
        _divide_model(staged, group, init, objects)
    for module in objects.modules.values():  # an average counts its updates on all ranks
        if isinstance(module, AveragedModel):
            move(module, group.device)
            group.broadcast_tensors([tensor for _, tensor in list_tensors(module)])


def _divide_model(staged: StagedModel, group: Group, init: ShardedInit, objects: Objects) -> None:
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
    """The prepared objects of a run in which each rank has some stages of the model, and of averages of it.

    A snapshot has each tensor once, by its name: so any number of ranks resumes it.

    Args:
        divides: whether the ranks with the same stages divide the state of the optimizers.
    """

    def __init__(self, objects: Objects, group: Group, models: Sequence[StagedModel], *, divides: bool) -> None:
        self._positions = list_positions(group.ranks_per_replica, models[0].num_stages)  # of each stage
        self._models = models
        positions: dict[Tensor, int] = {}
        for tensor, position in self._list_tensors():
            positions.setdefault(tensor, position)  # of a tied one, the first stage
        super().__init__(objects, group, StageOwnership(group, positions, divides=divides))

    def check_optimizers(self) -> None:
        """Raise InvalidValue if an optimizer needs the gradients of all stages at once."""
        self._refuse_lbfgs("stages", "use another optimizer, or start with --pipeline-ranks 1")

    def _list_tensors(self) -> list[tuple[Tensor, int]]:
        """Return the parameters and buffers, with the position of a rank in a replica that holds them."""
        return [
            (tensor, self._positions[stage])
            for staged in self._models
            for module, stage in staged.stages.items()
            for _, tensor in list_tensors(module)
        ]

    def _find_writers(self, members: Sequence[int]) -> dict[Place, int]:
        writers: dict[Place, int] = {}
        for tensor, position in self._list_tensors():
            if tensor.numel() and not tensor.is_meta:
                writers.setdefault(locate(tensor), members[position])
        return writers | super()._find_writers(members)

    def _merge(self, of_ranks: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
        states = super()._merge(of_ranks)
        for staged in self._models:
            of_model = states[staged.name]
            for names in staged.list_shared():  # one tensor, also where it is on the meta device
                saved = [name for name in map(strip_compiled, names) if name in of_model]
                for name in saved[1:]:
                    of_model[name] = of_model[saved[0]]
        return states
