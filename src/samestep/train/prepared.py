"""What `Run.prepare` builds from the script's objects."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from samestep.engine.passes import Gradients
from samestep.errors import InvalidValue
from samestep.plan.shards import OUTSIDE, ParamSize
from samestep.snapshot.run_record import ResumePoint
from samestep.snapshot.serialization import SavedState
from samestep.train.context import RunContext
from samestep.train.divided_state import Blocks, DividedOptimizers, ShardedState, find_blocks
from samestep.train.guards import Call, MisuseChecks, ReplicaChecks, wait_for_call
from samestep.train.interception import Interceptor
from samestep.train.objects import (
    Objects,
    check_states,
    describe_models,
    list_tensors,
    outline,
    refuse_shared_memory,
)
from samestep.train.restoring import SnapshotContents
from samestep.train.sharded_init import ShardedInit, is_partial
from samestep.train.step import Step, StepObserver

read_groups = attrgetter("param_groups")
read_params = itemgetter("params")
Divided = DividedOptimizers | ShardedState  # state that the ranks divide


class TrainedParameters(StepObserver):
    """Passes the trained parameters to `Gradients`, again after each change by the script (add_param_group)."""

    def __init__(self, objects: Objects, optimizers: Sequence[Optimizer], gradients: Gradients) -> None:
        self._objects = objects
        self._optimizers = optimizers
        self._gradients = gradients
        self._updated: list[int] | None = None
        self.begin_pass()

    def begin_pass(self, step: Step | None = None) -> None:
        groups = chain.from_iterable(map(read_groups, self._optimizers))
        updated = [*map(id, chain.from_iterable(map(read_params, groups)))]
        if updated == self._updated:
            return
        self._updated = updated
        # Without an optimizer, all parameters are trained except those of averaged models.
        models = [each for each in self._objects.modules.values() if not isinstance(each, AveragedModel)]
        wanted = {*updated} or {id(param) for model in models for param in model.parameters()}
        params = self._objects.name_params().items()
        trained = [(name, param) for name, param in params if id(param) in wanted]
        self._gradients.set_parameters(trained, [param for _, param in params if id(param) not in wanted])


@dataclass(frozen=True)
class Prepared:
    """The script's objects, and what was built from them. The state of the run is restored.

    Attributes:
        objects: what was passed to `Run.prepare`.
        numbers: the numbers that identify the run, without those of the data.
        overrides: whether the script's settings and data replace those of the run.
        contents: builds and restores the state for a snapshot.
        gradients: computes the gradients of the models.
        divided: what is divided among the ranks.
        misuse, parameters, replicas: observers of the models.
        point: where the run resumed.
        shard_blocks: as for `Run.prepare`.
        order: the number of each parameter in the models, by id.
        interceptors: change what the run does.
    """

    objects: Objects
    numbers: Mapping[str, Any]
    overrides: bool
    contents: SnapshotContents
    gradients: Gradients
    divided: Divided | None
    misuse: MisuseChecks
    parameters: TrainedParameters
    replicas: ReplicaChecks
    point: ResumePoint
    shard_blocks: Blocks | None
    order: Mapping[int, int]
    interceptors: Sequence[Interceptor]

    def sort(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Sort parameters as in the models: the script's order, such as of a set, may decide no bits.

        Tensors of no prepared model are last, in their order.
        """
        last = len(self.order)
        return sorted(params, key=lambda param: self.order.get(id(param), last))

    def collect_states(self) -> dict[str, Any]:
        """Return the objects' states, whole on rank 0. On all ranks."""
        return self.objects.save() if self.divided is None else self.divided.collect()

    def restore_again(self, context: RunContext) -> dict[str, Any]:
        """Restore the state in which the run resumed, see `SnapshotContents.restore_again`."""
        return self.contents.restore_again(_read(context.location.open(self.point), self.divided))


