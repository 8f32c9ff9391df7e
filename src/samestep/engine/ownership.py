"""Which rank updates each parameter, if the optimizers' state is divided among the ranks, and who sends it to whom.

On the CPU, updated parameters pass along a ring of the ranks (an all-gather without padding: the ranks own different
numbers of bytes). All ranks send at the same time, and each link between hosts carries each tensor once. A broadcast
per owner took twice to three times as long there; see docs/dev/divided_optimizers.md.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from samestep.engine.routes import pass_along_ring
from samestep.plan.shards import choose_owners
from samestep.world.group import Group
from samestep.world.transport import split_chunks

CHUNK_BYTES = 4 << 20  # on 4 ranks, 1 and 16 MiB took longer


class Ownership:
    """The owner of each trained parameter: the one rank that gets its gradient, updates it, and holds its state.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._params: dict[int, nn.Parameter] = {}  # by id, which stays valid as long as the parameter is kept
        self._owners: dict[int, int] = {}

    def assign(self, params: Sequence[nn.Parameter]) -> list[int]:
        """Return the owners of the trained parameters. Those that have one keep it, and with it their state."""
        chosen = {i: self._owners[id(param)] for i, param in enumerate(params) if id(param) in self._owners}
        owners = choose_owners([param.nbytes for param in params], self._world_size, chosen)
        for param, owner in zip(params, owners, strict=True):
            self._params[id(param)] = param
            self._owners[id(param)] = owner
        return owners

    def find(self, param: Tensor) -> int | None:
        """Return the owner of a parameter; None if it was never trained."""
        return self._owners.get(id(param))

    def list_owned(self, params: Iterable[Tensor]) -> list[list[Tensor]]:
        """Return the trained ones of some parameters by owner, in the order of `assign`, which all ranks share."""
        wanted = {id(param) for param in params}
        owned: list[list[Tensor]] = [[] for _ in range(self._world_size)]
        for number, param in self._params.items():
            if number in wanted:
                owned[self._owners[number]].append(param)
        return owned

    def counts(self, param: Tensor) -> bool:
        """Return whether this rank contributes a parameter to a sum over ranks. All ranks hold one without owner."""
        return (self.find(param) or 0) == self._rank


@torch.no_grad()
def send_owned(owned: Sequence[Sequence[Tensor]], group: Group) -> None:
    """Overwrite tensors on every rank with those of their owners. On all ranks.

    Args:
        owned: per rank, the tensors that it owns.
    """
    if group.world_size == 1:
        return
    if any(tensor.device.type != "cpu" for tensors in owned for tensor in tensors):
        for owner, tensors in enumerate(owned):
            group.broadcast_tensors(tensors, owner)
        return
    chunks = [[*split_chunks(tensors, CHUNK_BYTES)] for tensors in owned]
    for number in range(max(map(len, chunks))):
        _pass_on([of_rank[number] if number < len(of_rank) else [] for of_rank in chunks], group.rank)


def _pass_on(chunks: Sequence[Sequence[Tensor]], rank: int) -> None:
    """Send a chunk of each rank along the ring."""
    opened = [*map(_open, chunks)]
    for tensor, view in opened[rank][1]:
        view.copy_(tensor)
    for owner in pass_along_ring([data for data, _ in opened], rank):
        for tensor, view in opened[owner][1]:
            tensor.copy_(view)
        increment_version(chunks[owner])


def _open(chunk: Sequence[Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return memory for the bytes of tensors, and the tensors with their slices of it.

    A single tensor has the bytes in its own memory, and no slice.
    """
    if len(chunk) == 1 and chunk[0].is_contiguous():
        return chunk[0].detach().view(-1).view(torch.uint8), []
    data = torch.empty(sum(each.nbytes for each in chunk), dtype=torch.uint8)
    widest_first = sorted(chunk, key=lambda each: -each.element_size())  # so all are aligned
    slices = data.split([each.nbytes for each in widest_first])
    return data, [
        (each, view.view(each.dtype).view(each.shape)) for each, view in zip(widest_first, slices, strict=True)
    ]
