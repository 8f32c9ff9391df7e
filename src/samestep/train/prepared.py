"""What `Run.prepare` builds from the script's objects."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from samestep.engine.passes import Gradients
from samestep.plan.memory import OUTSIDE, ParamSize
from samestep.snapshot.resume_point import ResumePoint
from samestep.snapshot.serialization import SavedState, encode
from samestep.snapshot.snapshotter import Snapshotter
from samestep.train.context import RunContext
from samestep.train.guards import calls
from samestep.train.guards.misuse import MisuseChecks
from samestep.train.guards.replicas import ReplicaChecks
from samestep.train.state.divided_state import DividedOptimizers
from samestep.train.state.object_checks import describe_models, find_held_optimizers, outline, refuse_shared_memory
from samestep.train.state.objects import Objects, list_params, name_optimizers, name_params, save, strip_compiled
from samestep.train.state.restoring import SnapshotContents
from samestep.train.state.run_state import RunState
from samestep.train.state.sharded_init import ShardedInit, check_states, is_partial
from samestep.train.state.sharded_state import (
    Blocks,
    ShardedState,
    check_options,
    find_blocks,
    refuse_sharded,
)
from samestep.train.step.interception import Interceptor
from samestep.train.step.steps import Step, StepObserver

read_groups = attrgetter("param_groups")
read_params = itemgetter("params")
Divided = DividedOptimizers | ShardedState  # state of which each rank holds a part


class TrainedParameters(StepObserver):
    """Passes the trained parameters to `Gradients`, again after each change by the script (add_param_group).

    Args:
        held: the optimizers that prepared objects hold.
    """

    def __init__(
        self, objects: Objects, modules: Mapping[str, nn.Module], gradients: Gradients, held: Iterable[Optimizer]
    ) -> None:
        self._modules = modules
        self._gradients = gradients
        self._optimizers = [*name_optimizers(objects).values(), *held]
        self._held: list[int] | None = None
        self.begin_pass()

    def begin_pass(self, step: Step | None = None) -> None:
        groups = chain.from_iterable(map(read_groups, self._optimizers))
        held = [*map(id, chain.from_iterable(map(read_params, groups)))]
        if held == self._held:
            return
        self._held = held
        wanted = {*held}
        trained: dict[int, tuple[str, nn.Parameter]] = {}
        others: list[nn.Parameter] = []
        for name, module in self._modules.items():
            for path, param in module.named_parameters():
                # Without an optimizer, all parameters are trained except those of averaged models.
                if id(param) in wanted if wanted else not isinstance(module, AveragedModel):
                    trained.setdefault(id(param), (f"{name}.{strip_compiled(path)}", param))
                else:
                    others.append(param)
        self._gradients.set_parameters([*trained.values()], [param for param in others if id(param) not in trained])


@dataclass(frozen=True)
class Prepared:
    """The script's objects, and what was built from them. The state of the run is restored.

    Attributes:
        objects: what was passed to `Run.prepare`.
        modules: the models among them, without wrappers.
        numbers: the numbers that identify the run, without those of the data.
        overrides: whether the script's settings and data replace those of the run.
        contents: builds and restores the state for a snapshot.
        gradients: computes the gradients of the models.
        divided: what is divided among the ranks.
        misuse, parameters, replicas: observers of the models.
        point: where the run resumed.
        shard_blocks: as for `Run.prepare`.
        places: the place of each parameter in the models, by id.
    """

    objects: Mapping[str, Any]
    modules: Mapping[str, nn.Module]
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
    places: Mapping[int, int]

    def sort(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Sort parameters by their places in the models: the script's order, such as of a set, may decide no bits.

        Tensors of no prepared model are last, in their order.
        """
        last = len(self.places)
        return sorted(params, key=lambda param: self.places.get(id(param), last))

    def collect_states(self) -> Callable[[], dict[str, Any]]:
        """Call on all ranks before a snapshot. Returns a function that returns the objects' states, whole on rank 0."""
        return partial(save, self.objects) if self.divided is None else self.divided.collect()

    def restore_again(self, context: RunContext) -> dict[str, Any]:
        """Restore the state in which the run resumed, see `SnapshotContents.restore_again`."""
        return self.contents.restore_again(_read(context.location.open(self.point), self.divided))


