"""State that the ranks divide, so that there are no replicas: `Run(shard="optimizer")` and `Run(shard="fsdp2")`.

With "optimizer", each rank gets the gradients of the parameters that it owns. torch's optimizers skip parameters
without a gradient, so each rank updates its own, and allocates state for these only. After the update, the owners send
the parameters to the other ranks. Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion
parameter models", stages 1 and 2. Unlike there, a rank owns whole tensors, so the division changes no bit, and
optimizers that need whole tensors (Muon, Shampoo, LARS, Adafactor) work.

With "fsdp2", torch's `fully_shard` (FSDP2) keeps 1/W of each parameter on each rank, and gathers a block of the model
when it runs. The optimizers then update shards. Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded
data parallel".
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from samestep.engine.ownership import Ownership, send_owned
from samestep.engine.sharded_unit import ShardedModels, ShardedUnit
from samestep.errors import InvalidValue, UsageError
from samestep.nested import find_tensors
from samestep.snapshot.async_copy import Place, Share, locate
from samestep.snapshot.serialization import SavedState, digest
from samestep.torch_internals import (
    find_first_row,
    gather_whole,
    get_local,
    is_sharded,
    observe_norms,
    shard_like,
)
from samestep.train.guards import Call, gather_after_step, wait_for_call
from samestep.train.objects import STATE, Objects, list_params, save_module
from samestep.train.sharded_init import ShardedInit
from samestep.world.group import Group
from samestep.world.host import find_block_size
from samestep.world.transport import check_equal


class DividedState:
    """The prepared objects of a run whose ranks divide their state.

    Compares how often the ranks have called each optimizer, and with which settings.
    """

    def __init__(self, objects: Objects, group: Group) -> None:
        self._objects = objects
        self._group = group
        self._num_updates = Counter[Optimizer]()
        for optimizer in objects.optimizers.values():
            optimizer.register_step_post_hook(self._count)
        finalize(self, observe_norms(partial(_refuse_norm, WeakSet(objects.optimizers.values()))))

    def select(self, saved: SavedState) -> dict[str, Any]:
        """Return the objects' states in a snapshot, with what this rank has of the models."""
        objects = dict(saved.contents["objects"])
        for name, module in self._objects.modules.items():
            now = save_module(module)
            objects[name] = copy(objects[name])  # with the versions of the modules
            for key, value in objects[name].items():
                objects[name][key] = shard_as(now.get(key), value, saved.read_rows)
        return objects

    def _count(self, optimizer: Optimizer, *_: Any) -> None:
        self._num_updates[optimizer] += 1

    def _check_alike(self) -> None:
        """Raise InvalidValue if an optimizer has had other updates, or has other settings, on another rank."""
        facts: dict[str, Any] = {}
        for name, optimizer in self._objects.optimizers.items():
            facts[f"the number of calls of {name}.step()"] = self._num_updates[optimizer]
            facts[f"the hash of the settings of {name} (param_groups)"] = digest(
                [{key: each for key, each in group.items() if key not in ("params", "param_names")}
                 for group in optimizer.param_groups]
            )  # fmt: skip
        check_equal(gather_after_step(self._group, facts))


