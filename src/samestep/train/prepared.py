"""What `Run.prepare` builds from the script's objects, and their state in a snapshot: built, and restored to them."""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from samestep.decoding import parse_json
from samestep.engine.leaf import run_backward_alone
from samestep.engine.ownership import Ownership
from samestep.engine.passes import Gradients, MixedPrecision
from samestep.errors import InvalidValue, RunDirectoryError, UsageError
from samestep.pipeline.runner import Pipeline
from samestep.pipeline.stages import StagedModel
from samestep.snapshot.location import Location
from samestep.snapshot.run_record import OVERRIDE, ResumePoint, StartOptions, describe_changes
from samestep.snapshot.serialization import SavedState
from samestep.snapshot.store import Store
from samestep.train.context import RunContext, refuse_beside
from samestep.train.divided_state import Blocks, DividedOptimizers, ShardedState, shard_as
from samestep.train.guards import Call, MisuseChecks, ReplicaChecks, wait_for_call
from samestep.train.interception import Interceptor
from samestep.train.objects import (
    GROUPS,
    Objects,
    check_states,
    describe_models,
    outline,
    refuse_shared_memory,
    save_module,
)
from samestep.train.sharded_init import ShardedInit, is_partial
from samestep.train.staged_state import StagedState, cut_models, divide_models
from samestep.train.step import PassRunner, Step, StepObserver
from samestep.train.workers import STATES, WorkerStates, open_workers
from samestep.world.environment import advise

read_groups = attrgetter("param_groups")
read_params = itemgetter("params")
Divided = DividedOptimizers | ShardedState | WorkerStates  # state that the ranks divide


class TrainedParameters(StepObserver):
    """Passes the trained parameters to `Gradients`, again after each change by the script (add_param_group)."""

    def __init__(self, objects: Objects, optimizers: Sequence[Optimizer], gradients: Gradients) -> None:
        self._objects = objects
        self._optimizers = optimizers
        self._gradients = gradients
        self._updated: list[int] | None = None
        self.begin_pass()

    def renew(self) -> None:
        """Pass the parameters to `Gradients` again when the next pass begins."""
        self._updated = None

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


