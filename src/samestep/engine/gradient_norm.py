"""The norm of gradients that are divided among ranks: the bits of `torch.nn.utils.get_total_norm` on all of them."""

from collections.abc import Mapping, Sequence
from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import pad

from samestep.engine.ownership import Ownership
from samestep.engine.routes import start_all_to_all
from samestep.plan.shards import choose_owners
from samestep.torch_internals import compute_norms, get_local, group_by_kind, is_sharded
from samestep.world.group import Group


@torch.no_grad()
def compute_total_norm(params: Sequence[Tensor], norm_type: float, group: Group, ownership: Ownership | None) -> Tensor:
    """Return the norm of the gradients of parameters. On all ranks.

    torch computes the norm of the norms of the gradients. Here the owner of each parameter computes the inner norm, and
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
        own = {i: grad for i, grad in grads.items() if ownership.counts(params[i])}
    norms = dict[int, float]()
    for alike in _group(own):
        values: list[float] = torch.stack([*compute_norms([own[i] for i in alike], norm_type)]).tolist()
        norms |= zip(alike, values, strict=True)  # float64 holds all of these numbers
    gathered = group.gather([[i, norm] for i, norm in norms.items()])
    found = dict(sorted(pair for of_rank in gathered for pair in of_rank))
    if not found:
        return torch.tensor(0.0)
    local = {i: get_local(params[i]) for i in found}
    device = params[min(found)].device
    rows = [
        torch.tensor([found[i] for i in alike], dtype=params[alike[0]].dtype, device=device) for alike in _group(local)
    ]
    total: Tensor = torch.linalg.vector_norm(torch.cat(rows), norm_type)
    return total


def _exchange_shards(grads: Mapping[int, Tensor], group: Group) -> dict[int, Tensor]:
    """Return the whole ones of sharded gradients that this rank gets. Each rank gets some, in one exchange."""
    if not grads:
        return {}
    world_size = group.world_size
    # Of a shard, in bytes. The last shards are padded, so that the whole gradient is at the beginning of all of them.
    sizes = {
        i: ceil(grad.shape[0] / world_size) * grad.shape[1:].numel() * grad.element_size() for i, grad in grads.items()
    }
    owners = dict(zip(grads, choose_owners([*sizes.values()], world_size, {}), strict=True))
    shards = {i: get_local(grad).reshape(-1).view(torch.uint8) for i, grad in grads.items()}
    sent = torch.cat([pad(shards[i], (0, sizes[i] - len(shards[i]))) for i in sorted(grads, key=owners.__getitem__)])
    counts = [sum(sizes[i] for i in grads if owners[i] == rank) for rank in range(world_size)]
    own = [i for i in grads if owners[i] == group.rank]
    rows = sent.new_empty(world_size, counts[group.rank])
    work = start_all_to_all(rows, sent, None, ([counts[group.rank]] * world_size, counts))
    group.wait_for([work])
    slices = torch.split(rows, [sizes[i] for i in own], dim=1)
    return {
        i: values.reshape(-1).view(grads[i].dtype)[: grads[i].numel()].view(grads[i].shape)
        for i, values in zip(own, slices, strict=True)
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
