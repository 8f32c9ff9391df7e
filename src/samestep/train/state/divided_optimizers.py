"""Optimizers whose state is divided among the ranks: `Run(shard="optimizer")`.

Each rank gets the gradients of the parameters that it owns. torch's optimizers skip parameters without a gradient, so
each rank updates its own, and allocates state for these only. After the update, the owners send the parameters to the
other ranks. Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", stages 1
and 2. Unlike there, a rank owns whole tensors, so the division changes no bit, and optimizers that need whole tensors
(Muon, Shampoo, LARS, Adafactor) work.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.engine.owned_tensors import send_owned
from samestep.engine.ownership import Ownership
from samestep.errors import InvalidValue, UsageError
from samestep.snapshot.async_copy import locate
from samestep.snapshot.serialization import SavedState, decode, encode, list_tensors
from samestep.tagged import find_dtype, name_dtype
from samestep.torch_internals import watch_norms, watch_scalers
from samestep.train.state.alike_updates import AlikeUpdates
from samestep.train.state.names import STATE, list_by_name, list_params, name_params
from samestep.train.state.stateful import Objects, name_optimizers, refuse_held, states
from samestep.world.group import Group


class DividedOptimizers:
    """The prepared optimizers of a run whose state is divided among the ranks.

    Args:
        held: the optimizers that prepared objects hold.
        wait: returns when all ranks have called the step of an optimizer.
        say: prints a message on rank 0.

    Attributes:
        ownership: the owners of the parameters.

    Raises:
        InvalidValue: an optimizer cannot be divided.
    """

    def __init__(
        self,
        objects: Objects,
        held: Sequence[Optimizer],
        group: Group,
        wait: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.ownership = Ownership(group.rank, group.world_size)
        self._objects = objects
        self._optimizers = name_optimizers(objects)
        self._group = group
        self._wait = wait
        self._stored: dict[tuple[int, torch.Size], int] = {}  # tensor -> the rank that stores it
        refuse_held(objects, held, 'shard="optimizer" cannot divide')
        for name, optimizer in self._optimizers.items():
            if isinstance(optimizer, torch.optim.LBFGS):
                raise InvalidValue(
                    f"{name} is LBFGS, which needs the gradients of all parameters at once: leave out "
                    'shard="optimizer"',
                    code="SS606",
                )
            if not type(optimizer).__module__.startswith("torch."):
                say(
                    f'{name} is of class {type(optimizer).__name__}, which is not torch\'s: with shard="optimizer" it '
                    "must update each parameter from the gradient and state of this one alone (samestep verify "
                    "--shard none,optimizer compares)"
                )
            optimizer.register_step_post_hook(self._send_updated)
        self._updates = AlikeUpdates(self._optimizers, group, "optimizer")
        finalize(self, watch_norms(partial(_refuse_norm, self.ownership)))
        finalize(self, watch_scalers(partial(_refuse_scaler, {id(each) for each in self._optimizers.values()})))

    def _send_updated(self, optimizer: Optimizer, *_: Any) -> None:
        """After an update on all ranks, copy each parameter from its owner to the other ranks."""
        owned = self.ownership.list_owned(list_params(optimizer))
        self._wait()
        send_owned([[param.detach() for param in params] for params in owned], self._group)

    def drop_others(self) -> None:
        """Drop the state of parameters that other ranks own, such as after all of it was loaded from a snapshot."""
        for optimizer in self._optimizers.values():
            for param in [*optimizer.state]:
                if isinstance(param, Tensor) and not self.ownership.counts(param):
                    del optimizer.state[param]

    def outline(self) -> Callable[[], dict[str, Any]]:
        """Describe the states of this rank's parameters to the other ranks. On all ranks.

        Returns:
            A function that returns the objects' states, with tensors on the meta device for those of other ranks.

        Raises:
            InvalidValue: an optimizer keeps NumPy arrays for its parameters, or was not the same on all ranks.
        """
        rank = self._group.rank
        mine = {name: self._list_states(each) for name, each in self._optimizers.items()}
        _, outlines = self._exchange_outlines(mine)
        collected: dict[str, dict[str, Any]] = {name: {} for name in self._optimizers}
        for source, (structure, tensors) in enumerate(outlines):
            if array := next((name for name, shape in list_tensors(structure).items() if shape is None), None):
                raise InvalidValue(
                    f'{array} is a numpy array, which shard="optimizer" cannot divide: make it a tensor', code="SS606"
                )
            if source != rank:
                for name, of_params in decode(structure, tensors).items():
                    collected[name] |= of_params
        # A parameter is in the snapshot of its owner. They are equal on all ranks.
        params = [param for each in self._optimizers.values() for param in list_params(each)]
        self._stored = {(locate(param), param.shape): self.ownership.find(param) or 0 for param in params}
        for of_state in mine.values():
            self._stored |= {(locate(tensor), tensor.shape): rank for tensor in _list_tensors(of_state)}
        return lambda: self._merge_states(collected)

    def is_mine(self, tensor: Tensor) -> bool:
        """Return whether this rank stores a tensor of the states that `outline` has described."""
        if not tensor.numel():  # it has no memory to be known by
            return self._group.rank == 0
        return self._stored.get((locate(tensor), tensor.shape), 0) == self._group.rank

    def read(self, saved: SavedState) -> dict[str, Any]:
        """Return the content of a snapshot without the state of other ranks' parameters."""
        objects = dict(saved.contents["objects"])
        names = name_params(self._objects)
        params = {name: list_by_name(each, names) for name, each in self._optimizers.items()}
        self.ownership.assign(
            [
                param
                for name, of_one in params.items()
                for key, param in of_one.items()
                if isinstance(param, nn.Parameter) and (param.requires_grad or key in objects[name][STATE])
            ]
        )
        for name, of_one in params.items():
            of_params = objects[name][STATE].items()
            state = {key: each for key, each in of_params if self._counts(of_one.get(key))}
            objects[name] = {**objects[name], STATE: state}
        filled: dict[str, Any] = saved.fill({**saved.contents, "objects": objects})
        return filled

    def _counts(self, param: Tensor | None) -> bool:
        return param is None or self.ownership.counts(param)

    def collect(self) -> Callable[[], dict[str, Any]]:
        """Send the states of this rank's parameters to rank 0. On all ranks.

        Returns:
            A function that returns the objects' states, on rank 0 with those of the other ranks' parameters.
        """
        collected = self._collect()
        return lambda: self._merge_states(collected)

    def _collect(self) -> dict[str, dict[str, Any]]:
        rank = self._group.rank
        mine = {} if rank == 0 else {name: self._list_states(each) for name, each in self._optimizers.items()}
        tensors, outlines = self._exchange_outlines(mine)
        if rank != 0:
            self._group.send(tensors, target=0)
            return {}
        collected: dict[str, dict[str, Any]] = {name: {} for name in self._optimizers}
        for source, (structure, outlined) in enumerate(outlines[1:], start=1):
            received = {name: torch.empty_like(tensor, device="cpu") for name, tensor in outlined.items()}
            self._group.receive([*received.values()], source)
            for name, of_params in decode(structure, received).items():
                collected[name] |= of_params
        return collected

    def _exchange_outlines(self, mine: Mapping[str, Any]) -> tuple[list[Tensor], list[tuple[Any, dict[str, Tensor]]]]:
        """Describe states of this rank to the other ranks. On all ranks.

        Returns:
            The tensors in `mine`, and for each rank what `encode` returns, with tensors on the meta device unless they
            are empty.
        """
        self._updates.check()
        structure, tensors = encode(mine)
        described = [[name, name_dtype(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
        return [*tensors.values()], [
            (
                of_rank,
                {
                    name: torch.empty(shape, dtype=find_dtype(dtype), device="cpu" if 0 in shape else "meta")
                    for name, dtype, shape in rows
                },
            )
            for of_rank, rows in self._group.gather([structure, described])
        ]

    def _list_states(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the states of this rank's parameters. The script may have made states of others, too."""
        own = list_by_name(optimizer, name_params(self._objects)).items()
        return {name: optimizer.state[param] for name, param in own if self._counts(param) and param in optimizer.state}

    def _merge_states(self, collected: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the objects' states with those of other ranks' parameters, in the order of the parameters."""
        saved = states(self._objects)
        names = name_params(self._objects)
        for name, of_params in collected.items():
            params = list_by_name(self._optimizers[name], names)
            own = {key: state for key, state in saved[name][STATE].items() if self._counts(params.get(key))}
            merged = {**own, **of_params}
            keys = [key for key in params if key in merged] + [key for key in merged if key not in params]
            saved[name] = {**saved[name], STATE: {key: merged[key] for key in keys}}
        return saved


def _list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in the states of parameters."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _list_tensors(part)]


def _refuse_norm(ownership: Ownership, grads: Sequence[Tensor]) -> None:
    """Refuse to clip the gradients of this rank's parameters by their own norm."""
    mine = {id(grad) for grad in ownership.list_grads()}
    if any(id(grad) in mine for grad in grads):
        raise UsageError(
            'torch.nn.utils.clip_grad_norm_ (or get_total_norm) with shard="optimizer" sees the gradients of one rank '
            "only: call run.clip_grad_norm_, with the same arguments (max_norm=math.inf gives the norm alone)",
            code="SS610",
        )


def _refuse_scaler(optimizers: Collection[int], optimizer: Optimizer) -> None:
    """Refuse to skip an update because of the gradients of one rank. `optimizers`: the ids of the divided ones."""
    if id(optimizer) in optimizers:
        raise UsageError(
            'torch.amp.GradScaler with shard="optimizer" sees the gradients of one rank only, so it may skip an update '
            "on some ranks: leave it out, samestep.Run(precision='fp16') scales the loss itself",
            code="SS610",
        )