class SnapshotContents:
    """Builds the state for a snapshot, and restores it.

    Attributes:
        options: settings of optimizers and schedulers.
    """

    def __init__(self, objects: Objects, precision: MixedPrecision, say: Callable[[str], None]) -> None:
        self._objects = objects
        self._precision = precision
        self._say = say
        self._frozen_at_start = self._list_frozen()
        self._overriding: dict[str, Any] | None = None  # the script's settings, see `read_overriding`
        self.options = StartOptions(read_settings(objects))

    def _list_frozen(self) -> list[str]:
        return [name for name, param in self._objects.name_params().items() if not param.requires_grad]

    def build(self, position: Mapping[str, Any], state: Any, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state for a snapshot.

        Args:
            state: `run.state`.
            objects: the objects' states.
        """
        return {
            "objects": objects,
            "position": {
                **position,
                "frozen": self._list_frozen(),
                "frozen_at_start": self._frozen_at_start,
                "precision": self._precision.state_dict(),
            },
            "state": state,
        }

    def fit(self, contents: Mapping[str, Any]) -> None:
        """Add the parameter groups that only the snapshot has, before the state is divided among the ranks.

        Raises:
            RunDirectoryError: the objects in the snapshot have other names.
        """
        names = self._objects.by_name.keys()
        saved = contents["objects"]
        if names != saved.keys():
            raise RunDirectoryError(
                f"the snapshot holds {', '.join(saved)}, and run.prepare got {', '.join(names)}: pass the same names",
                code="SS412",
            )
        self._objects.add_groups(saved)

    def restore(self, contents: Mapping[str, Any], begun_with: Mapping[str, Any], *, overrides: bool) -> None:
        """Restore all objects, and compare the script's settings of optimizers and schedulers with the run's.

        Called after `fit`.

        Args:
            begun_with: the settings that the run used when the snapshot was written.
            overrides: whether the script's settings replace them.

        Raises:
            RunDirectoryError: a state does not fit its object.
        """
        asked = self.options.in_force
        before = {name: begun_with[name] for name in asked if begun_with.get(name, asked[name]) != asked[name]}
        if before:
            now = {name: asked[name] for name in before}
            how = describe_changes(before, now)
            if overrides:
                self._overriding = read_overriding(self._objects, contents["objects"])
                self.options = StartOptions(asked, overridden=OVERRIDE + how)
            else:
                self.options = StartOptions({**asked, **before}, now)
                self._say(
                    f"the run continues with the settings of its first start, not with the script's "
                    f"({how}): for the script's, pass override=True to run.prepare, or start with "
                    f"{advise(override=True)}"
                )
        self.restore_again(contents)

    def restore_again(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """Undo changes since `restore`, by the script's lines before the loop.

        Returns:
            `run.state`.
        """
        saved = contents["objects"]
        if self._overriding is not None:
            saved = override(self._objects, saved, self._overriding)
        self._objects.load(saved)
        position = contents["position"]
        self._precision.load_state_dict(position["precision"])
        # Where the script freezes other parameters than before, it was changed on purpose.
        if position["frozen_at_start"] == self._frozen_at_start:
            for name, param in self._objects.name_params().items():
                param.requires_grad_(name not in position["frozen"])
        return contents["state"]  # type: ignore[no-any-return]


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
        runner: runs the functions of micro-batches in another way than by calling them; None: none does.
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
    runner: PassRunner | None

    def sort(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Sort parameters as in the models: the script's order, such as of a set, may decide no bits.

        Tensors of no prepared model are last, in their order.
        """
        return sorted(params, key=lambda param: self.order.get(id(param), len(self.order)))

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
    stages: Sequence[str] | None,
) -> Prepared:
    """Make the models equal on all ranks, and restore everything from the newest snapshot. On all ranks.

    Arguments and errors as for `Run.prepare`. `sharded_init`: has built the models, or modules in them.
    """
    config = context.config
    group = context.group
    shard = config.shard if context.world_size > 1 else None
    workers = open_workers(objects, context)
    if workers is not None:
        objects = Objects({**objects.by_name, STATES: workers})
    models = describe_models(objects)
    staged = cut_models(objects, context, stages, keeps_devices=device_map is not None)
    cuts = {"stages": [*staged[0].cuts]} if staged else {}
    numbers = config.identity() | {"models": models} | cuts
    overrides = override or config.override
    contents = SnapshotContents(objects, context.precision, context.say)
    group.check_process_group()
    wait_for_call(group, Call.PREPARE)
    group.agree(
        config.shared() | cuts | {"override": overrides} | outline(objects, models) | {**contents.options.in_force}
    )
    parted = staged if group.ranks_per_replica > 1 else []  # of which each rank has some stages
    _place_models(objects, context, interceptors, sharded_init, parted, shard, keeps_devices=device_map is not None)
    inner = check_states(objects, are_saved=context.location.path is not None)
    point = context.location.find_resume_point(config.resume, numbers)
    saved = None if point.is_beginning else context.location.open(point)
    if saved is not None:
        contents.fit(saved.contents)
    if shard is not None:
        refuse_shared_memory(objects)
    if (shard is not None or staged) and inner:
        what = "pipeline" if shard is None else f'shard="{shard}"'
        raise InvalidValue(
            f"{what} cannot divide an optimizer inside another object of run.prepare: pass the optimizer itself, or "
            f"leave {what.partition('=')[0]} out",
            code="SS606",
        )
    divided: Divided | None = workers
    if parted:
        divided = StagedState(objects, group, parted, divides=shard is not None and group.num_replicas > 1)
    elif shard == "optimizer":
        divided = DividedOptimizers(objects, group, Ownership(group, config.shard_copies))
    elif shard == "fsdp2":
        refuse_beside(
            'shard="fsdp2"',
            {
                **{each.called: True for each in interceptors if not each.permits_fsdp2},
                'device_map="keep"': device_map is not None,
                'backend="gloo" on a GPU': group.needs_staging(context.device),  # FSDP2 passes it tensors on the GPU
            },
            code="SS608",
        )
        divided = ShardedState(objects, shard_blocks, group, sharded_init)
    if saved is not None:
        read = _read(saved, divided)
        meta = point.meta or {}
        contents.restore(read, meta.get("settings", {}), overrides=overrides)
        context.state.load_state_dict(read["position"], read["state"], meta, is_latest=config.resume == "latest")
    if divided is not None:  # the optimizers' settings are those of the run now
        divided.check_optimizers()
    runner = Pipeline(staged, group) if staged else None
    gradients = Gradients(
        objects.modules,
        group,
        context.precision,
        micro_batch_size=config.micro_batch_size,
        exchange_dtype=torch.bfloat16 if config.exchange_dtype == "bf16" else None,
        ownership=divided.ownership if isinstance(divided, DividedOptimizers) else None,
        models=divided.models if isinstance(divided, ShardedState) else None,
        run_backward=run_backward_alone if runner is None else runner.run_backward,
        tied=None if runner is None else runner.tied,
        workers=workers,
    )
    optimizers = [*objects.optimizers.values(), *inner]
    return Prepared(
        objects=objects,
        numbers=numbers,
        overrides=overrides,
        contents=contents,
        gradients=gradients,
        divided=divided,
        misuse=MisuseChecks(objects, optimizers, context, None if workers is None else workers.optimizer),
        parameters=TrainedParameters(objects, optimizers, gradients),
        replicas=ReplicaChecks(objects, context),
        point=point,
        shard_blocks=shard_blocks,
        order={id(param): number for number, param in enumerate(objects.name_params().values())},
        interceptors=interceptors,
        runner=runner,
    )


