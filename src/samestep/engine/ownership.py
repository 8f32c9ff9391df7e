"""Gradients that are divided among ranks: which rank updates each parameter, who sends it to whom, and the norm.

On the CPU, updated parameters pass along a ring of the ranks (an all-gather without padding: the ranks own different
numbers of bytes). All ranks send at the same time, and each link between hosts carries each tensor once. A broadcast
per owner took twice to three times as long there; see docs/dev/divided_optimizers.md.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import ceil

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.functional import pad

from samestep.console import describe_ranks
from samestep.engine.routes import pass_along_ring, start_all_to_all
from samestep.errors import NotHealed
from samestep.plan.shards import choose_owners, replace_owners
from samestep.torch_internals import compute_norms, get_local, group_by_kind, is_sharded
from samestep.world.group import Group
from samestep.world.transport import split_chunks

CHUNK_BYTES = 4 << 20  # on 4 ranks, 1 and 16 MiB took longer


def list_living(owners: Sequence[int], members: Collection[int]) -> list[int]:
    """Return the owners that live.

    Raises:
        NotHealed: none does.
    """
    living = [owner for owner in owners if owner in members]
    if owners and not living:
        raise NotHealed(
            f"a part of the optimizers' state had {len(owners)} copies (shard_copies), and is lost with "
            f"{describe_ranks(owners)}"
        )
    return living


class Ownership:
    """The owners of each trained parameter: the ranks that get its gradient, update it, and hold its state.

    All owners of a parameter have the same bits. The first one that lives does what one of them must do. Owners are
    numbered as at the start, because the numbers of ranks change when one dies. They are numbers of replicas: without a
    pipeline, each rank is one.

    Args:
        copies: the number of owners of a parameter, if there are so many ranks.

    Attributes:
        members: the ranks from which owners were chosen last; the same on all ranks.
        divides: whether a parameter's owners are not all ranks that hold it. Then they send it to the others.
    """

    divides = True

    def __init__(self, group: Group, copies: int = 1) -> None:
        self._group = group
        self._copies = copies
        self._params: dict[int, nn.Parameter] = {}  # by id, which stays valid as long as the parameter is kept
        self._owners: dict[int, tuple[int, ...]] = {}
        self.members = group.replicas

    def assign(self, params: Sequence[nn.Parameter]) -> list[tuple[int, ...]] | None:
        """Return the owners of the trained parameters. Those that have some keep them, and with them their state.

        None: all ranks that hold a parameter get its gradient.
        """
        chosen = {i: self._owners[id(param)] for i, param in enumerate(params) if id(param) in self._owners}
        owners = choose_owners([param.nbytes for param in params], self.members, self._copies, chosen)
        for param, of_one in zip(params, owners, strict=True):
            self._params[id(param)] = param
            self._owners[id(param)] = of_one
        return owners

    def find(self, param: Tensor) -> Sequence[int]:
        """Return the owners of a parameter, also those that have died; none if it was never trained."""
        return self._owners.get(id(param), ())

    def find_first(self, param: Tensor, members: Sequence[int]) -> int:
        """Return the first owner among `members`. All ranks hold a parameter that was never trained."""
        return (list_living(self.find(param), members) or members)[0]

    def holds(self, param: Tensor) -> bool:
        """Return whether this rank has the gradient and the state of a parameter."""
        owners = self.find(param)
        return not owners or self._group.number in owners

    def reports(self, param: Tensor) -> bool:
        """Return whether this rank tells the others about the gradient and the state of a parameter.

        If ranks can continue after a death, all that hold it do so: one of them may die before the others have it.
        """
        return self.holds(param)

    def list_owned(self, params: Iterable[Tensor]) -> list[list[Tensor]]:
        """Return the trained ones of some parameters by first owner, in the order of `assign`, as on all ranks.

        Those of other stages of a pipeline, which are on the meta device, are left out.
        """
        wanted = {id(param) for param in params if not param.is_meta}
        members = self._group.replicas
        ranks = {owners: members.index(list_living(owners, members)[0]) for owners in {*self._owners.values()}}
        owned: list[list[Tensor]] = [[] for _ in members]
        for number, param in self._params.items():
            if number in wanted:
                owned[ranks[self._owners[number]]].append(param)
        return owned

    def check(self) -> None:
        """Raise NotHealed if a parameter has lost all of its owners."""
        for owners in {*self._owners.values()}:
            list_living(owners, self._group.replicas)

    def replace_dead(self, members: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the owners of each parameter, by id, with new ones after the living ones. For `move`."""
        sizes = [param.nbytes for param in self._params.values()]
        owners = replace_owners(sizes, members, self._copies, [*self._owners.values()])
        return dict(zip(self._owners, owners, strict=True))

    def move(self, members: Sequence[int], owners: Mapping[int, tuple[int, ...]]) -> None:
        """Apply the result of `replace_dead`, when the new owners have the state."""
        self.members = members
        self._owners = {**owners}


