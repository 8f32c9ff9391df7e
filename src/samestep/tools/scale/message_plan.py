"""The messages of a step's exchange at any number of ranks, without sending them, for `samestep scale`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from samestep.engine import routes
from samestep.engine.buckets import build_buckets, choose_cap_bytes, pad_to_chunks
from samestep.engine.control import ControlFormat
from samestep.plan.tree import Layout


class Round(NamedTuple):
    """The messages of one round of a route, of all ranks.

    Attributes:
        distance: rank r exchanges with r ^ distance; 0: with every other rank.
        num_messages, num_bytes: messages and bytes that each rank sends to each of these ranks [W].
    """

    distance: int
    num_messages: NDArray[np.int64]
    num_bytes: NDArray[np.int64]


class BucketPlan(NamedTuple):
    """The exchange of one bucket.

    Attributes:
        share: share of all elements that are in this bucket and those before it.
        route: as in `routes.choose_route`; "control" for the control block if it has separate messages.
        rounds: rounds of the route, in order.
        uses_sockets: whether the messages use the sockets between the ranks of a host.
    """

    share: float
    route: str
    rounds: list[Round]
    uses_sockets: bool


def plan_exchange(
    layout: Layout, elements: Sequence[int], element_bytes: int, *, one_host: bool, cap_bytes: int | None = None
) -> list[BucketPlan]:
    """Return the buckets in the order in which a backward completes them.

    Args:
        elements: per parameter, in the order of the model.
        one_host: whether all ranks run on one host.
        cap_bytes: the largest size of a bucket; None: the default.
    """
    dtype = {2: torch.bfloat16, 8: torch.float64, 16: torch.complex128}.get(element_bytes, torch.float32)
    params = [nn.Parameter(torch.empty(num, dtype=dtype, device="meta")) for num in elements]
    control_bytes = ControlFormat(layout, 2, len(params), 0).size_bytes
    buckets = build_buckets(params, choose_cap_bytes(params, one_host=one_host) if cap_bytes is None else cap_bytes)
    num_elements = sum(bucket.num_elements for bucket in buckets)
    plans = []
    done = 0
    known = dict[tuple[int, int], tuple[str, list[Round]]]()
    for bucket in buckets:
        done += bucket.num_elements
        num_extra = control_bytes if bucket is buckets[-1] else 0
        size = bucket.num_elements, num_extra
        if size not in known:
            route = routes.choose_route(layout, bucket.num_elements * element_bytes)
            known[size] = route, plan_rounds(layout, route, bucket.num_elements, element_bytes, num_extra)
        route, rounds = known[size]
        small = num_extra > 0 and route == "direct" and int(rounds[0].num_bytes[0]) <= routes.NEIGHBORS_MAX_BYTES
        plans.append(BucketPlan(done / num_elements, route, rounds, one_host and small))
    if plans[-1].route != "direct":
        rounds = plan_rounds(layout, "direct", 0, element_bytes, control_bytes)
        plans.append(BucketPlan(1.0, "control", rounds, one_host))
    return plans


def plan_rounds(
    layout: Layout, route: str, num_elements: int, element_bytes: int, control_bytes: int = 0
) -> list[Round]:
    """Return the rounds of a bucket's route."""
    world_size = layout.world_size
    one = np.ones(world_size, np.int64)
    if route == "direct":
        return [Round(0, one, one * (layout.max_parts * num_elements * element_bytes + control_bytes))]
    if route == "chunks":
        chunk_bytes = pad_to_chunks(num_elements, world_size) // world_size * element_bytes
        held = np.array([len(parts) for parts in layout.parts])
        return [Round(0, held, held * chunk_bytes), Round(0, one, one * chunk_bytes)]
    paths = [routes.plan_butterfly(num_elements, rank, world_size) for rank in range(world_size)]
    halving = []
    doubling = []
    for number, steps in enumerate(zip(*paths, strict=True)):
        given = np.array([give[1] - give[0] for _, _, give in steps]) * element_bytes
        kept = np.array([keep[1] - keep[0] for _, keep, _ in steps]) * element_bytes
        halving.append(Round(1 << number, one, given))
        doubling.append(Round(1 << number, one, kept))
    return halving + doubling[::-1]