class DividedOptimizers(DividedState):
    """The prepared objects of a run in which each rank updates some parameters, and holds their state.

    Args:
        ownership: the owners of the parameters.
    """

    def __init__(self, objects: Objects, group: Group, ownership: Ownership) -> None:
        super().__init__(objects, group)
        self.ownership = ownership
        self._num_ranks = len(ownership.members)
        for optimizer in objects.optimizers.values() if ownership.divides else ():
            optimizer.register_step_post_hook(self._send_updated)

    def check_optimizers(self) -> None:
        """Raise InvalidValue if the state of an optimizer cannot be divided."""
        self._refuse_lbfgs("parameters", 'leave out shard="optimizer"')

    def _refuse_lbfgs(self, divided: str, remedy: str) -> None:
        for name, optimizer in self._objects.optimizers.items():
            if isinstance(optimizer, torch.optim.LBFGS):
                raise InvalidValue(
                    f"{name} is LBFGS, which needs the gradients of all {divided} at once: {remedy}", code="SS606"
                )

    def _send_updated(self, optimizer: Optimizer, *_: Any) -> None:
        """After an update on all ranks, copy each parameter from its first owner to the other ranks that hold it."""
        params = list_params(optimizer)

        def send() -> None:
            owned = self.ownership.list_owned(params)
            send_owned([[param.detach() for param in of_rank] for of_rank in owned], self._group)

        wait_for_call(self._group, Call.UPDATE)
        self._group.complete(send, on_device=True)  # after a death again, from the other owner, which has updated, too

    def note_exchange(self, num_ranks: int) -> None:
        """Note how many ranks took part in the exchange of the last step. The next step may be in another loop."""
        self._num_ranks = num_ranks

    @property
    def lacks_copies(self) -> bool:
        """Whether ranks had died by the last exchange, and the copies that they had are not made again."""
        return self._num_ranks < len(self.ownership.members)

    def copy_lost(self) -> None:
        """Give each parameter that has lost an owner a new one, with a copy of its state. On all ranks.

        Call it when no gradient waits for its update: the new owner does not have it.
        """
        members, owners, copied = self._group.complete(self._copy_lost)
        self.ownership.move(members, owners)
        for optimizer, param, state in copied:
            optimizer.state[param] = state

    def _copy_lost(self) -> tuple[Sequence[int], dict[int, tuple[int, ...]], list[tuple[Optimizer, Tensor, Any]]]:
        """Send state to new owners. Returns the ranks, the owners of each parameter, and what has come to this rank."""
        group = self._group
        members = group.members
        owners = self.ownership.replace_dead(members)
        moves = [
            (self._objects.optimizers[name], f"{name}.{path}", param, owners[id(param)])
            for name, params in self._name_params().items()
            for path, param in params.items()
            if len(owners.get(id(param), ())) > 1 and owners[id(param)] != self.ownership.find(param)
        ]
        own = {
            path: optimizer.state[param]
            for optimizer, path, param, (source, _) in moves
            if source == group.number and param in optimizer.state
        }
        outlines = dict[str, Any]()
        for of_rank in group.gather(
            {
                path: (outline_states(state), [tensor.device.type for tensor in find_tensors(state)])
                for path, state in own.items()
            }
        ):
            outlines |= of_rank
        copied: list[tuple[Optimizer, Tensor, Any]] = []
        for optimizer, path, param, (source, new) in moves:
            if path in own:
                group.send(find_tensors(own[path]), members.index(new))
            elif path in outlines and new == group.number:
                outlined, devices = outlines[path]
                copied.append((optimizer, param, self._receive(outlined, devices, members.index(source))))
        return members, owners, copied

    def _receive(self, outlined: Any, devices: Sequence[str], source: int) -> Any:
        """Return the state of a parameter that a rank sends. `devices`: of its tensors."""
        tensors = find_tensors(outlined)
        values = [torch.empty(each.shape, dtype=each.dtype) for each in tensors]
        self._group.receive(values, source)
        placed = (
            torch.empty_like(each, device=device).copy_(value)
            for each, device, value in zip(tensors, devices, values, strict=True)
        )
        return tree_map_only(Tensor, lambda _: next(placed), outlined)

    def outline(self) -> tuple[dict[str, Any], Share]:
        """Return the objects' states, with tensors on the meta device for those of other ranks. On all ranks.

        Raises:
            InvalidValue: an optimizer was not called alike on all ranks.
        """
        of_ranks = self._exchange_outlines()
        own = self._group.number
        members = [*of_ranks]
        writers = self._find_writers(members) | {locate(tensor): own for tensor in find_tensors(of_ranks[own])}

        def is_mine(tensor: Tensor) -> bool:
            # An empty one has no memory to be known by.
            writer = writers.get(locate(tensor), members[0]) if tensor.numel() else members[0]
            return not tensor.is_meta and writer == own

        return self._merge([*of_ranks.values()]), Share(is_mine, members.index(own), len(members))

    def _find_writers(self, members: Sequence[int]) -> dict[Place, int]:
        """Return which rank stores what several ranks hold, and not the first one. A parameter: its first owner."""
        params = [param for each in self._objects.optimizers.values() for param in list_params(each)]
        return {locate(param): self.ownership.find_first(param, members) for param in params}

    def select(self, saved: SavedState) -> dict[str, Any]:
        """Return the objects' states in a snapshot, without those of other ranks' parameters."""
        objects = super().select(saved)
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
            foreign = {path for path, param in params.items() if not self.ownership.holds(param)}
            objects[name] = {**objects[name], STATE: {path: state[path] for path in state if path not in foreign}}
        return objects

    def _name_params(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return the parameters of each optimizer by name, in an order that all ranks share."""
        return {name: dict(sorted(self._objects.name_updated(name).items())) for name in self._objects.optimizers}

    def collect(self) -> dict[str, Any]:
        """Return the objects' states, whole on rank 0. On all ranks."""
        states, share = self.outline()
        leaves, structure = tree_flatten(states)
        tensors = {i: each for i, each in enumerate(leaves) if isinstance(each, Tensor)}
        lacking = {i for i, each in tensors.items() if each.is_meta}
        mine = {i for i, each in tensors.items() if share.is_mine is not None and share.is_mine(each)}
        (lacking, _), *others = self._group.gather((lacking, mine))
        for source, (_, theirs) in enumerate(others, start=1):
            sent = sorted(theirs & lacking)
            if self._group.rank == source:
                self._group.send([leaves[i] for i in sent], target=0)
            elif self._group.rank == 0:
                received = {i: torch.empty_like(tensors[i], device="cpu") for i in sent}
                self._group.receive([*received.values()], source)
                for i, tensor in received.items():
                    leaves[i] = tensor
        if self._group.rank:  # this rank has no values of the others
            leaves = [torch.empty(0) if isinstance(each, Tensor) and each.is_meta else each for each in leaves]
        whole = tree_unflatten(leaves, structure)
        for name in self._objects.modules:  # whose state_dict has the versions of modules, too
            states[name].update(whole[name])
        return whole | {name: states[name] for name in self._objects.modules}  # type: ignore[no-any-return]

    def _exchange_outlines(self) -> dict[int, dict[str, dict[str, Any]]]:
        """Return the states that each rank stores: rank, as numbered at the start -> optimizer -> parameter -> state.

        Tensors of other ranks are on the meta device, unless they are empty. On all ranks.
        """
        self._check_alike()
        named = self._name_params()
        own = {}
        for name, params in named.items():
            states = self._objects.optimizers[name].state
            own[name] = {
                path: states[param]
                for path, param in params.items()
                if param in states and self.ownership.reports(param)
            }
        of_ranks = dict(self._group.gather((self._group.number, outline_states(own))))  # ranks may have died since
        of_ranks[self._group.number] = own
        members = [*of_ranks]
        return {
            member: {
                name: {
                    path: state
                    for path, state in states.items()
                    if self.ownership.find_first(named[name][path], members) == member
                }
                for name, states in of_rank.items()
            }
            for member, of_rank in of_ranks.items()
        }

    def _merge(self, of_ranks: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
        """Return the objects' states with those of all ranks' parameters."""
        saved = self._objects.save()
        for name, params in self._name_params().items():
            merged = {key: state for key, state in saved[name][STATE].items() if key not in params}  # of no parameter
            for of_rank in of_ranks:
                merged |= of_rank[name]
            saved[name] = {**saved[name], STATE: {key: merged[key] for key in sorted(merged, key=str)}}
        return saved


def outline_states(states: Any) -> Any:
    """Return states with their tensors on the meta device, unless they are empty."""
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta") if tensor.numel() else tensor, states)


def _refuse_norm(optimizers: Iterable[Optimizer], grads: Sequence[Tensor]) -> None:
    """Refuse to clip the gradients that this rank has by their norm alone."""
    own = {id(param.grad) for optimizer in optimizers for param in list_params(optimizer) if param.grad is not None}
    if any(id(grad) in own for grad in grads):
        raise UsageError(
            "torch.nn.utils.clip_grad_norm_ (or get_total_norm) with shard= or pipeline= sees some of the gradients: "
            "call run.clip_grad_norm_, with the same arguments (max_norm=math.inf gives the norm alone)",
            code="SS610",
        )


# They compute each element of a parameter from the same elements of its gradient and state.
ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, ASGD)
Blocks = Sequence[type[nn.Module]]


def shard_as(param: Any, value: Any, read_rows: Callable[[Tensor, int, int], Tensor] | None = None) -> Any:
    """Return a tensor with the shape of a sharded one with the same sharding; any other value as it is.

    Args:
        read_rows: returns some rows of a value without elements: value, first row, number of rows -> tensor.
    """
    if isinstance(param, Tensor) and param.is_meta:  # that of another rank
        return param
    if not is_sharded(param) or not isinstance(value, Tensor) or is_sharded(value) or value.shape != param.shape:
        return value
    first, num_rows = find_first_row(param), len(get_local(param))
    own = value[first : first + num_rows] if read_rows is None else read_rows(value, first, num_rows)
    return shard_like(param, own.to(param.device, copy=True))


class ShardedState(DividedState):
    """The prepared objects of a run whose models are sharded.

    Shards the models, and with them the state of their optimizers.

    Args:
        blocks: classes of modules that are gathered one at a time. None: see `find_blocks`.
        init: has built models, or children of them.

    Attributes:
        models: the models.

    Raises:
        InvalidValue: a model cannot be sharded.
    """

    def __init__(self, objects: Objects, blocks: Blocks | None, group: Group, init: ShardedInit) -> None:
        super().__init__(objects, group)
        whole = objects.name_params()
        self.models = _shard(objects.modules, blocks, group, init)
        named = objects.name_params()
        sharded = {id(param): named[name] for name, param in whole.items()}
        for optimizer in objects.optimizers.values():
            _replace_params(optimizer, sharded)
            optimizer.register_step_post_hook(lambda *_: self.models.free_gathered())

    def collect(self) -> dict[str, Any]:
        """Return the objects' states, whole on rank 0. On all ranks.

        The other ranks, which have one whole tensor at a time, return empty ones.
        """
        states, _ = self.outline()
        return tree_map(partial(_gather, is_kept=self._group.rank == 0), states)  # type: ignore[no-any-return]

    def check_optimizers(self) -> None:
        """Raise InvalidValue if an optimizer, with the settings that it has now, cannot be sharded."""
        for name, optimizer in self._objects.optimizers.items():
            if type(optimizer) not in ELEMENTWISE:
                raise InvalidValue(
                    f'{name} is {type(optimizer).__name__}, which may need whole tensors, and shard="fsdp2" gives it '
                    'shards: use an optimizer of torch.optim that works element by element, or shard="optimizer"',
                    code="SS606",
                )
            if any(group.get("fused") for group in optimizer.param_groups):
                raise InvalidValue(
                    f"{name} has fused=True, whose bits depend on the bounds of the shards: leave it out with "
                    'shard="fsdp2"; a run that began with it continues with shard="optimizer"',
                    code="SS606",
                )

    def outline(self) -> tuple[dict[str, Any], Share]:
        """Return the objects' states, with sharded tensors, of which a rank stores its rows. On all ranks.

        Raises:
            InvalidValue: an optimizer was not called alike on all ranks.
        """
        self._check_alike()
        self.models.free_gathered()  # of a forward pass between two steps
        rank = self._group.rank
        share = Share(lambda tensor: is_sharded(tensor) or rank == 0, rank, self._group.world_size)
        return self._objects.save(), share

    def select(self, saved: SavedState) -> dict[str, Any]:
        """Return the objects' states in a snapshot, with this rank's shards."""
        objects = super().select(saved)
        for name in self._objects.optimizers:
            params = self._objects.name_updated(name)
            state = {
                path: {key: shard_as(params.get(path), value, saved.read_rows) for key, value in of_one.items()}
                for path, of_one in objects[name][STATE].items()
            }
            objects[name] = {**objects[name], STATE: state}
        return objects


def find_blocks(module: nn.Module, blocks: Blocks | None) -> list[nn.Module]:
    """Return the modules to gather one at a time, inner ones first, without the model itself.

    Args:
        blocks: classes of modules. None: the modules in each `nn.ModuleList` that have a forward.
    """
    children = [child for child in module.modules() if child is not module][::-1]
    if blocks is None:
        listed = {each for child in module.modules() if isinstance(child, nn.ModuleList) for each in child}
        return [child for child in children if child in listed and _has_forward(child)]
    return [child for child in children if isinstance(child, tuple(blocks))]


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _check_models(modules: Mapping[str, nn.Module], blocks: Blocks) -> None:
    """Raise InvalidValue if a model cannot be sharded, or no module is of a block's class."""
    seen: set[nn.Parameter] = set()
    for name, module in modules.items():
        own = {*module.parameters()}
        dtypes = {str(param.dtype) for param in own if param.requires_grad}
        problems = {
            "has no forward": not _has_forward(module),
            "shares parameters with another model": bool(seen & own),
            f"trains parameters of {' and '.join(sorted(dtypes))}": len(dtypes) > 1,
        }
        if problem := next((each for each, is_there in problems.items() if is_there), ""):
            raise InvalidValue(
                f'{name} {problem}, and shard="fsdp2" needs models with forward and one dtype, which share nothing: '
                'change it, or use shard="optimizer"',
                code="SS607",
            )
        seen |= own
    children = [child for module in modules.values() for child in module.modules()]
    for block in blocks:
        if not any(isinstance(child, block) for child in children):
            kinds = ", ".join(dict.fromkeys(type(child).__name__ for child in children))
            raise InvalidValue(
                f"shard_blocks holds {block.__name__}, but the models consist of {kinds}: name some of these",
                code="SS101",
            )


def _shard(modules: Mapping[str, nn.Module], blocks: Blocks | None, group: Group, init: ShardedInit) -> ShardedModels:
    """Shard models: their parameters are replaced."""
    from torch.distributed.device_mesh import DeviceMesh

    _check_models(modules, blocks or ())
    mesh = DeviceMesh(group.device.type, range(group.world_size))
    units: list[ShardedUnit] = []
    for name, module in modules.items():
        paths = {child: f"{name}.{path}" if path else name for path, child in module.named_modules()}
        for child in [*find_blocks(module, blocks), module]:
            filled = init.fill(child)
            try:
                units.append(ShardedUnit(paths[child], child, mesh))
            except (ValueError, RuntimeError) as error:  # RuntimeError: also NotImplementedError
                raise InvalidValue(
                    f"{paths[child]} cannot be sharded ({' '.join(str(error).split())}): change the model, or use "
                    'shard="optimizer"',
                    code="SS607",
                ) from None
            for param in filled:  # free the whole one, which the optimizers refer to
                param.data = param.data.new_empty(0)
    stream = torch.cuda.Stream(group.device) if group.device.type == "cuda" else None
    return ShardedModels(units, mesh.get_group(), find_block_size(group.gather_hosts()), stream)


def _replace_params(optimizer: Optimizer, sharded: Mapping[int, nn.Parameter]) -> None:
    """Let an optimizer update sharded parameters, with the state that it has for the whole ones."""
    for param_group in optimizer.param_groups:
        param_group["params"] = [sharded[id(param)] for param in param_group["params"]]
    states = [*optimizer.state.items()]
    optimizer.state.clear()
    for param, state in states:
        new = sharded[id(param)]
        optimizer.state[new] = {key: shard_as(new, value) for key, value in state.items()}


def _gather(value: Any, *, is_kept: bool) -> Any:
    """Return a sharded tensor as a whole, in host memory, or else empty; any other value as it is."""
    if not is_sharded(value):
        return value
    whole = gather_whole(value)
    return whole.cpu() if is_kept else whole.new_empty(0)
