"""The memory that a rank uses is what `samestep scale` computes."""

from typing import Any

import pytest
import torch
from support.tiny import tiny_run
from torch import nn

import samestep
from samestep.plan.shards import ParamSize, RankMemory, choose_owners, compute_memory
from samestep.torch_internals import get_local
from samestep.train.interception import measure_sizes
from samestep.train.objects import Objects

SHARDS = ("none", "optimizer", "fsdp2")


def build_blocks() -> nn.Module:
    blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
    return nn.Sequential(nn.Linear(5, 7), *blocks, nn.Linear(7, 3))


def measure() -> list[Any]:
    """Return of each rank the bytes of its parameters, of gradients and of its optimizer's state, and all sizes."""
    found: list[Any] = []

    def count(t: Any) -> None:
        params = [*t.model.parameters()]
        state = [value for each in t.optimizer.state.values() for value in each.values()]
        tensors = (params, [param.grad for param in params if param.grad is not None], state)
        own = [sum(get_local(each).nbytes for each in some) for some in tensors]
        sizes = measure_sizes(Objects({"model": t.model, "optimizer": t.optimizer}), None)
        found[:] = t.run._context.group.gather(own), sizes

    tiny_run(None, model=build_blocks, optimizer=torch.optim.AdamW, data=torch.ones(24, 5), after_epoch=count)
    return found


@pytest.mark.parametrize("shard", SHARDS)
def test_the_formulas_are_those_of_a_run(shard: str) -> None:
    ranks, _ = samestep.spawn(measure, 3, env={"SAMESTEP_SHARD": shard})
    _, sizes = samestep.spawn(measure, 1)
    assert sum(size.num_bytes for size in sizes) == 4 * (40 + 2 * 56 + 24 + 2)
    expected = compute_memory(sizes, None if shard == "none" else shard, 3)
    assert max(params for params, *_ in ranks) == expected.parameters
    assert max(state for *_, state in ranks) == expected.optimizer_state
    if shard != "optimizer":  # which drops the gradients of other owners after the step's exchange
        assert max(grads for _, grads, _ in ranks) == expected.gradients


def test_what_a_rank_gathers_and_owns() -> None:
    sizes = [ParamSize(400, 10, 400, 800, block=1), ParamSize(120, 3, 120, 240, block=2)]
    assert compute_memory(sizes, "fsdp2", 4) == RankMemory(160, 160, 320, gathered_block=800)
    assert choose_owners([40, 10, 30, 20, 50], 2, {0: 0, 1: 0, 2: 1, 3: 1}) == [0, 0, 1, 1, 0]
