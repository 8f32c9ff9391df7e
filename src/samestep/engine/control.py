"""The control block that each rank sends to all others once per pass, with its gradients. Gathered, not summed."""

from dataclasses import dataclass, field
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from samestep.plan.tree import Layout

NOT_CALLED = -1.0  # the weight of a micro-batch that had no backward


class Vote(NamedTuple):
    """One rank's requests to all ranks after this step.

    Attributes:
        stop: number of the signal by which this rank was requested to stop; 0 for none.
        snapshot: whether a snapshot is due by this rank's clock.
        copying: whether this rank is copying its state for a snapshot.
        comparison: whether a replica check is due by this rank's clock.
        computed: checksum of this rank's results for a micro-batch that another rank computes, too; 0 for none.
        recomputed: checksum of this rank's results for a micro-batch of another rank; 0 for none.
        logged: a hash of the names in this rank's calls of run.log since the previous exchange; 0 for none.
        checksum: checksum of this rank's part of the previous gradient, if gradients are divided among ranks; else 0.
    """

    stop: int = 0
    snapshot: bool = False
    copying: bool = False
    comparison: bool = False
    computed: int = 0
    recomputed: int = 0
    logged: int = 0
    checksum: int = 0


@dataclass
class Control:
    """One rank's control block.

    A slot groups losses: slot 0 holds those of all models together, slot i those of model i alone.

    Attributes:
        buffers_changed: whether micro-batch 0 ran on this rank and changed a buffer.
        has_new_names: whether this rank logged values under names that are not in the block's format yet.
        losses, weights: per micro-batch, per slot.
        fingerprints: fingerprint of the samples, per micro-batch.
        used: a byte per parameter: whether some micro-batches used it, and whether some did not.
        parts: the BatchNorm statistics' parts [max_parts, num_values].
        num_losses: the largest number of losses passed to one step.backward on this rank.
        values, counts: per micro-batch and name, the mean value and the number of calls of step.log.
        order: a hash of the order in which this rank used the units of sharded models; 0 if none are sharded.
    """

    vote: Vote
    buffers_changed: bool
    has_new_names: bool
    losses: list[list[float]]
    weights: list[list[float]]
    fingerprints: list[int]
    used: bytes
    parts: NDArray[np.float64]
    num_losses: int = 1
    values: list[list[float]] = field(default_factory=list)
    counts: list[list[float]] = field(default_factory=list)
    order: int = 0


class ControlFormat:
    """The memory layout of the control blocks for one `Layout`; all ranks' blocks have the same size.

    Attributes:
        size_bytes: size of one block, a multiple of 64.
    """

    def __init__(self, layout: Layout, num_slots: int, num_params: int, num_values: int, num_names: int = 0) -> None:
        self._widths = (num_slots, num_slots, num_names, num_names)
        self._num_params = num_params
        self._shape = (layout.max_parts, num_values)
        most = max(len(held) for held in layout.ranges)
        self._padding = [0] * most
        self._struct = Struct(f"<q???xQQII??BxQ{most}Q{most * sum(self._widths)}d")
        self._used_at = self._struct.size
        self._parts_at = -(-(self._used_at + num_params) // 8) * 8
        self.size_bytes = -(-(self._parts_at + 8 * layout.max_parts * num_values) // 64) * 64
        self._most = most

    def pack_into(self, block: memoryview, control: Control) -> None:
        """Write a control block. Entries of micro-batches that this rank does not have are set to 0."""
        missing = self._most - len(control.fingerprints)
        numbers: list[float] = []
        for width, rows in zip(
            self._widths, (control.losses, control.weights, control.values, control.counts), strict=True
        ):
            numbers += [number for row in rows for number in row] + [0.0] * (missing * width)
        self._struct.pack_into(
            block,
            0,
            *control.vote,
            control.buffers_changed,
            control.has_new_names,
            control.num_losses,
            control.order,
            *control.fingerprints,
            *self._padding[:missing],
            *numbers,
        )
        block[self._used_at : self._used_at + self._num_params] = control.used
        if control.parts.size:
            self._view_parts(block)[:] = control.parts

    def unpack_from(self, block: memoryview, num_micro_batches: int) -> Control:
        """Read the control block of a rank that has `num_micro_batches`."""
        *vote, buffers_changed, has_new_names, num_losses, order = (unpacked := self._struct.unpack_from(block, 0))[:12]
        numbers = [*unpacked[12:]]
        fingerprints = numbers[:num_micro_batches]
        at = self._most
        tables: list[list[list[float]]] = []
        for width in self._widths:
            tables.append([list(numbers[at + k * width : at + (k + 1) * width]) for k in range(num_micro_batches)])
            at += self._most * width
        losses, weights, values, counts = tables
        used = block[self._used_at : self._used_at + self._num_params].tobytes()
        return Control(
            Vote(*vote),
            buffers_changed,
            has_new_names,
            losses,
            weights,
            fingerprints,
            used,
            self._view_parts(block),
            num_losses,
            values,
            counts,
            order,
        )

    def _view_parts(self, block: memoryview) -> NDArray[np.float64]:
        num_bytes = 8 * self._shape[0] * self._shape[1]
        return np.frombuffer(block[self._parts_at : self._parts_at + num_bytes], np.float64).reshape(self._shape)
