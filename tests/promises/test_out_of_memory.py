"""The memory that a rank uses is what `samestep scale` computes."""

import ctypes
import re
import resource
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_run
from torch import nn

import samestep
from samestep.plan.memory import compute_memory
from samestep.torch_internals import get_local
from samestep.train.state.param_sizes import measure_sizes

SHARDS = ("none", "optimizer", "fsdp2")


def build_blocks() -> nn.Module:
    blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
    return nn.Sequential(nn.Linear(5, 7), *blocks, nn.Linear(7, 3))


def measure() -> list[Any]:
    """Return the sizes, and of each rank the bytes of its parameters, of gradients and of its optimizer's state."""
    found: list[Any] = []

    def count(t: Any) -> None:
        params = [*t.model.parameters()]
        state = [value for each in t.optimizer.state.values() for value in each.values()]
        tensors = (params, [param.grad for param in params if param.grad is not None], state)
        found[:] = [sum(get_local(each).nbytes for each in some) for some in tensors]
        found.append(measure_sizes({"model": t.model, "optimizer": t.optimizer}, {"model": t.model}, None))

    tiny_run(None, model=build_blocks, optimizer=torch.optim.AdamW, data=torch.ones(24, 5), after_epoch=count)
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, found)
    return everywhere


@pytest.mark.parametrize("shard", SHARDS)
def test_the_formulas_are_those_of_a_run(shard: str) -> None:
    ranks = samestep.spawn(measure, 3, env={"SAMESTEP_SHARD": shard})
    sizes = ranks[0][3]
    assert all(of_rank[3] == sizes for of_rank in ranks), "also where a rank has no state of a parameter"
    assert sum(size.num_bytes for size in sizes) == 4 * (40 + 2 * 56 + 24 + 2)
    expected = compute_memory(sizes, None if shard == "none" else shard, 3)
    assert max(params for params, *_ in ranks) == expected.parameters
    assert max(state for *_, state, _ in ranks) == expected.optimizer_state
    if shard != "optimizer":  # which drops the gradients of other owners after the step's exchange
        assert max(grads for _, grads, *_ in ranks) == expected.gradients


M_MMAP_THRESHOLD = -3  # of mallopt
ROOM = 3.7  # of the bytes of the parameters; without a shard, 4 times these bytes are needed


def train_large(limit: str) -> int:
    """Train a model of 128 MiB on a rank that may allocate `ROOM` times as much.

    glibc would keep freed blocks of up to 32 MiB, which the limit counts.
    """
    import_module("torch._dynamo")  # modules take memory, too
    import_module("torch.distributed.fsdp")
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    run = samestep.Run(None, batch_size=8, micro_batch_size=4)
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    used = int(status[{"RLIMIT_DATA": "VmData", "RLIMIT_AS": "VmSize"}[limit]].split()[0]) * 1024
    most = used + int(ROOM * (128 << 20))
    resource.setrlimit(getattr(resource, limit), (most, most))
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.prepare(model=model, optimizer=optimizer, shard_blocks=[nn.Linear])
    for step in run.steps(torch.ones(16, 2048), 2):
        for x in step:
            step.backward(model(x).square().mean())
        optimizer.step()
    return run.steps_done


# Two starts of two ranks, with a model of 128 MB and its optimizer: 36 s, and 48 s on a busy machine.
def test_a_model_that_fits_only_in_parts() -> None:
    with pytest.raises(samestep.Error) as caught:
        samestep.spawn(train_large, 2, ("RLIMIT_DATA",))
    assert re.fullmatch(
        r"rank . has run out of memory: parameters, gradients and the optimizers' state need 537 MB on each rank with "
        r'shard=None, and there are \d\d\d MB for them \(RLIMIT_DATA\): use shard="optimizer" on 2 ranks or more, '
        r"which needs 403 MB besides activations",
        str(caught.value),
    ), caught.value
    assert samestep.spawn(train_large, 2, ("RLIMIT_DATA",), env={"SAMESTEP_SHARD": "fsdp2"}) == 2


def fail(error: Exception) -> None:
    def raise_error(_: Any) -> None:
        raise error

    tiny_run(None, after_epoch=raise_error)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError("Unable to allocate 2.00 GiB for an array"),
        RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
def test_each_error_of_an_allocation_is_known(error: Exception) -> None:
    with pytest.raises(samestep.Error, match="so activations and messages need too much: use a smaller micro_batch_si"):
        samestep.spawn(fail, 1, (error,))
    with pytest.raises(RuntimeError, match="out of paper"):
        samestep.spawn(fail, 1, (RuntimeError("out of paper"),))
