"""The workers of a run whose steps are rounds of DiLoCo: their optimizer, which has a state for each of them.

Each rank has the states of its own workers. A snapshot has those of all workers, so that the ranks can divide the
workers in another way when the run resumes.
"""

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from samestep.console import format_count
from samestep.errors import InvalidValue, UsageError
from samestep.nested import find_tensors
from samestep.plan.tree import build_layout
from samestep.snapshot.async_copy import Share, locate
from samestep.snapshot.serialization import SavedState
from samestep.snapshot.snapshotter import Snapshotter
from samestep.train.context import RunContext, refuse_beside
from samestep.train.divided_state import outline_states
from samestep.train.objects import GROUPS, STATE, Objects, list_params
from samestep.train.step import Step, StepObserver
from samestep.world.group import Group

INNER = "inner_optimizer"  # its name in `Objects`
STATES = f"{INNER}.workers"  # the name of the workers' states, which no argument of `Run.prepare` can have
Settings = dict[tuple[int, str], Any]  # number of an item of `list_settings`, name -> value


def list_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups, and as the last item its attributes that are numbers."""
    numbers = {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}
    return [*optimizer.param_groups, numbers]


def copy_settings(optimizer: torch.optim.Optimizer) -> Settings:
    """Return copies of an optimizer's settings."""
    return {
        (number, name): deepcopy(value)
        for number, item in enumerate(list_settings(optimizer))
        for name, value in item.items()
        if name not in ("params", "param_names")
    }


def are_equal(left: Any, right: Any) -> bool:
    """Compare two settings, which may hold tensors."""
    return left is right or all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip_longest(tree_leaves(left), tree_leaves(right))
    )


