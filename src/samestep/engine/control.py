"""The control block that each rank sends to all others once per pass, with its gradients. Gathered, not summed."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Any, NamedTuple

from samestep.plan.tree import Layout

NOT_CALLED = -1.0  # the weight of a micro-batch that had no backward
BUFFER_BYTES = 4  # of the entry of a buffer, see `Buffers.pack`


class Saving(IntEnum):
    """What a rank does for a snapshot."""

    NOTHING = 0  # that concerns the other ranks
    COPYING = 1  # it copies its state
    WRITTEN = 2  # it has written its part of a divided snapshot, or failed
    WATCHING = 3  # it looks for tensors that the script changes before the first update


class Vote(NamedTuple):
    """One rank's requests to all ranks after this step.

    Attributes:
        stop: number of the signal by which this rank was requested to stop; 0 for none.
        snapshot: whether a snapshot is due by this rank's clock.
        saving: what this rank does for a snapshot, a `Saving`.
        computed: checksum of this rank's results for a micro-batch that another rank computes, too; 0 for none.
        recomputed: checksum of this rank's results for a micro-batch of another rank; 0 for none.
        checksum: checksum of this rank's part of the previous gradient, if gradients are divided among ranks; else 0.
    """

    stop: int = 0
    snapshot: bool = False
    saving: int = Saving.NOTHING
    computed: int = 0
    recomputed: int = 0
    checksum: int = 0


@dataclass
class Control:
    """One rank's control block.

    Attributes:
        losses, weights, fingerprints: per micro-batch; the last are those of the samples.
        buffers: see `Buffers.pack`.
        used: a byte per parameter: whether a micro-batch used it.
        has_new_names: whether this rank logged values under names that are not in the block's format yet.
        values, counts: per micro-batch and name, the mean value and the number of calls of step.log.
        order: a hash of the order in which this rank used the units of sharded models; 0 if none are sharded.
    """

    vote: Vote
    losses: Sequence[float] = ()
    weights: Sequence[float] = ()
    fingerprints: Sequence[int] = ()
    buffers: bytes = b""
    used: bytes = b""
    has_new_names: bool = False
    values: Sequence[Sequence[float]] = ()
    counts: Sequence[Sequence[float]] = ()
    order: int = 0


class ControlFormat:
    """The memory layout of the control blocks for one `Layout`; all ranks' blocks have the same size.

    Args:
        num_names: number of the names of logged values.

    Attributes:
        size_bytes: size of one block, a multiple of 64.
    """

    def __init__(self, layout: Layout, num_params: int, num_buffers: int = 0, num_names: int = 0) -> None:
        self._most = most = max(len(held) for held in layout.ranges)
        self._num_names = num_names
        self._struct = Struct(
            f"<q?BQQI?Q{most}Q{most * (2 + 2 * num_names)}d{num_params}s{BUFFER_BYTES * num_buffers}s"
        )
        self.size_bytes = -(-self._struct.size // 64) * 64

    def pack_into(self, block: memoryview, control: Control) -> None:
        """Write a control block. Entries of micro-batches that this rank does not have are set to 0."""
        missing: list[Any] = [0] * (self._most - len(control.fingerprints))
        numbers: list[float] = [*control.losses, *missing, *control.weights, *missing]
        for rows in (control.values, control.counts):
            numbers += [number for row in rows for number in row] + missing * self._num_names
        self._struct.pack_into(
            block,
            0,
            *control.vote,
            control.has_new_names,
            control.order,
            *control.fingerprints,
            *missing,
            *numbers,
            control.used,
            control.buffers,
        )

    def unpack_from(self, block: memoryview, num_micro_batches: int) -> Control:
        """Read the control block of a rank that has `num_micro_batches`."""
        entries = self._struct.unpack_from(block, 0)
        most = self._most
        width = self._num_names
        at = len(Vote._fields) + 2
        fingerprints, losses, weights = ([*entries[at + k * most :][:num_micro_batches]] for k in range(3))
        values, counts = (
            [[*entries[start + v * width :][:width]] for v in range(num_micro_batches)]
            for start in (at + 3 * most, at + (3 + width) * most)
        )
        vote = Vote(*entries[: at - 2])
        has_new_names, order = entries[at - 2 : at]
        used, buffers = entries[-2:]
        return Control(vote, losses, weights, fingerprints, buffers, used, has_new_names, values, counts, order)