def prepare_objects(
    objects: Objects,
    context: RunContext,
    interceptors: Sequence[Interceptor],
    sharded_init: ShardedInit,
    *,
    override: bool,
    device_map: Literal["keep"] | None,
    shard_blocks: Blocks | None,
) -> Prepared:
    """Make the models equal on all ranks, and restore everything from the newest snapshot. On all ranks.

    Arguments and errors as for `Run.prepare`. `sharded_init`: has built the models, or modules in them.
    """
    config = context.config
    group = context.group
    shard = config.shard if context.world_size > 1 else None
    models = describe_models(objects)
    numbers = config.identity() | {"models": models}
    overrides = override or config.override
    contents = SnapshotContents(objects, context.precision, context.say)
    group.check_process_group()
    wait_for_call(group, Call.PREPARE)
    group.agree(config.shared() | {"override": overrides} | outline(objects, models) | {**contents.options.in_force})
    for module in objects.modules.values():
        if shard != "fsdp2":  # which gives memory to one block after the other
            sharded_init.fill(module)
        if device_map is None and not is_partial(module):
            module.to(context.device)
    for interceptor in interceptors:
        interceptor.prepare(objects.modules)
    tensors = [each for module in objects.modules.values() for each in (*module.parameters(), *module.buffers())]
    group.broadcast_tensors([each for each in tensors if not is_partial(each)])
    inner = check_states(objects, are_saved=context.location.path is not None)
    point = context.location.find_resume_point(config.resume, numbers)
    saved = None if point.is_beginning else context.location.open(point)
    if saved is not None:
        contents.fit(saved.contents)
    if shard is not None:
        refuse_shared_memory(objects)
        if inner:
            raise InvalidValue(
                f'shard="{shard}" cannot divide an optimizer inside another object of run.prepare: pass the optimizer '
                "itself, or leave shard out",
                code="SS606",
            )
    divided: Divided | None = None
    if shard == "optimizer":
        divided = DividedOptimizers(objects, group)
    elif shard == "fsdp2":
        _refuse_with_fsdp2(context, interceptors, device_map)
        divided = ShardedState(objects, shard_blocks, group, sharded_init)
    if saved is not None:
        read = _read(saved, divided)
        meta = point.meta or {}
        contents.restore(read, meta.get("settings", {}), overrides=overrides)
        context.state.load_state_dict(read["position"], read["state"], meta, is_latest=config.resume == "latest")
    if divided is not None:  # the optimizers' settings are those of the run now
        divided.check_optimizers()
    gradients = Gradients(
        objects.modules,
        group,
        context.precision,
        micro_batch_size=config.micro_batch_size,
        exchange_dtype=torch.bfloat16 if config.exchange_dtype == "bf16" else None,
        ownership=divided.ownership if isinstance(divided, DividedOptimizers) else None,
        models=divided.models if isinstance(divided, ShardedState) else None,
    )
    optimizers = [*objects.optimizers.values(), *inner]
    return Prepared(
        objects=objects,
        numbers=numbers,
        overrides=overrides,
        contents=contents,
        gradients=gradients,
        divided=divided,
        misuse=MisuseChecks(objects, optimizers, context),
        parameters=TrainedParameters(objects, optimizers, gradients),
        replicas=ReplicaChecks(objects, context),
        point=point,
        shard_blocks=shard_blocks,
        order={id(param): number for number, param in enumerate(objects.name_params().values())},
        interceptors=interceptors,
    )


def _refuse_with_fsdp2(context: RunContext, interceptors: Sequence[Interceptor], device_map: str | None) -> None:
    """Refuse options that sharded models do not have. Raises InvalidValue."""
    refused = [each.called for each in interceptors if not each.permits_fsdp2]
    if device_map is not None:
        refused.append('device_map="keep"')
    if context.group.needs_staging(context.device):  # FSDP2 passes it tensors on the GPU
        refused.append('backend="gloo" on a GPU')
    if refused:
        raise InvalidValue(f'{refused[0]} is not available with shard="fsdp2": leave one of them out', code="SS608")


def _read(saved: SavedState, divided: Divided | None) -> dict[str, Any]:
    """Return the content of a snapshot, with the tensors that this rank needs."""
    own = {} if divided is None else {"objects": divided.select(saved)}
    contents: dict[str, Any] = saved.fill({**saved.contents, **own})
    return contents


def measure_sizes(objects: Objects, blocks: Blocks | None) -> list[ParamSize]:
    """Return the sizes of the models' parameters, undivided: `nbytes` is that of all slices of a tensor.

    Call it after an update, which allocates the optimizers' state.

    Args:
        blocks: as `shard_blocks` of `Run.prepare`.
    """
    states = {id(p): state for optimizer in objects.optimizers.values() for p, state in optimizer.state.items()}
    found = [block for module in objects.modules.values() for block in find_blocks(module, blocks)]
    homes: dict[int, int] = {}
    for number, block in enumerate(found, start=OUTSIDE + 1):
        for param in block.parameters():
            homes.setdefault(id(param), number)
    sizes = []
    for param in objects.name_params().values():
        tensors = list_tensors(states.get(id(param)))
        of_shape = sum(each.nbytes for each in tensors if each.shape == param.shape)
        sizes.append(
            ParamSize(
                num_bytes=param.nbytes,
                num_rows=param.shape[0] if param.dim() else 1,
                gradient_bytes=param.nbytes if param.requires_grad else 0,
                state_bytes=of_shape,
                small_bytes=sum(each.nbytes for each in tensors) - of_shape,
                block=homes.get(id(param), OUTSIDE),
            )
        )
    return sizes
