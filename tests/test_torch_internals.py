"""What private names of torch do, where no other test fails if a release changes it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from samestep import torch_internals


def test_the_backend_of_gpus_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `_get_backend`: `torch.distributed.distributed_c10d._abort_process_group`, which also destroys the group,
    so that a thread cannot call it while another one waits.
    """
    torch_internals.abort_nccl()  # there is no group
    aborted: list[Any] = []
    gloo: Any = dist.ProcessGroupGloo  # type: ignore[attr-defined]
    monkeypatch.setattr(gloo, "abort", lambda backend: aborted.append(backend))
    dist.Backend.register_backend("double", lambda *place: gloo(*place), devices=["cuda"])
    dist.init_process_group("cpu:gloo,cuda:double", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        torch_internals.abort_nccl()
        assert len(aborted) == 1
    finally:
        dist.destroy_process_group()


def test_clipping_looks_at_the_gradients_first() -> None:
    """Without `_get_total_norm`: replace `torch.nn.utils.clip_grad_norm_` and `get_total_norm`, which misses scripts
    that import them.
    """
    from torch.nn.utils import clip_grad_norm_, get_total_norm

    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(3)
    seen: list[Any] = []
    undo = torch_internals.observe_norms(seen.append)
    clip_grad_norm_(params, 1.0)
    norm = get_total_norm(param.grad for param in params)
    undo()
    assert torch.equal(norm, torch_internals.get_total_norm([param.grad for param in params], 2.0))
    clip_grad_norm_(params, 1.0)
    for grads in seen:
        assert all(grad is param.grad for grad, param in zip(grads, params, strict=True))
    assert len(seen) == 2