class StageOwnership(Ownership):
    """The owners of the parameters of a pipeline: of a stage, replicas own about the same number of bytes.

    The ranks of the owning replica that hold a parameter update it, and send it to their peers. If nothing is divided,
    all ranks that hold it update it.

    Args:
        positions: of each parameter, the position of the first rank in a replica that holds it.
    """

    def __init__(self, group: Group, positions: Mapping[Tensor, int], *, divides: bool) -> None:
        super().__init__(group)
        self._positions = positions
        self.divides = divides

    def assign(self, params: Sequence[nn.Parameter]) -> list[tuple[int, ...]] | None:
        if not self.divides:
            return None
        for position in range(self._group.ranks_per_replica):
            super().assign([param for param in params if self._positions[param] == position])
        return [self._owners[id(param)] for param in params]

    def find_first(self, param: Tensor, members: Sequence[int]) -> int:
        replica, *_ = self.find(param) or (0,)
        return members[replica * self._group.ranks_per_replica + self._positions.get(param, 0)]

    def holds(self, param: Tensor) -> bool:
        owners = self.find(param)
        return not param.is_meta and (not owners or self._group.replica in owners)

    def reports(self, param: Tensor) -> bool:
        group = self._group
        return self.holds(param) and (group.can_heal or self.find_first(param, group.members) == group.number)


@torch.no_grad()
def send_owned(owned: Sequence[Sequence[Tensor]], group: Group) -> None:
    """Overwrite tensors on every rank with those of their owners. On all ranks.

    Args:
        owned: per replica, the tensors that it owns and this rank holds.
    """
    if group.num_replicas == 1:
        return
    is_on_host = all(tensor.device.type == "cpu" for tensors in owned for tensor in tensors)
    if not is_on_host and group.ranks_per_replica == 1:
        for owner, tensors in enumerate(owned):
            group.broadcast_tensors(tensors, owner)
        return
    chunks = [[*split_chunks(tensors, CHUNK_BYTES)] for tensors in owned]
    for number in range(max(map(len, chunks))):
        _pass_on([of_rank[number] if number < len(of_rank) else [] for of_rank in chunks], group)


def _pass_on(chunks: Sequence[Sequence[Tensor]], group: Group) -> None:
    """Send a chunk of each replica along the ring of this rank's peers."""
    opened = [*map(_open, chunks)]
    for tensor, view in opened[group.replica][1]:
        view.copy_(tensor)
    for owner in pass_along_ring([data for data, _ in opened], group.replica, group.wait_for, group.peers):
        for tensor, view in opened[owner][1]:
            tensor.copy_(view)
        increment_version(chunks[owner])