def _place_models(
    objects: Objects,
    context: RunContext,
    interceptors: Sequence[Interceptor],
    sharded_init: ShardedInit,
    parted: Sequence[StagedModel],
    shard: str | None,
    *,
    keeps_devices: bool,
) -> None:
    """Give the models memory on their device, and the values of rank 0. On all ranks.

    Args:
        parted: the models of which each rank gets some stages; none: a rank gets all of each model.
        shard: what is divided; "fsdp2" gives memory to one block after the other, later.
    """
    group = context.group
    if parted:
        divide_models(parted, group, sharded_init, objects)
    whole = [] if parted else [*objects.modules.values()]
    for module in whole:
        if shard != "fsdp2":
            sharded_init.fill(module)
        if not keeps_devices and not is_partial(module):
            module.to(context.device)
    for interceptor in interceptors:
        interceptor.prepare(objects.modules)
    tensors = [each for module in whole for each in (*module.parameters(), *module.buffers())]
    group.broadcast_tensors([each for each in tensors if not is_partial(each)])


def _read(saved: SavedState, divided: Divided | None) -> dict[str, Any]:
    """Return the content of a snapshot, with the tensors that this rank needs."""
    own = {} if divided is None else {"objects": divided.select(saved)}
    return saved.fill({**saved.contents, **own})  # type: ignore[no-any-return]


def restore_models(location: Location, modules: Mapping[str, nn.Module], which: int | str, *, may_lack: bool) -> bool:
    """Load the parameters and buffers of a snapshot into models, in place. On all ranks.

    Only rank 0 reads the snapshot, because other nodes may not have it. It sends one value at a time; of a sharded
    model, each rank keeps its rows.

    Args:
        modules: the run's models.
        which: as for `Store.find`.
        may_lack: whether to do nothing if there is no such snapshot: a trial of a few steps may not reach it.

    Returns:
        Whether the models were loaded.

    Raises:
        Error: as in `Run.restore`.
    """
    if location.path is None:
        raise UsageError(
            "run.restore needs snapshots, and this run has no directory: name one in samestep.Run(...)", code="SS221"
        )
    store = Store(location.path, location.named)

    @cache  # on rank 0, which may be another one after a death
    def open_saved() -> SavedState:
        found = location.find(which)
        if found is None:
            raise RunDirectoryError(f"there is no snapshot in {location.shown} yet", code="SS411")
        return store.open(found)

    def find() -> dict[str, list[str]] | None:
        if may_lack and not any(each.matches(which) for each in store.snapshots()):
            return None
        return {name: [*open_saved().contents["objects"][name]] for name in modules}

    def read(name: str, key: str) -> Any:
        saved = open_saved()
        return saved.fill(saved.contents["objects"][name][key])

    keys = location.group.once(find)
    if keys is None:
        return False
    for name, module in modules.items():
        state = save_module(module)  # with the versions of its modules
        saved = {key: shard_as(state.get(key), location.group.once(read, name, key)) for key in keys[name]}
        state.clear()
        state.update(saved)
        Objects({name: module}).load({name: state})
    return True


