"""Which rank holds which stages, and in which order it computes them. Pure.

Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training" (1F1B): after as many forward passes as ranks
follow, a rank alternates between a forward and a backward pass. So it holds the activations of few micro-batches.
"""

from collections.abc import Sequence
from enum import Enum, auto


class Kind(Enum):
    """What a rank computes next for a micro-batch, with all its stages."""

    FORWARD = auto()
    BACKWARD = auto()


def choose_ranks(world_size: int, num_stages: int) -> int:
    """Return the largest number of ranks that a pipeline can have: it divides `world_size`, and each has a stage.

    Example::

        >>> choose_ranks(6, 4), choose_ranks(8, 4), choose_ranks(1, 4)
        (3, 4, 1)
    """
    return max(count for count in range(1, num_stages + 1) if world_size % count == 0)


def find_held(position: int, num_ranks: int, num_stages: int) -> range:
    """Return the stages of the rank at a position of its pipeline. They are contiguous; shares differ by at most one.

    Example::

        >>> [find_held(position, 3, 4) for position in range(3)]
        [range(0, 1), range(1, 2), range(2, 4)]
    """
    return range(position * num_stages // num_ranks, (position + 1) * num_stages // num_ranks)


def list_positions(num_ranks: int, num_stages: int) -> list[int]:
    """Return for each stage the position of its rank in the pipeline.

    Example::

        >>> list_positions(3, 4)
        [0, 1, 2, 2]
    """
    return [position for position in range(num_ranks) for _ in find_held(position, num_ranks, num_stages)]


def build_schedule(position: int, num_ranks: int, micro_batches: Sequence[int]) -> list[tuple[Kind, int]]:
    """Return what the rank at a position of its pipeline computes, in order.

    Example::

        >>> [(kind.name[0], v) for kind, v in build_schedule(0, 2, range(3))]
        [('F', 0), ('F', 1), ('B', 0), ('F', 2), ('B', 1), ('B', 2)]
    """
    num_ahead = min(num_ranks - 1 - position, len(micro_batches))
    order = [(Kind.FORWARD, v) for v in micro_batches[:num_ahead]]
    for forward, backward in zip(micro_batches[num_ahead:], micro_batches, strict=False):
        order += [(Kind.FORWARD, forward), (Kind.BACKWARD, backward)]
    return order + [(Kind.BACKWARD, v) for v in micro_batches[len(micro_batches) - num_ahead :]]
