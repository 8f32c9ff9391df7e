"""The norm of gradients that are divided among ranks: the bits of `torch.nn.utils.get_total_norm` on all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.engine.ownership import Ownership
from samestep.torch_internals import compute_norms, group_by_kind
from samestep.world.group import Group


@torch.no_grad()
def compute_total_norm(
    params: Sequence[Tensor], norm_type: float, foreach: bool | None, group: Group, ownership: Ownership
) -> Tensor:
    """Return the norm of the gradients of parameters. On all ranks: one exchange of a number per parameter.

    torch computes the norm of the norms of the gradients. Here the owner of each parameter computes the inner norm, and
    all ranks the outer one, of the same numbers in the same order.
    """
    mine = [i for i, param in enumerate(params) if param.grad is not None and ownership.counts(param)]
    norms = dict[int, float]()
    for alike in _group(params, mine):
        grads = [grad for i in alike if (grad := params[i].grad) is not None]
        if foreach is False:
            inner = torch.stack([torch.linalg.vector_norm(grad, norm_type) for grad in grads])
        else:
            inner = torch.stack([*compute_norms(grads, norm_type)])
        norms |= zip(alike, inner.tolist(), strict=True)  # float64 holds all of these numbers
    gathered = group.gather([[i, norm] for i, norm in norms.items()])
    found: dict[int, float] = dict(pair for of_rank in gathered for pair in of_rank)
    if not found:
        return torch.tensor(0.0)
    device = params[min(found)].device
    rows = [
        torch.tensor([found[i] for i in alike], dtype=params[alike[0]].dtype, device=device)
        for alike in _group(params, sorted(found))
    ]
    total: Tensor = torch.linalg.vector_norm(torch.cat(rows), norm_type)
    return total


def _group(params: Sequence[Tensor], numbers: Sequence[int]) -> list[list[int]]:
    """Group the numbers of parameters by device and dtype, in torch's order."""
    return [[numbers[place] for place in places] for places in group_by_kind([params[i] for i in numbers])]