def read_settings(objects: Objects) -> dict[str, Any]:
    """Return the settings of all optimizers and schedulers as JSON, by names such as "optimizer.lr".

    Call it before the objects are restored. Learning rates are the initial ones, from which schedulers start. A setting
    that JSON does not have, such as a function, is left out.
    """
    found: list[tuple[str, Any]] = []
    for name, optimizer in objects.optimizers.items():
        groups = optimizer.param_groups
        for key in sorted(_list_options(optimizer)):
            values = [group.get("initial_lr", group["lr"]) if key == "lr" else group.get(key) for group in groups]
            found.append((f"{name}.{key}", values[0] if all(v == values[0] for v in values) else values))
    for name, thing in objects.by_name.items():
        if isinstance(thing, LRScheduler):
            found += [(name, type(thing).__name__), *_list_schedule(name, thing.state_dict())]
    settings = {}
    for name, value in found:
        with suppress(TypeError, ValueError):
            settings[name] = parse_json(json.dumps(value, default=Tensor.tolist, allow_nan=False))
    return settings


def read_overriding(objects: Objects, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the script's settings at the position of a snapshot, for `override`.

    Call it before the objects are restored: it steps the script's schedulers to their positions in the snapshot.
    `ReduceLROnPlateau`, whose position follows from values that it was given, is left out.

    Returns:
        The state of each scheduler, and the options of the groups of each optimizer, by name.
    """
    schedules = {
        name: thing
        for name, thing in objects.by_name.items()
        if isinstance(thing, LRScheduler) and not isinstance(thing, ReduceLROnPlateau)
    }
    counts = {name: _read_position(saved[name]) for name in schedules}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about schedulers that are stepped before their optimizer
        for step in range(max(counts.values(), default=0)):
            for name, schedule in schedules.items():
                if step < counts[name]:
                    schedule.step()
    found: dict[str, Any] = {name: schedule.state_dict() for name, schedule in schedules.items()}
    for name, optimizer in objects.optimizers.items():
        options = _list_options(optimizer) | {"initial_lr"}
        found[name] = [
            {key: value for key, value in group.items() if key in options} for group in optimizer.param_groups
        ]
    return deepcopy(found)


def override(objects: Objects, saved: Mapping[str, Any], overriding: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects' saved states with the settings of `read_overriding`."""
    changed = {**saved, **overriding}
    for name in objects.optimizers:
        pairs = zip(saved[name][GROUPS], overriding[name], strict=False)
        changed[name] = {**saved[name], GROUPS: [{**group, **options} for group, options in pairs]}
    return changed


def _list_options(optimizer: Optimizer) -> set[str]:
    return {key for group in optimizer.param_groups for key in group} - {"params", "param_names", "initial_lr"}


def _read_position(saved: Mapping[str, Any]) -> int:
    """Return how often a scheduler was stepped. A chained scheduler has only the positions of those that it chains."""
    return int(saved["last_epoch"] if "last_epoch" in saved else _read_position(saved["_schedulers"][0]))


def _list_schedule(name: str, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """List the settings of a scheduler, and of those that it chains."""
    for key, value in state.items():
        if not key.startswith("_") and key not in ("last_epoch", "base_lrs"):
            yield f"{name}.{key}", value
    for number, inner in enumerate(state.get("_schedulers", ())):
        yield from _list_schedule(f"{name}[{number}]", inner)
