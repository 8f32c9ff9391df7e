"""How `shard` divides the state of a run among its ranks: the owner of each tensor, and the memory that a rank needs.

The state is what a rank holds from step to step, with the gradients: parameters, gradients, the optimizers' state. With
"fsdp2", parameters are also gathered while they are used. Not included: activations, messages, buffers of models, the
partial sums of a step with several micro-batches, and copies for snapshots.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OUTSIDE = 0  # the block of parameters that are in no block


@dataclass(frozen=True)
class ParamSize:
    """The sizes of one parameter, undivided.

    Attributes:
        num_bytes: of its values.
        num_rows: length of its first dimension, along which "fsdp2" divides it; 1 for a scalar.
        gradient_bytes: of its gradient; 0 if it is not trained.
        state_bytes: of the tensors of its shape in the optimizer's state.
        small_bytes: of other tensors in the optimizer's state, such as a number of steps, which are not
            divided by "fsdp2".
        block: number of the block that is gathered with it; OUTSIDE: none.
    """

    num_bytes: int
    num_rows: int
    gradient_bytes: int
    state_bytes: int
    small_bytes: int = 0
    block: int = OUTSIDE


@dataclass(frozen=True)
class RankMemory:
    """Bytes that the rank which holds most needs.

    Attributes:
        gathered_block: the whole parameters that are outside of blocks, and the whole parameters and gradients of the
            largest block. 0 if nothing is gathered.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    gathered_block: int = 0

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.parameters + self.gradients + self.optimizer_state + self.gathered_block


def choose_owners(
    sizes: Sequence[int], ranks: Sequence[int], copies: int, chosen: Mapping[int, Sequence[int]]
) -> list[tuple[int, ...]]:
    """Return the ranks that own each tensor, so that the ranks own about the same number of bytes.

    The first owner is chosen as in longest processing time first (Graham 1969, "Bounds on multiprocessing timing
    anomalies"): the largest tensor goes to the rank with the fewest bytes, then the next one. No rank gets more than
    4/3 of the best division's maximum. Among equals, the first tensor and the first rank are taken, so the result
    depends on the arguments only. The further owners are the ranks that follow the first one. So W pairs of ranks own
    something alone, not all W (W - 1) / 2 of them.

    Args:
        sizes: bytes per tensor.
        ranks: the numbers of the ranks, in their order.
        copies: the number of owners of a tensor, if there are so many ranks.
        chosen: number of a tensor -> the ranks that own it already, and stay its owners.

    Example::

        >>> choose_owners([40, 10, 30, 20], range(2), 1, {})
        [(0,), (0,), (1,), (1,)]
        >>> choose_owners([40, 10, 30, 20, 50], range(2), 1, {0: [0], 1: [0], 2: [1], 3: [1]})
        [(0,), (0,), (1,), (1,), (0,)]
        >>> choose_owners([40, 10, 30, 20], range(3), 2, {})
        [(0, 1), (2, 0), (1, 2), (2, 0)]
    """
    owners = [tuple(chosen.get(i, ())) for i in range(len(sizes))]
    loads = Counter[int]()
    for i in chosen:
        loads[owners[i][0]] += sizes[i]
    for i in sorted({*range(len(sizes))} - chosen.keys(), key=lambda i: (-sizes[i], i)):
        at = min(range(len(ranks)), key=lambda k: (loads[ranks[k]], k))
        owners[i] = tuple(ranks[(at + k) % len(ranks)] for k in range(min(copies, len(ranks))))
        loads[ranks[at]] += sizes[i]
    return owners


def replace_owners(
    sizes: Sequence[int], ranks: Sequence[int], copies: int, owners: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Return the owners of each tensor after ranks have died: those that live, and new ones in place of the others.

    Args:
        sizes, copies: as for `choose_owners`.
        ranks: those that live.
        owners: of each tensor before.

    Example::

        >>> replace_owners([40, 10, 30, 20], [0, 2, 3], 2, [(0, 1), (1, 2), (2, 3), (3, 0)])
        [(0, 2), (2, 3), (2, 3), (3, 0)]
    """
    living = [tuple(rank for rank in of_one if rank in ranks) for of_one in owners]
    loads = Counter[int]()
    for size, of_one in zip(sizes, living, strict=True):
        loads.update(dict.fromkeys(of_one, size))
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        while len(living[i]) < min(copies, len(ranks)):
            added = min((rank for rank in ranks if rank not in living[i]), key=lambda rank: (loads[rank], rank))
            living[i] = (*living[i], added)
            loads[added] += sizes[i]
    return living


def compute_memory(sizes: Sequence[ParamSize], shard: str | None, world_size: int, copies: int = 1) -> RankMemory:
    """Return the memory of the rank that holds most.

    Args:
        sizes: the parameters of all models. Those that are trained have the order of the run.
        shard: None, "optimizer" or "fsdp2". One rank divides nothing.
        copies: with "optimizer", the number of ranks that hold the state of a parameter.

    Example::

        >>> sizes = [ParamSize(400, 10, 400, 800, block=1), ParamSize(120, 3, 120, 240, block=2)]
        >>> compute_memory(sizes, None, 4).total
        2080
        >>> compute_memory(sizes, "optimizer", 4)
        RankMemory(parameters=520, gradients=520, optimizer_state=800, gathered_block=0)
        >>> compute_memory(sizes, "optimizer", 2, copies=2).optimizer_state
        1040
        >>> compute_memory(sizes, "fsdp2", 4)
        RankMemory(parameters=160, gradients=160, optimizer_state=320, gathered_block=800)
    """
    if shard == "fsdp2" and world_size > 1:
        return RankMemory(
            sum(_divide(each.num_bytes, each.num_rows, world_size) for each in sizes),
            sum(_divide(each.gradient_bytes, each.num_rows, world_size) for each in sizes),
            sum(_divide(each.state_bytes, each.num_rows, world_size) + each.small_bytes for each in sizes),
            _find_gathered(sizes),
        )
    parameters = sum(each.num_bytes for each in sizes)
    gradients = sum(each.gradient_bytes for each in sizes)
    if shard == "optimizer" and world_size > 1:
        trained = [each for each in sizes if each.gradient_bytes]
        owned = Counter[int]()
        owners = choose_owners([each.num_bytes for each in trained], range(world_size), copies, {})
        for each, of_one in zip(trained, owners, strict=True):
            owned.update(dict.fromkeys(of_one, each.state_bytes + each.small_bytes))
        return RankMemory(parameters, gradients, max(owned.values(), default=0))
    return RankMemory(parameters, gradients, sum(each.state_bytes + each.small_bytes for each in sizes))


def _divide(num_bytes: int, num_rows: int, world_size: int) -> int:
    """Return the bytes of the first rank's rows."""
    return num_bytes // max(num_rows, 1) * -(-num_rows // world_size)


def _find_gathered(sizes: Sequence[ParamSize]) -> int:
    blocks = {OUTSIDE: 0}
    outside_bytes = sum(each.num_bytes for each in sizes if each.block == OUTSIDE)
    for each in sizes:
        own_bytes = 0 if each.block == OUTSIDE else each.num_bytes
        blocks[each.block] = blocks.get(each.block, 0) + own_bytes + each.gradient_bytes
    return outside_bytes + max(blocks.values())
