"""Divides tensors among ranks, so that each rank updates its own."""

from collections.abc import Mapping, Sequence


def choose_owners(sizes: Sequence[int], world_size: int, chosen: Mapping[int, int]) -> list[int]:
    """Return the rank that owns each tensor, so that the ranks own about the same number of bytes.

    Longest processing time first (Graham 1969, "Bounds on multiprocessing timing anomalies"): the largest tensor goes
    to the rank with the fewest bytes, then the next one. No rank gets more than 4/3 of the best division's maximum.
    Among equals, the first tensor and the first rank are taken, so the result depends on the arguments only.

    Args:
        sizes: bytes per tensor.
        chosen: number of a tensor -> the rank that owns it already.

    Example::

        >>> choose_owners([40, 10, 30, 20], 2, {})
        [0, 0, 1, 1]
        >>> choose_owners([40, 10, 30, 20, 50], 2, {0: 0, 1: 0, 2: 1, 3: 1})
        [0, 0, 1, 1, 0]
    """
    owners = [chosen.get(i, 0) for i in range(len(sizes))]
    loads = [0] * world_size
    for i, owner in chosen.items():
        loads[owner] += sizes[i]
    for i in sorted({*range(len(sizes))} - chosen.keys(), key=lambda i: (-sizes[i], i)):
        owner = min(range(world_size), key=lambda rank: (loads[rank], rank))
        owners[i] = owner
        loads[owner] += sizes[i]
    return owners