class WorkerStates:
    """The inner optimizer, with a state for each worker of this rank. Between two steps, the optimizer itself has none.

    Is an object with a state beside the inner optimizer, makes the inner steps of the engine's `WorkerSum`, and
    collects the states of all ranks for a snapshot.

    Args:
        objects: with the inner optimizer, and without this object.

    Attributes:
        count, inner_steps: as for `samestep.engine.worker_sum.WorkerUpdates`.
        optimizer: the inner optimizer.
    """

    def __init__(self, objects: Objects, group: Group, count: int, inner_steps: int) -> None:
        self.count = count
        self.inner_steps = inner_steps
        self.optimizer = objects.optimizers[INNER]
        self._objects = objects
        self._group = group
        self._states: dict[int, dict[Any, Any]] = {}
        # Of each worker, what its updates have changed: pairs of the script's value at that time and the worker's.
        self._own: dict[int, Settings] = {}
        for worker in build_layout(count, group.num_replicas).ranges[group.replica]:
            self._states[worker] = {param: deepcopy(state) for param, state in self.optimizer.state.items()}
            self._own[worker] = {}
        self.optimizer.state.clear()
        self._noted: list[Settings] | None = None  # when an update began; None between updates
        self._hook = self.optimizer.register_step_pre_hook(self._begin_update)

    def _keep_state(self, worker: int) -> None:
        """Move the optimizer's state to a worker."""
        self._states[worker] = dict(self.optimizer.state)
        self.optimizer.state.clear()

    def update(self, worker: int) -> None:
        """Update the parameters from their gradients, with the state of a worker of this rank.

        What the script's hooks change in the optimizer's settings holds for this update. What the update itself changes
        there belongs to the worker, until the script sets it again.
        """
        groups, attributes = self.optimizer.param_groups, vars(self.optimizer)
        holders = [*groups, attributes]
        common = [{**item} for item in list_settings(self.optimizer)]
        settings = copy_settings(self.optimizer)  # a hook can change a learning rate in place
        own = {at: pair for at, pair in self._own[worker].items() if are_equal(pair[0], settings.get(at))}
        settings |= {at: value for at, (_, value) in own.items()}
        for (number, name), value in settings.items():
            holders[number][name] = value
        self.optimizer.state.update(self._states[worker])
        self._hook.remove()
        self._hook = self.optimizer.register_step_pre_hook(self._begin_update)  # after the script's hooks
        noted: list[Settings] = []
        self._noted = noted
        self.optimizer.step()
        self._noted = None
        begun_with = noted[0]  # the step of a class may call that of its base class
        self._keep_state(worker)
        self._own[worker] = {
            (number, name): (deepcopy(common[number].get(name)), value)
            for (number, name), value in copy_settings(self.optimizer).items()
            if (number, name) in own or not are_equal(begun_with.get((number, name)), value)
        }
        for name in list_settings(self.optimizer)[-1]:
            del attributes[name]
        attributes.update(common.pop())
        for group, before in zip(groups, common, strict=True):
            group.clear()
            group.update(before)

    def _begin_update(self, *_: Any) -> None:
        """Note what an update of the run begins with, and refuse one of the script."""
        if self._noted is None:
            raise UsageError(
                "the script has called inner_optimizer.step(), which the run calls at the end of each inner step: "
                "remove the call; for what belongs before it, use inner_optimizer.register_step_pre_hook",
                code="SS615",
            )
        self._noted.append(copy_settings(self.optimizer))

    # --- snapshots --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank's workers, with the names of parameters."""
        names: dict[Any, str] = {param: name for name, param in self._objects.name_updated(INNER).items()}
        return {
            str(worker): {names.get(key, key): state for key, state in states.items()}
            | ({GROUPS: self._own[worker]} if self._own[worker] else {})
            for worker, states in self._states.items()
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the states of this rank's workers."""
        settings = self._objects.save_optimizer(INNER)
        for worker in self._states:
            states = dict(saved[str(worker)])
            self._own[worker] = states.pop(GROUPS, {})
            self._objects.load_optimizer(INNER, {**settings, STATE: states})
            self._keep_state(worker)

    def outline(self) -> tuple[dict[str, Any], Share]:
        """Return the objects' states, with tensors on the meta device for those of other ranks. On all ranks."""
        of_ranks = self._exchange_outlines()
        rank = self._group.rank
        own = {locate(tensor) for tensor in find_tensors(of_ranks[rank])}

        def is_mine(tensor: Tensor) -> bool:
            """Rank 0 stores what is the same on all ranks, too."""
            return not tensor.is_meta and (rank == 0 or locate(tensor) in own)

        return self._merge(of_ranks), Share(is_mine, rank, self._group.world_size)

    def collect(self) -> dict[str, Any]:
        """Return the objects' states, on rank 0 with those of all workers. On all ranks."""
        of_ranks = self._exchange_outlines()
        if self._group.rank:  # it has no values of the others
            own = of_ranks[self._group.rank]
            self._group.send(find_tensors(own), target=0)
            return self._merge([own])
        for source in range(1, self._group.world_size):
            of_ranks[source] = tree_map_only(Tensor, partial(torch.empty_like, device="cpu"), of_ranks[source])
            self._group.receive(find_tensors(of_ranks[source]), source)
        return self._merge(of_ranks)

    def select(self, saved: SavedState) -> dict[str, Any]:
        """Return the objects' states in a snapshot, without those of other ranks' workers."""
        objects = dict(saved.contents["objects"])
        objects[STATES] = {str(worker): objects[STATES][str(worker)] for worker in self._states}
        return objects

    def check_optimizers(self) -> None:
        """Raise InvalidValue if the inner optimizer updates other parameters than the others do together."""
        others = {
            param
            for optimizer in self._objects.optimizers.values()
            if optimizer is not self.optimizer
            for param in list_params(optimizer)
        }
        if others != {*list_params(self.optimizer)}:
            raise InvalidValue(
                "inner_optimizer has other parameters than the optimizers of the steps: give both the same ones",
                code="SS615",
            )

    def _exchange_outlines(self) -> list[dict[str, Any]]:
        """Return the workers' states of each rank. Tensors of other ranks are on the meta device."""
        own = self.state_dict()
        of_ranks = self._group.gather(outline_states(own))
        of_ranks[self._group.rank] = own
        return of_ranks

    def _merge(self, of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
        workers = {worker: states for of_rank in of_ranks for worker, states in of_rank.items()}
        return {**self._objects.save(), STATES: workers}


class CompleteSnapshots(StepObserver):
    """Waits for snapshots before a step, in which the inner steps change what is being copied."""

    def __init__(self, snapshotter: Snapshotter) -> None:
        self._snapshotter = snapshotter

    def begin_pass(self, step: Step) -> None:
        self._snapshotter.wait_until_written()


def open_workers(objects: Objects, context: RunContext) -> WorkerStates | None:
    """Return the workers of a run; None without workers.

    Raises:
        InvalidValue: there is an inner optimizer and no workers, or the reverse, or an option does not support workers.
    """
    config = context.config
    inner = objects.optimizers.get(INNER)
    if (inner is None) != (config.workers is None):
        raise InvalidValue(
            f"run.prepare got {'no' if inner is None else 'an'} {INNER}, and the run has "
            f"{'no workers' if config.workers is None else format_count(config.workers, 'worker')}: pass both "
            f"samestep.Run(workers=...) and run.prepare({INNER}=...), or none",
            code="SS104",
        )
    if config.workers is None or config.inner_steps is None:
        return None
    refuse_beside(
        "workers",
        {
            f'shard="{config.shard}"': config.shard is not None,
            "pipeline": config.pipeline is not None,
            'precision="fp16"': config.precision == "fp16",
            "check_compute_every": config.check_compute_every is not None,
            "LBFGS": isinstance(inner, torch.optim.LBFGS),
        },
        code="SS615",
    )
    return WorkerStates(objects, context.group, config.workers, config.inner_steps)
