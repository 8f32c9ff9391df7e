"""A model of one step, simulated in virtual time, which predicts the time of a step at any number of ranks.

The simulation follows `Exchange`. Each rank computes its micro-batches. During the last backward pass, the buckets
become ready in order, and starting one waits for the first round of the previous one. After the backward pass, all
routes advance in turns. The code that sends the messages also plans them here (`message_plan`). A message takes
alpha + beta * bytes (Hockney, 1994). Ranks are the elements of vectors, so a step of B buckets on W ranks takes O(B W
log W) operations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.decoding import convert
from samestep.plan.tree import build_layout
from samestep.tools.scale.message_plan import BucketPlan, Round, plan_exchange
from samestep.tools.scale.tables import PARTS

Times = NDArray[np.float64]  # per rank, in seconds
# of the ranks' speeds: over all ranks; per simulation
NUM_DRAWS = 4096
LEAST_DRAWS = 4
MAX_DRAWS = 128


@dataclass(frozen=True)
class LinkSpeed:
    """A message of n bytes takes `message_s + n * byte_s`. Between hosts, the ranks of a host share `byte_s`."""

    message_s: float
    byte_s: float


@dataclass(frozen=True)
class StepModel:
    """The constants of a script on a machine.

    Attributes:
        micro_batch_s: load, forward and backward of a micro-batch.
        last_backward: the fraction of that time in which the backward pass runs and buckets become ready.
        extra_s: additional computation of a rank if there are others: it copies its gradients into buckets.
        rest_s: time that does not depend on the number of ranks, for 1 rank and for more: the optimizer, the script's
            code, additions after the exchange.
        jitter: relative standard deviation of a rank's time to compute.
        elements, element_bytes, cap_bytes: sizes of the parameters, bytes per element, and the largest size of a
            bucket.
        local, socket, remote: links between ranks of a host, its sockets for small messages, links between hosts.
        ranks_per_host: None: all ranks on one host.
        busy_byte_s: seconds per sent byte by which messages delay the computation of a rank without a spare core.
    """

    micro_batch_s: float
    last_backward: float
    extra_s: float
    rest_s: tuple[float, float]
    jitter: float
    elements: tuple[int, ...]
    element_bytes: int
    cap_bytes: int | None
    local: LinkSpeed
    socket: LinkSpeed
    remote: LinkSpeed
    ranks_per_host: int | None = None
    busy_byte_s: float = 0.0

    def predict(self, num_micro_batches: int, world_size: int) -> float:
        """Return the seconds of a step of V micro-batches on W ranks: the mean over some draws of the ranks' speeds.

        Raises ValueError if there are more ranks than micro-batches.
        """
        if not 1 <= world_size <= num_micro_batches:
            raise ValueError(f"{num_micro_batches} micro-batches on {world_size} ranks")
        layout = build_layout(num_micro_batches, world_size)
        shares = np.array([len(held) for held in layout.ranges], np.float64)
        rest_s = self.rest_s[world_size > 1]
        num_draws = max(LEAST_DRAWS, min(MAX_DRAWS, NUM_DRAWS // world_size)) if self.jitter else 1
        draws = np.random.default_rng(0).standard_normal((num_draws, world_size)) if self.jitter else np.zeros((1, 1))
        speeds = 1 + self.jitter * (draws - draws.mean())
        if world_size == 1:
            return float((shares * self.micro_batch_s * speeds).mean()) + rest_s
        is_one_host = self.ranks_per_host is None or world_size <= self.ranks_per_host
        plans = plan_exchange(layout, self.elements, self.element_bytes, one_host=is_one_host, cap_bytes=self.cap_bytes)
        return float(np.mean([self._simulate(plans, shares, speed) for speed in speeds])) + rest_s

    def _simulate(self, plans: Sequence[BucketPlan], shares: Times, speeds: Times) -> float:
        """Return the time at which the slowest rank has all sums."""
        wire = _Wire(self, len(shares))
        backward_s = self.micro_batch_s * self.last_backward * speeds
        now = (shares * self.micro_batch_s + self.extra_s) * speeds - backward_s
        under_way: list[_Exchange] = []
        done = 0.0
        for number, plan in enumerate(plans):
            now = now + (plan.share - done) * backward_s
            done = plan.share
            under_way.append(exchange := _Exchange(plan, wire))
            now = exchange.issue(now)
            if plan.uses_sockets:  # which block
                now = exchange.advance(now)
            if number and plans[number - 1].route in ("butterfly", "chunks"):
                now = under_way[number - 1].advance(now)
        while under_way:
            for exchange in under_way:
                now = exchange.advance(now)
            under_way = [exchange for exchange in under_way if not exchange.is_complete]
        return float(now.max())

    def to_json(self) -> dict[str, Any]:
        """Return the constants for a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "StepModel":
        """Return the model from the result of `to_json`. Raises ValueError for other values."""
        return convert(found, cls)


