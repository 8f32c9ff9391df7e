"""A record of what a run did, bit for bit, for comparison with that of another run."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import samestep
from samestep.snapshot.serialization import digest
from support.snapshots import build_state


class Trace:
    """Written by a training function while it runs, the same on all of its ranks.

    Every entry is a (what, value) pair. Floats are hexadecimal, so that equal entries have equal bits.
    """

    def __init__(self, run: samestep.Run) -> None:
        self._run = run
        self.entries: list[tuple[str, Any]] = []

    def add(self, what: str, value: Any) -> None:
        self.entries.append((what, freeze(value)))

    def draw(self, where: str) -> None:
        """Draw from the three global generators."""
        self.add(f"draws {where}", (torch.rand(2), float(np.random.rand()), random.random()))

    def end_step(self, step: Any) -> None:
        """Record a step at the end of its body: its loss, the generators, and in one step a digest of the state.

        What differs after another step shows in what follows. A digest takes as long as a step.
        """
        self.add(f"loss of step {step.number}", step.loss)
        self.draw(f"in step {step.number}")
        if step.number == 1:
            self.add("digest of step 1", self.digest())

    def digest(self) -> str:
        """Return what `samestep inspect --digest` would print for a snapshot of this moment."""
        state = build_state(self._run, {"step": self._run.steps_done, "epoch": 0})
        if self._run._prepared is None or self._run._prepared.divided is None:
            return digest(state)
        found = [digest(state) if self._run.rank == 0 else ""]  # only rank 0 has the whole state
        dist.broadcast_object_list(found, 0)
        return found[0]

    def finish(self) -> list[tuple[str, Any]]:
        """Return the entries, after a check that all ranks have the same."""
        self.add("final digest", self.digest())
        if dist.is_available() and dist.is_initialized():
            traces: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(traces, self.entries)
            for rank, trace in enumerate(traces):
                assert_same(trace, self.entries, f"rank {rank}", f"rank {dist.get_rank()}")
        return self.entries


def freeze(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), freeze(value.tolist()))
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): freeze(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [freeze(item) for item in value]
    return value


def assert_same(found: list[tuple[str, Any]], wanted: list[tuple[str, Any]], here: str, there: str) -> None:
    """Fail with the first entry in which two traces differ."""
    for (what, value), (wanted_what, wanted_value) in zip(found, wanted, strict=False):
        assert what == wanted_what, f"{here} has the {what} where {there} has the {wanted_what}"
        assert value == wanted_value, f"{what}: {value} ({here}), {wanted_value} ({there})"
    assert len(found) == len(wanted), f"{here} has {len(found)} entries, {there} has {len(wanted)}"
