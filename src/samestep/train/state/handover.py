"""Takes in ranks that replace others, between two steps (docs/decisions/healing.md).

Such a rank has run the script's lines up to `run.prepare` beside the running ones. It then gets the state of the run
from them, as if it resumed from a snapshot of this step.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samestep.decoding import parse_json
from samestep.errors import NotHealed
from samestep.snapshot.resume_point import ResumePoint
from samestep.snapshot.serialization import HeldTensors, SavedState, encode
from samestep.tagged import find_dtype, name_dtype
from samestep.train.context import RunContext
from samestep.world.group import Group

Plain = dict[str, Any]  # values as for `Group.gather`
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Handover:
    """What a rank that joins gets from the others.

    Attributes:
        point: where it joins, without a snapshot.
        saved: the state at this point.
        tensors: those of `saved`.
        saved_step, recent: as in `Snapshotter`.
        num_calls: how many calls the others have announced.
        gone: the ranks that have died so far.
    """

    point: ResumePoint
    saved: SavedState
    tensors: HeldTensors
    saved_step: int | None
    recent: Sequence[Sequence[Any]]
    num_calls: int
    gone: Sequence[int]

    def release(self) -> None:
        """Free the tensors, once the loop begins."""
        self.tensors.clear()


def receive_state(context: RunContext) -> Handover:
    """Join the others, and get the state of the run.

    Raises:
        NotHealed: none of those that have it is left.
    """
    with context.group.joined(context.environment):
        plain, tensors = _exchange(context.group, None)
    held = HeldTensors(tensors)
    saved = SavedState(parse_json(plain["structure"]), held)
    point = ResumePoint(plain["step"], plain["meta"])
    return Handover(point, saved, held, plain["saved_step"], plain["recent"], plain["num_calls"], plain["gone"])


def hand_over(
    group: Group,
    contents: Any,
    *,
    step: int,
    meta: Any,
    saved_step: int | None,
    recent: Sequence[Sequence[Any]],
    num_calls: int,
    gone: Sequence[int],
) -> None:
    """Send the state of the run to the ranks that have joined. On all ranks that have it, with the same values.

    Args:
        contents: of a snapshot of this step.
        step: the number of steps done.
        meta: as in `ResumePoint`.
        saved_step, recent, num_calls, gone: as in `Handover`.
    """
    structure, tensors = encode(contents)
    plain = {"structure": json.dumps(structure), "step": step, "meta": meta, "saved_step": saved_step}
    lists = {"recent": [[saved, [*names]] for saved, names in recent], "gone": [*gone]}
    _exchange(group, ({**plain, **lists, "num_calls": num_calls}, tensors))


def _exchange(group: Group, own: tuple[Plain, Tensors] | None) -> tuple[Plain, Tensors]:
    """Give the values and the tensors of ranks that have them to those that have none (`own` is None). On all ranks."""

    def exchange() -> tuple[Plain, Tensors]:
        sources = [rank for rank, has_state in enumerate(group.gather_number(int(own is not None))) if has_state]
        if not sources:
            raise NotHealed("no rank is left that has the state of the run")
        described: Any = None
        if own is not None:
            described = own[0], [(name, name_dtype(each.dtype), [*each.shape]) for name, each in own[1].items()]
        plain, outlines = group.broadcast(described, sources[0])
        tensors = (
            own[1] if own else {name: torch.empty(shape, dtype=find_dtype(kind)) for name, kind, shape in outlines}
        )
        full = [tensor for tensor in tensors.values() if tensor.numel()]
        senders = [(tensor, sources[i % len(sources)]) for i, tensor in enumerate(full)]  # each rank sends a part
        if own:
            targets = [rank for rank in range(group.world_size) if rank not in sources]
            mine = [tensor for tensor, sender in senders if sender == group.rank]
            group.exchange_tensors([(tensor, target) for target in targets for tensor in mine], [])
        else:
            group.exchange_tensors([], senders)
        return plain, tensors

    return group.complete(exchange)
