"""What `Run.prepare` builds from the script's objects."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import nn

from samestep.engine.gradient_averager import GradientAverager
from samestep.engine.ownership import Ownership
from samestep.engine.shards import ShardedModels
from samestep.snapshot.resume_point import ResumePoint
from samestep.snapshot.serialization import encode
from samestep.snapshot.snapshotter import Snapshotter
from samestep.train.context import RunContext
from samestep.train.guards import calls
from samestep.train.guards.misuse import MisuseChecks
from samestep.train.guards.parameters import TrainedParameters
from samestep.train.guards.replicas import ReplicaChecks
from samestep.train.state.divided_optimizers import DividedOptimizers
from samestep.train.state.restoring import Contents
from samestep.train.state.run_state import RunState
from samestep.train.state.sharded_state import Blocks, ShardedState, check_options
from samestep.train.state.stateful import describe_models, find_held_optimizers, outline, states
from samestep.train.step.interception import Interceptors


class Divided(Protocol):
    """State of which each rank holds a part."""

    def collect(self) -> Callable[[dict[str, Any]], None]:
        """Collect what other ranks hold. On all ranks. Returns a function that adds it to the objects' states."""

    def divide(self, contents: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the content of a snapshot as this rank's objects load it."""

    def drop_others(self) -> None:
        """Drop what other ranks hold, after the objects have loaded it."""


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
    """

    objects: Mapping[str, Any]
    modules: Mapping[str, nn.Module]
    numbers: Mapping[str, Any]
    overrides: bool
    contents: Contents
    gradients: GradientAverager
    divided: Divided | None
    misuse: MisuseChecks
    parameters: TrainedParameters
    replicas: ReplicaChecks
    point: ResumePoint

    def collect_others(self) -> Callable[[dict[str, Any]], None]:
        """Collect what other ranks hold of the objects' states. On all ranks. Returns a function that adds it."""
        return (lambda saved: None) if self.divided is None else self.divided.collect()


def prepare_objects(
    objects: Mapping[str, Any],
    modules: Mapping[str, nn.Module],
    context: RunContext,
    state: RunState,
    snapshotter: Snapshotter,
    interceptors: Interceptors,
    *,
    override: bool,
    device_map: Literal["keep"] | None,
    shard_blocks: Blocks | None,
) -> Prepared:
    """Make the models equal on all ranks, and restore everything from the newest snapshot. On all ranks.

    Arguments and errors as for `Run.prepare`. `modules`: see `Prepared`.
    """
    config = context.config
    numbers = config.identity() | {"models": describe_models(modules)}
    overrides = override or config.override
    contents = Contents(objects, modules, context.precision, context.say)
    context.group.check_process_group()
    calls.wait_for_call(context.group, calls.PREPARE)
    described = outline(objects, modules) | {**contents.options.in_force}
    context.group.agree(config.shared() | {"override": overrides} | described)
    if device_map is None:
        for module in modules.values():
            module.to(context.device)
    interceptors.prepare(objects, modules)
    context.group.broadcast_tensors([t for m in modules.values() for t in (*m.parameters(), *m.buffers())])
    if context.location.path is not None:
        encode(states(objects))  # an Error for what cannot be saved comes now, not after the first epoch
    is_divided = config.shard == "optimizer" and context.world_size > 1
    ownership = Ownership(context.rank, context.world_size) if is_divided else None
    held = find_held_optimizers(objects)
    point = context.location.find_resume_point(config.resume, numbers)
    divided: Divided | None = None
    models: ShardedModels | None = None
    if config.shard == "fsdp2" and context.world_size > 1:
        check_options(config, device_map)
        if not point.is_beginning:  # while everything is whole
            _restore(point, contents, context, state, overrides=overrides)
            snapshotter.resume(point)
        divided = sharded = ShardedState(objects, modules, held, shard_blocks, context.group)
        models = sharded.models
    gradients = GradientAverager(
        modules,
        context.group,
        context.precision,
        exact=config.reduction == "exact",
        bucket_cap_bytes=config.bucket_cap_bytes,
        micro_batch_size=config.micro_batch_size,
        ownership=ownership,
        models=models,
    )
    if ownership is not None:
        divided = DividedOptimizers(objects, held, ownership, context.group)
    if not point.is_beginning and models is None:
        _restore(point, contents, context, state, overrides=overrides)
        snapshotter.resume(point)
    parameters = TrainedParameters(objects, modules, gradients, held)
    if divided is not None:
        divided.drop_others()
    return Prepared(
        objects=objects,
        modules=modules,
        numbers=numbers,
        overrides=overrides,
        contents=contents,
        gradients=gradients,
        divided=divided,
        misuse=MisuseChecks(objects, modules, gradients, held),
        parameters=parameters,
        replicas=ReplicaChecks(objects, context.group, config.compare_every, has_divided_state=divided is not None),
        point=point,
    )


def _restore(point: ResumePoint, contents: Contents, context: RunContext, state: RunState, *, overrides: bool) -> None:
    saved = context.location.read(point)
    meta = point.meta or {}
    contents.restore(saved, meta.get("settings", {}), overrides=overrides)
    state.load_state_dict(saved["position"], saved["state"], meta, is_latest=context.config.resume == "latest")