def _open(chunk: Sequence[Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return host memory for the bytes of tensors, and the tensors with their slices of it.

    A single tensor there has the bytes in its own memory, and no slice.
    """
    if len(chunk) == 1 and chunk[0].is_contiguous() and chunk[0].device.type == "cpu":
        return chunk[0].detach().view(-1).view(torch.uint8), []
    data = torch.empty(sum(each.nbytes for each in chunk), dtype=torch.uint8)
    widest_first = sorted(chunk, key=lambda each: -each.element_size())  # so all are aligned
    slices = data.split([each.nbytes for each in widest_first])
    return data, [
        (each, view.view(each.dtype).view(each.shape)) for each, view in zip(widest_first, slices, strict=True)
    ]


@torch.no_grad()
def compute_total_norm(params: Sequence[Tensor], norm_type: float, group: Group, ownership: Ownership | None) -> Tensor:
    """Return the norm of the gradients of parameters: the bits of `torch.nn.utils.get_total_norm`. On all ranks.

    torch computes the norm of the norms of the gradients. Here the owners of each parameter compute the inner norm, and
    all ranks the outer one, of the same numbers in the same order. The inner norm of a sharded gradient is computed
    from the whole one, which one rank gets: the bits of a sum of the shards' norms would depend on the number of ranks.

    Args:
        ownership: the owners of the parameters; None if these are sharded.
    """
    grads = {i: param.grad for i, param in enumerate(params) if param.grad is not None}
    if ownership is None:
        whole = {i: grad for i, grad in grads.items() if not is_sharded(grad) and group.rank == 0}
        own = _exchange_shards({i: grad for i, grad in grads.items() if is_sharded(grad)}, group) | whole
    else:
        own = {i: grad for i, grad in grads.items() if ownership.reports(params[i])}
    norms = dict[int, float]()
    for alike in _group(own):
        values: list[float] = torch.stack([*compute_norms([own[i] for i in alike], norm_type)]).tolist()
        norms |= zip(alike, values, strict=True)  # float64 holds all of these numbers
    found = dict(sorted(pair for of_rank in group.gather([*norms.items()]) for pair in of_rank))
    if not found:
        return torch.tensor(0.0)
    # Parameters of other ranks are on the meta device.
    local = {i: get_local(params[i]) for i in found}
    if any(each.is_meta for each in local.values()):
        local = {i: torch.empty(0, dtype=each.dtype, device=group.device) for i, each in local.items()}
    device = local[min(found)].device
    rows = [
        torch.tensor([found[i] for i in alike], dtype=params[alike[0]].dtype, device=device) for alike in _group(local)
    ]
    return torch.linalg.vector_norm(torch.cat(rows), norm_type)  # type: ignore[no-any-return]


def _exchange_shards(grads: Mapping[int, Tensor], group: Group) -> dict[int, Tensor]:
    """Return the whole ones of sharded gradients that this rank gets. Each rank gets some, in one exchange."""
    if not grads:
        return {}
    world_size = group.world_size
    # Of a shard, in bytes. The last shards are padded, so that the whole gradient is at the beginning of all of them.
    sizes = {
        i: ceil(grad.shape[0] / world_size) * grad.shape[1:].numel() * grad.element_size() for i, grad in grads.items()
    }
    chosen = choose_owners([*sizes.values()], range(world_size), 1, {})
    owners = {i: owner for i, (owner,) in zip(grads, chosen, strict=True)}
    shards = {i: get_local(grad).reshape(-1).view(torch.uint8) for i, grad in grads.items()}
    sent = torch.cat([pad(shards[i], (0, sizes[i] - len(shards[i]))) for i in sorted(grads, key=owners.__getitem__)])
    counts = [sum(sizes[i] for i in grads if owners[i] == rank) for rank in range(world_size)]
    own = [i for i in grads if owners[i] == group.rank]
    rows = sent.new_empty(world_size, counts[group.rank])
    group.wait_for([start_all_to_all(rows, sent, None, ([counts[group.rank]] * world_size, counts))])
    return {
        i: values.reshape(-1).view(grads[i].dtype)[: grads[i].numel()].view(grads[i].shape)
        for i, values in zip(own, torch.split(rows, [sizes[i] for i in own], dim=1), strict=True)
    }


@torch.no_grad()
def clip_with_norm(params: Sequence[Tensor], max_norm: float, total_norm: Tensor) -> None:
    """Same as `torch.nn.utils.clip_grads_with_norm_`, also for sharded gradients."""
    carriers = [get_local(param).detach() for param in params]
    for carrier, param in zip(carriers, params, strict=True):
        carrier.grad = None if param.grad is None else get_local(param.grad)
    torch.nn.utils.clip_grads_with_norm_(carriers, max_norm, total_norm)


def _group(tensors: Mapping[int, Tensor]) -> list[list[int]]:
    """Group the numbers of tensors by device and dtype, in torch's order."""
    numbers = [*tensors]
    return [[numbers[k] for k in alike] for alike in group_by_kind([*tensors.values()])]
