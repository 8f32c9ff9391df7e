"""The norm of gradients that are divided among ranks: the bits of `torch.nn.utils.get_total_norm` on all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.engine.ownership import Ownership
from samestep.torch_internals import compute_norms, gather_whole, get_local, group_by_kind
from samestep.world.group import Group


@torch.no_grad()
def compute_total_norm(
    params: Sequence[Tensor], norm_type: float, foreach: bool | None, group: Group, ownership: Ownership | None
) -> Tensor:
    """Return the norm of the gradients of parameters. On all ranks.

    torch computes the norm of the norms of the gradients. Here the owner of each parameter computes the inner norm, and
    all ranks the outer one, of the same numbers in the same order. The inner norm of a sharded gradient is computed
    from the whole one, which all ranks gather, one parameter at a time: the bits of a sum of the shards' norms would
    depend on the number of ranks.

    Args:
        ownership: the owners of the parameters; None if these are sharded.
    """
    used = [i for i, param in enumerate(params) if param.grad is not None]
    if ownership is None:
        found = {i: _compute_norms([gather_whole(params[i].grad)], norm_type, foreach)[0] for i in used}
    else:
        norms = dict[int, float]()
        for alike in _group(params, [i for i in used if ownership.counts(params[i])]):
            grads_alike = [grad for i in alike if (grad := params[i].grad) is not None]
            norms |= zip(alike, _compute_norms(grads_alike, norm_type, foreach), strict=True)
        gathered = group.gather([[i, norm] for i, norm in norms.items()])
        found = dict(pair for of_rank in gathered for pair in of_rank)
    if not found:
        return torch.tensor(0.0)
    device = params[min(found)].device
    rows = [
        torch.tensor([found[i] for i in alike], dtype=params[alike[0]].dtype, device=device)
        for alike in _group([get_local(param) for param in params], sorted(found))
    ]
    total: Tensor = torch.linalg.vector_norm(torch.cat(rows), norm_type)
    return total


@torch.no_grad()
def clip_with_norm(params: Sequence[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None) -> None:
    """Same as `torch.nn.utils.clip_grads_with_norm_`, also for sharded gradients."""
    carriers = [get_local(param).detach() for param in params]
    for carrier, param in zip(carriers, params, strict=True):
        carrier.grad = None if param.grad is None else get_local(param.grad)
    torch.nn.utils.clip_grads_with_norm_(carriers, max_norm, total_norm, foreach)


def _compute_norms(grads: list[Tensor], norm_type: float, foreach: bool | None) -> list[float]:
    """Return the norm of each gradient. float64 holds all of these numbers."""
    if foreach is False:
        norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grads]
    else:
        norms = [*compute_norms(grads, norm_type)]
    values: list[float] = torch.stack(norms).tolist()
    return values


def _group(params: Sequence[Tensor], numbers: Sequence[int]) -> list[list[int]]:
    """Group the numbers of parameters by device and dtype, in torch's order."""
    return [[numbers[place] for place in places] for places in group_by_kind([params[i] for i in numbers])]
