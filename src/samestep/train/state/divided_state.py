"""State that the ranks divide, so that there are no replicas, and the one of `Run(shard="optimizer")`.

With it, each rank gets the gradients of the parameters that it owns. torch's optimizers skip parameters without a
gradient, so each rank updates its own, and allocates state for these only. After the update, the owners send the
parameters to the other ranks. Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter
models", stages 1 and 2. Unlike there, a rank owns whole tensors, so the division changes no bit, and optimizers that
need whole tensors (Muon, Shampoo, LARS, Adafactor) work.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from samestep.engine.ownership import Ownership, send_owned
from samestep.errors import InvalidValue, UsageError
from samestep.snapshot.async_copy import locate
from samestep.snapshot.serialization import SavedState, digest
from samestep.torch_internals import watch_norms
from samestep.train import calls
from samestep.train.state.objects import STATE, Objects, list_params, list_tensors
from samestep.world.group import Group
from samestep.world.transport import check_equal


class DividedState:
    """The prepared objects of a run whose ranks divide their state.

    Compares how often the ranks have called each optimizer, and with which settings.
    """

    def __init__(self, objects: Objects, group: Group) -> None:
        self._objects = objects
        self._group = group
        self._num_updates = dict.fromkeys(objects.optimizers, 0)
        for name, optimizer in objects.optimizers.items():
            optimizer.register_step_post_hook(lambda *_, name=name: self._count(name))
        finalize(self, watch_norms(partial(_refuse_norm, WeakSet(objects.optimizers.values()))))

    def _count(self, name: str) -> None:
        self._num_updates[name] += 1

    def _check_alike(self) -> None:
        """Raise InvalidValue if an optimizer has had other updates, or has other settings, on another rank."""
        facts: dict[str, Any] = {}
        for name, optimizer in self._objects.optimizers.items():
            facts[f"the number of calls of {name}.step()"] = self._num_updates[name]
            facts[f"the hash of the settings of {name} (param_groups)"] = digest(
                [{key: each for key, each in group.items() if key not in ("params", "param_names")}
                 for group in optimizer.param_groups]
            )  # fmt: skip
        check_equal(calls.gather_after_step(self._group, facts))


class DividedOptimizers(DividedState):
    """The prepared objects of a run whose optimizers' state is divided among the ranks.

    Attributes:
        ownership: the owners of the parameters.
    """

    def __init__(self, objects: Objects, group: Group) -> None:
        super().__init__(objects, group)
        self.ownership = Ownership(group.rank, group.world_size)
        self._stored: dict[tuple[int, torch.Size], int] = {}  # tensor -> the rank that stores it
        for optimizer in objects.optimizers.values():
            optimizer.register_step_post_hook(self._send_updated)

    def check_optimizers(self) -> None:
        """Raise InvalidValue if the state of an optimizer cannot be divided."""
        for name, optimizer in self._objects.optimizers.items():
            if isinstance(optimizer, torch.optim.LBFGS):
                raise InvalidValue(
                    f"{name} is LBFGS, which needs the gradients of all parameters at once: leave out "
                    'shard="optimizer"',
                    code="SS606",
                )

    def _send_updated(self, optimizer: Optimizer, *_: Any) -> None:
        """After an update on all ranks, copy each parameter from its owner to the other ranks."""
        owned = self.ownership.list_owned(list_params(optimizer))
        calls.wait_for_call(self._group, calls.UPDATE)
        send_owned([[param.detach() for param in params] for params in owned], self._group)

    def outline(self) -> Callable[[], dict[str, Any]]:
        """Describe the states of this rank's parameters to the other ranks. On all ranks.

        Returns:
            A function that returns the objects' states, with tensors on the meta device for those of other ranks.

        Raises:
            InvalidValue: an optimizer was not called alike on all ranks.
        """
        of_ranks = self._exchange_outlines()
        # A parameter is in the snapshot of its owner. They are equal on all ranks.
        params = [param for each in self._objects.optimizers.values() for param in list_params(each)]
        self._stored = {(locate(param), param.shape): self.ownership.find(param) or 0 for param in params}
        rank = self._group.rank
        self._stored |= {(locate(tensor), tensor.shape): rank for tensor in list_tensors(of_ranks[rank])}
        return lambda: self._merge(of_ranks)

    def is_mine(self, tensor: Tensor) -> bool:
        """Return whether this rank stores a tensor of the states that `outline` has described."""
        if not tensor.numel():  # it has no memory to be known by
            return self._group.rank == 0
        return self._stored.get((locate(tensor), tensor.shape), 0) == self._group.rank

    def select(self, saved: SavedState) -> dict[str, Any]:
        """Return the objects' states in a snapshot, without those of other ranks' parameters."""
        objects = dict(saved.contents["objects"])
        updated = self._name_params()
        self.ownership.assign(
            [
                param
                for name, params in updated.items()
                for path, param in params.items()
                if param.requires_grad or path in objects[name][STATE]
            ]
        )
        for name, params in updated.items():
            state = objects[name][STATE]
            foreign = {path for path, param in params.items() if not self.ownership.counts(param)}
            objects[name] = {**objects[name], STATE: {path: state[path] for path in state if path not in foreign}}
        return objects

    def _name_params(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return the parameters of each optimizer by name, in an order that all ranks share."""
        return {name: dict(sorted(self._objects.name_updated(name).items())) for name in self._objects.optimizers}

    def collect(self) -> Callable[[], dict[str, Any]]:
        """Send the states of this rank's parameters to rank 0. On all ranks.

        Returns:
            A function that returns the objects' states, on rank 0 with those of the other ranks' parameters.
        """
        of_ranks = self._exchange_outlines()
        if self._group.rank == 0:
            for source in range(1, self._group.world_size):
                of_ranks[source] = tree_map_only(
                    Tensor, lambda tensor: torch.empty_like(tensor, device="cpu"), of_ranks[source]
                )
                self._group.receive(list_tensors(of_ranks[source]), source)
        else:
            own = of_ranks[self._group.rank]
            self._group.send(list_tensors(own), target=0)
            of_ranks = [own]  # this rank has no values of the others
        return lambda: self._merge(of_ranks)

    def _exchange_outlines(self) -> list[dict[str, dict[str, Any]]]:
        """Return the states of each rank's parameters: optimizer -> parameter -> state. On all ranks.

        Tensors of other ranks are on the meta device, unless they are empty.
        """
        self._check_alike()
        own = {}
        for name, params in self._name_params().items():
            states = self._objects.optimizers[name].state
            own[name] = {
                path: states[param]
                for path, param in params.items()
                if param in states and self.ownership.counts(param)
            }
        outline = tree_map_only(Tensor, lambda tensor: tensor.to("meta") if tensor.numel() else tensor, own)
        of_ranks = self._group.gather(outline)
        of_ranks[self._group.rank] = own
        return of_ranks

    def _merge(self, of_ranks: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
        """Return the objects' states with those of all ranks' parameters."""
        saved = self._objects.save()
        for name, params in self._name_params().items():
            merged = {key: state for key, state in saved[name][STATE].items() if key not in params}  # of no parameter
            for of_rank in of_ranks:
                merged |= of_rank[name]
            saved[name] = {**saved[name], STATE: {key: merged[key] for key in sorted(merged, key=str)}}
        return saved


def _refuse_norm(optimizers: Iterable[Optimizer], grads: Sequence[Tensor]) -> None:
    """Refuse to clip this rank's part of the gradients by its own norm."""
    own = {id(param.grad) for optimizer in optimizers for param in list_params(optimizer) if param.grad is not None}
    if any(id(grad) in own for grad in grads):
        raise UsageError(
            "torch.nn.utils.clip_grad_norm_ (or get_total_norm) with shard= sees some of the gradients: "
            "call run.clip_grad_norm_, with the same arguments (max_norm=math.inf gives the norm alone)",
            code="SS610",
        )