class _Exchange:
    """The exchange of one bucket."""

    def __init__(self, plan: BucketPlan, wire: "_Wire") -> None:
        self._rounds = iter(plan.rounds)
        self._wire = wire
        self._uses_sockets = plan.uses_sockets
        self._end: Times | None = None

    def issue(self, now: Times) -> Times:
        """Issue the next round, if there is one. Returns the time afterwards."""
        if (following := next(self._rounds, None)) is None:
            self._end = None
            return now
        self._end = self._wire.send(following, now, sockets=self._uses_sockets)
        return now + self._wire.compute_busy_s(following)

    @property
    def is_complete(self) -> bool:
        return self._end is None

    def advance(self, now: Times) -> Times:
        """Wait for the round that was issued, and issue the next one. Returns the time afterwards."""
        if self._end is None:
            return now
        return self.issue(np.maximum(now, self._end))


class _Wire:
    """The links between all ranks. A rank's link carries one round after the other."""

    def __init__(self, model: StepModel, world_size: int) -> None:
        self._model = model
        self._ranks = np.arange(world_size)
        self._hosts = self._ranks // (model.ranks_per_host or world_size)
        self._per_host = np.bincount(self._hosts)[self._hosts]
        self._free = np.zeros(world_size)

    def compute_busy_s(self, messages: Round) -> Times:
        """Return how long each rank's processor works for its messages of a round."""
        num_peers = 1 if messages.distance else len(self._ranks) - 1
        return messages.num_bytes.astype(np.float64) * (num_peers * self._model.busy_byte_s)

    def send(self, messages: Round, now: Times, *, sockets: bool) -> Times:
        """Return when each rank has sent and received its messages of a round that it issues at `now`."""
        local = self._model.socket if sockets else self._model.local
        remote = self._model.remote
        num_bytes = messages.num_bytes.astype(np.float64)
        if messages.distance:
            peers = self._ranks ^ messages.distance
            begin = np.maximum(np.maximum(now, self._free), np.maximum(now, self._free)[peers])
            most = np.maximum(num_bytes, num_bytes[peers])
            is_remote = self._hosts != self._hosts[peers]
            senders = np.bincount(self._hosts, weights=is_remote)[self._hosts]  # share their host's link
            wire_s = most * np.where(is_remote, remote.byte_s * senders, local.byte_s)
            message_s = np.where(is_remote, remote.message_s, local.message_s) * messages.num_messages
        else:
            begin = np.maximum(now, self._free).max() * np.ones_like(now)
            here = np.bincount(self._hosts, weights=num_bytes)[self._hosts]  # of all ranks of the host
            there = self._per_host < len(now)
            inside = np.maximum(num_bytes * (self._per_host - 1), here - num_bytes) * local.byte_s
            away = np.maximum(here * (len(now) - self._per_host), (num_bytes.sum() - here) * self._per_host)
            wire_s = inside + away * remote.byte_s
            num = messages.num_messages * (len(now) - 1)
            message_s = num * local.message_s + there * max(0.0, remote.message_s - local.message_s)
        self._free = begin + wire_s
        return begin + message_s + wire_s  # type: ignore[no-any-return]


def fit_model(alone: Mapping[str, Any], pair: Mapping[str, Any], cores_per_rank: float) -> StepModel:
    """Fit the constants to the measurements on 1 and on 2 ranks, as `Size.to_json` gives them.

    The predictions for these two sizes equal the measurements. With up to one core per rank, the work for messages
    delays the computation; with more, other cores do this work.
    """
    facts = pair["facts"]
    links = pair["facts"]["links"]
    num_alone, num_pair = (count_micro_batches(row) / row["world_size"] for row in (alone, pair))
    # Phases are means and steps are medians, which slow moments move less: a phase is its share of the median step.
    alone_s, pair_s = (
        row["step_s"] * (row["phases_s"]["data"] + row["phases_s"]["compute"]) / sum(row["phases_s"][p] for p in PARTS)
        for row in (alone, pair)
    )
    local = LinkSpeed(links["message_s"], links["byte_s"])
    model = StepModel(
        micro_batch_s=alone_s / num_alone,
        last_backward=alone["phases_s"]["backward"] / (alone["phases_s"]["data"] + alone["phases_s"]["compute"]),
        extra_s=max(0.0, pair_s - alone_s * num_pair / num_alone),
        rest_s=(0.0, 0.0),
        jitter=alone["jitter"],
        elements=tuple(facts["elements"]),
        element_bytes=facts["element_bytes"],
        cap_bytes=facts["bucket_cap_bytes"],
        local=local,
        socket=LinkSpeed(links["socket_message_s"], links["byte_s"]),
        remote=local,
        ranks_per_host=None if facts["is_one_host"] else 1,
        busy_byte_s=links["cpu_byte_s"] / cores_per_rank if cores_per_rank <= 1 else 0.0,
    )
    rest_s = [row["step_s"] - model.predict(count_micro_batches(row), row["world_size"]) for row in (alone, pair)]
    return replace(model, rest_s=(rest_s[0], rest_s[1]))


def count_micro_batches(row: Mapping[str, Any]) -> int:
    """Return the number of micro-batches of a measured step."""
    return int(row["batch_size"] // row["facts"]["micro_batch_size"])
