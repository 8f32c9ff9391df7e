"""The control block that each rank sends to all others once per pass, with its gradients. Gathered, not summed."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

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


class MicroBatchReport(NamedTuple):
    """What a rank reports of one of its micro-batches.

    Attributes:
        fingerprint: of the samples.
        loss, weight: of step.backward. Without a call, the weight is `NOT_CALLED`.
        logged: the mean of the values logged under the first known name, and their number; those of the next name; ...
    """

    fingerprint: int
    loss: float
    weight: float
    logged: Sequence[float] = ()


@dataclass
class Control:
    """One rank's control block.

    Attributes:
        reports: per micro-batch.
        buffers: see `Buffers.pack`.
        used: a byte per parameter: whether a micro-batch used it.
        has_new_names: whether this rank logged values under names that are not in the block's format yet.
        order: a hash of the order in which this rank used the units of sharded models; 0 if none are sharded.
    """

    vote: Vote
    reports: Sequence[MicroBatchReport] = ()
    buffers: bytes = b""
    used: bytes = b""
    has_new_names: bool = False
    order: int = 0


class ControlFormat:
    """The memory layout of the control blocks for one `Layout`; all ranks' blocks have the same size.

    Args:
        num_names: number of the names of logged values.

    Attributes:
        size_bytes: size of one block, a multiple of 64.
    """

    def __init__(self, layout: Layout, num_params: int, num_buffers: int = 0, num_names: int = 0) -> None:
        self._head = Struct(f"<q?BQQI?Q{num_params}s{BUFFER_BYTES * num_buffers}s")
        self._report = Struct(f"<Q{2 + 2 * num_names}d")
        num_bytes = self._head.size + max(map(len, layout.ranges)) * self._report.size
        self.size_bytes = -(-num_bytes // 64) * 64

    def pack_into(self, block: memoryview, control: Control) -> None:
        """Write a control block."""
        head = (*control.vote, control.has_new_names, control.order, control.used, control.buffers)
        self._head.pack_into(block, 0, *head)
        offset = self._head.size
        for *numbers, logged in control.reports:
            self._report.pack_into(block, offset, *numbers, *logged)
            offset += self._report.size

    def unpack_from(self, block: memoryview, num_micro_batches: int) -> Control:
        """Read the control block of a rank that has `num_micro_batches`."""
        *vote, has_new_names, order, used, buffers = self._head.unpack_from(block)
        rows = block[self._head.size :][: num_micro_batches * self._report.size]
        entries = self._report.iter_unpack(rows)
        reports = [
            MicroBatchReport(fingerprint, loss, weight, logged) for fingerprint, loss, weight, *logged in entries
        ]
        return Control(Vote(*vote), reports, buffers, used, has_new_names, order)