def prepare_objects(
    objects: Mapping[str, Any],
    modules: Mapping[str, nn.Module],
    context: RunContext,
    state: RunState,
    snapshotter: Snapshotter,
    interceptors: Sequence[Interceptor],
    *,
    override: bool,
    device_map: Literal["keep"] | None,
    shard_blocks: Blocks | None,
    sharded_init: ShardedInit,
) -> Prepared:
    """Make the models equal on all ranks, and restore everything from the newest snapshot. On all ranks.

    Arguments and errors as for `Run.prepare`. `modules`: see `Prepared`. `sharded_init`: has built the models, or parts
    of them.
    """
    config = context.config
    shard = config.shard if context.world_size > 1 else None
    refuse_sharded(modules)
    numbers = config.identity() | {"models": describe_models(modules)}
    overrides = override or config.override
    contents = SnapshotContents(objects, context.precision, context.say)
    context.group.check_process_group()
    calls.wait_for_call(context.group, calls.PREPARE)
    described = outline(objects, modules) | {**contents.options.in_force}
    context.group.agree(config.shared() | {"override": overrides} | described)
    check_states(objects)
    _place(modules, None if device_map == "keep" else context.device, None if shard == "fsdp2" else sharded_init)
    for interceptor in interceptors:
        interceptor.prepare(objects, modules)
    tensors = [tensor for module in modules.values() for tensor in (*module.parameters(), *module.buffers())]
    context.group.broadcast_tensors([each for each in tensors if not is_partial(each)])
    if context.location.path is not None:  # an Error for what cannot be saved comes now, not after the first epoch
        encode({name: state for name, state in save(objects).items() if not is_partial(objects[name])})
    point = context.location.find_resume_point(config.resume, numbers)
    saved = None if point.is_beginning else context.location.open(point)
    if saved is not None:
        contents.fit(saved.contents)
    held = find_held_optimizers(objects)
    if shard is not None:
        refuse_shared_memory(modules)
    optimizers: DividedOptimizers | None = None
    sharded: ShardedState | None = None
    gather = partial(calls.gather_after_step, context.group)
    if shard == "optimizer":
        wait = partial(calls.wait_for_call, context.group, calls.UPDATE)
        optimizers = DividedOptimizers(objects, held, context.group, gather, wait)
    elif shard == "fsdp2":
        check_options(device_map, context.group, [each.called for each in interceptors if not each.permits_fsdp2])
        sharded = ShardedState(objects, held, shard_blocks, context.group, gather, sharded_init)
    divided = optimizers or sharded
    if saved is not None:
        read = _read(saved, divided)
        meta = point.meta or {}
        contents.restore(read, meta.get("settings", {}), overrides=overrides)
        if sharded is not None:  # their settings are those of the run now
            sharded.check_optimizers()
        state.load_state_dict(read["position"], read["state"], meta, is_latest=config.resume == "latest")
        snapshotter.resume(point.step)
    gradients = Gradients(
        modules,
        context.group,
        context.precision,
        micro_batch_size=config.micro_batch_size,
        exchange_dtype=torch.bfloat16 if config.exchange_dtype == "bf16" else None,
        ownership=None if optimizers is None else optimizers.ownership,
        models=None if sharded is None else sharded.models,
    )
    return Prepared(
        objects=objects,
        modules=modules,
        numbers=numbers,
        overrides=overrides,
        contents=contents,
        gradients=gradients,
        divided=divided,
        misuse=MisuseChecks(objects, modules, held, divides=context.world_size > 1),
        parameters=TrainedParameters(objects, modules, gradients, held),
        replicas=ReplicaChecks(objects, context.group, config.compare_every, has_divided_state=shard is not None),
        point=point,
        shard_blocks=shard_blocks,
        places={number: place for place, number in enumerate(name_params(modules))},
    )


def _place(modules: Mapping[str, nn.Module], device: torch.device | None, init: ShardedInit | None) -> None:
    """Give memory to all parameters (`init`: None if they will be sharded), and move the models to the device.

    `fully_shard` moves a model of which a part has no memory yet.
    """
    for module in modules.values():
        if init is not None:
            init.fill(module)
        if device is not None and not is_partial(module):
            module.to(device)


def _read(saved: SavedState, divided: Divided | None) -> dict[str, Any]:
    """Return the content of a snapshot, with the tensors that this rank needs."""
    contents: dict[str, Any] = saved.fill(saved.contents) if divided is None else divided.read(saved)
    return contents


def measure_sizes(objects: Objects, modules: Mapping[str, nn.Module], blocks: Blocks | None) -> list[ParamSize]:
    """Return the sizes of the models' parameters, undivided.

    Call it after an update, which allocates the optimizers' state.

    Args:
        blocks: as `shard_blocks` of `Run.prepare`.
    """
    states = {
        id(param): _measure_state(param, optimizer)
        for optimizer in name_optimizers(objects).values()
        for param in list_params(optimizer)
    }
    homes: dict[int, int] = {}
    params: dict[int, nn.Parameter] = {}
    num_blocks = OUTSIDE
    for module in modules.values():
        for block in find_blocks(module, blocks):
            num_blocks += 1
            for param in block.parameters():
                homes.setdefault(id(param), num_blocks)
        params |= {id(param): param for param in module.parameters()}
    return [
        ParamSize(
            num_bytes=_count_bytes(param),
            num_rows=param.shape[0] if param.dim() else 1,
            gradient_bytes=_count_bytes(param) if param.requires_grad else 0,
            state_bytes=states.get(key, (0, 0))[0],
            small_bytes=states.get(key, (0, 0))[1],
            block=homes.get(key, OUTSIDE),
        )
        for key, param in params.items()
    ]


def _measure_state(param: Tensor, optimizer: Optimizer) -> tuple[int, int]:
    """Return the bytes of the tensors of the parameter's shape in its state, and of other tensors."""
    state = optimizer.state.get(param, {})
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    of_shape = sum(_count_bytes(each) for each in tensors if each.shape == param.shape)
    return of_shape, sum(map(_count_bytes, tensors)) - of_shape


def _count_bytes(tensor: Tensor) -> int:
    """Return the bytes of the whole tensor, also of one that is sharded."""
    return tensor.numel() * tensor.element_size()
