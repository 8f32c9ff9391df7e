"""Which rank updates each parameter, if the optimizers' state is divided among the ranks."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from samestep.plan.owners import choose_owners


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
