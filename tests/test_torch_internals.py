"""torch's private names still have the meaning on which samestep relies. A failure names the one that a release has
changed. Each test names an alternative.
"""

import multiprocessing
import selectors
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import get_worker_info

import samestep
from samestep import torch_internals


def test_a_version_counts_writes_but_not_those_through_data() -> None:
    """Without `_version`: compare copies of the values, as for buffers on the CPU; slower, the same results."""
    tensor = torch.zeros(3)
    before = torch_internals.read_version(tensor)
    tensor.data.add_(1)
    assert torch_internals.read_version(tensor) == before
    tensor.add_(1)
    assert torch_internals.read_version(tensor) == before + 1


def test_buffers_are_a_live_dict_with_those_that_are_none() -> None:
    """Without `_buffers`: `named_buffers`, `get_buffer` and `setattr`, which do not list buffers that are None."""
    module = nn.Module()
    buffers = torch_internals.get_buffers(module)
    module.register_buffer("none", None)
    module.register_buffer("mask", torch.ones(2))
    assert [*buffers] == ["none", "mask"]
    buffers["mask"] = torch.zeros(2)
    assert module.get_buffer("mask").tolist() == [0, 0]


def test_hooks_of_a_gradient_are_a_live_dict_in_their_order() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    calls = list[str]()
    hooks = torch_internals.get_grad_hooks(weight)
    hooks["ours"] = lambda param: calls.append("ours")
    weight.register_post_accumulate_grad_hook(lambda param: calls.append("the script's"))
    weight.sum().backward()
    assert calls == ["ours", "the script's"]
    hooks["ours"] = hooks.pop("ours")
    weight.sum().backward()
    assert calls[2:] == ["the script's", "ours"]


def test_storage_and_its_uses() -> None:
    """Without `_cdata`: `untyped_storage().data_ptr()`. Without `_storage_Use_Count`: copy gradients out of buckets."""
    tensor = torch.zeros(4)
    view = tensor[1:]
    storage = torch_internals.get_storage(tensor)
    assert torch_internals.get_storage(view) == storage != torch_internals.get_storage(tensor.clone())
    before = torch_internals.count_storage_uses(storage)
    del view
    assert torch_internals.count_storage_uses(storage) == before - 1


def test_a_lane_is_reported_as_a_worker() -> None:
    """Without `_worker_info`: read lanes in DataLoader workers only, which report themselves."""
    with torch_internals.as_worker(2, 5, "data"):
        info = get_worker_info()
        assert info is not None
        assert (info.id, info.num_workers, info.dataset) == (2, 5, "data")
    assert get_worker_info() is None


def test_backward_accumulates_what_torch_autograd_backward_does() -> None:
    """Without `run_backward`: `torch.autograd.backward`, which takes 30 us longer."""
    param = nn.Parameter(torch.ones(2))
    seed = torch.tensor(3.0)
    torch_internals.run_backward(
        (param.sum(),), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    assert param.grad is not None
    assert param.grad.tolist() == [3.0, 3.0]


def test_the_connections_of_gloo_are_found(tmp_path: Path) -> None:
    """Without the epoll of gloo's threads: the sockets that are open after `init_process_group`, and not before."""
    with selectors.EpollSelector() as others, socket.create_server(("127.0.0.1", 0)) as listener:
        others.register(listener, selectors.EVENT_READ)
        assert torch_internals.list_gloo_sockets() == []
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
        try:
            assert torch_internals.list_gloo_sockets()
        finally:
            dist.destroy_process_group()
        assert torch_internals.list_gloo_sockets() == []


def wait_for_one_that_is_cut_off() -> str:
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        torch_internals.break_gloo_connections()
    try:
        dist.barrier()
    except RuntimeError as error:
        dist.destroy_process_group()
        return str(error)
    return ""


def test_broken_connections_end_a_wait() -> None:
    """With one of several messages: gloo has not sent, or not received, or sees that the connection is closed."""
    assert "gloo/transport" in samestep.spawn(wait_for_one_that_is_cut_off, 2)


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


def test_the_iterator_of_a_loader() -> None:
    """Without `_next_index` and `_reset`: wrap the batch sampler, whose indices are equivalent (`verify --plain`)."""
    iterator = iter(torch.utils.data.DataLoader(range(4), 2))
    assert isinstance(iterator, torch_internals.LoaderIterator)
    assert iterator._next_index() == [0, 1]
    assert hasattr(torch_internals.LoaderIterator, "_reset")


def test_an_iterator_that_looks_for_dead_workers() -> None:
    """Without `_try_get_data`, which waits for data and raises if a worker is dead: load with a `multiprocessing` pool,
    whose processes are public.
    """
    iterator = iter(torch.utils.data.DataLoader(range(9), None, num_workers=1, prefetch_factor=1))
    torch_internals.watch_workers(iterator)
    (process,) = multiprocessing.active_children()
    assert next(iterator) == 0
    process.kill()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(iterator)
    torch_internals.abandon_workers(iterator)


def test_abandoned_workers_of_a_loader() -> None:
    """As above. A worker that is killed and not abandoned makes torch's SIGCHLD handler raise in the main thread."""
    iterator = iter(torch.utils.data.DataLoader(range(3), 1, num_workers=1))
    (process,) = multiprocessing.active_children()
    torch_internals.abandon_workers(iterator)
    process.kill()
    process.join()
    del iterator  # torch neither waits for the worker nor raises


def test_a_group_for_tensors_on_gpus_gets_gloo_for_those_in_host_memory() -> None:
    """Without `_register_backend`, `_device_types`: refuse such a group, and ask for "cpu:gloo,cuda:nccl"."""
    create: Any = dist.ProcessGroupGloo  # type: ignore[attr-defined]
    dist.Backend.register_backend("gpu", lambda *place: create(*place), devices=["cuda"])
    dist.init_process_group("gpu", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with pytest.raises(RuntimeError, match="cpu"):
            dist.broadcast(torch.ones(1), 0)
        torch_internals.add_gloo()
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(dist, "ProcessGroupGloo")  # the second call opens nothing
            torch_internals.add_gloo()
        dist.broadcast(torch.ones(1), 0)
    finally:
        dist.destroy_process_group()


def test_norms_and_groups_are_those_of_the_total_norm() -> None:
    """Without `_foreach_norm`: `torch.linalg.vector_norm`, which has other bits on a GPU. Without the function that
    groups: group in order of occurrence, whose bits differ from torch's if gradients have several dtypes.
    """
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float64]
    grads = [torch.randn(50 + i, generator=generator).to(dtype) for i, dtype in enumerate(dtypes)]
    groups = torch_internals.group_by_kind(grads)
    assert sorted(map(sorted, groups)) == [[0, 2], [1, 4], [3]]
    inner = [norm for group in groups for norm in torch_internals.compute_norms([grads[i] for i in group], 2.0)]
    assert torch.equal(torch.linalg.vector_norm(torch.stack(inner)), torch.nn.utils.get_total_norm(grads))


def test_clipping_looks_at_the_gradients_first() -> None:
    """Without `_get_total_norm`: replace `torch.nn.utils.clip_grad_norm_` and `get_total_norm`, which misses scripts
    that import them.
    """
    from torch.nn.utils import clip_grad_norm_, get_total_norm

    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(3)
    seen: list[Any] = []
    undo = torch_internals.watch_norms(seen.append)
    clip_grad_norm_(params, 1.0)
    norm = get_total_norm(param.grad for param in params)
    undo()
    assert torch.equal(norm, torch_internals.get_total_norm([param.grad for param in params], 2.0))
    clip_grad_norm_(params, 1.0)
    for grads in seen:
        assert all(grad is param.grad for grad, param in zip(grads, params, strict=True))
    assert len(seen) == 2


def test_groups_have_the_same_name_after_one_has_failed() -> None:
    """Without `group_count`: the ranks that meet after a death have other names for their group, and wait in vain."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.05))
    torch_internals.reset_group_names()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    group: Any = dist.group.WORLD
    name = group.group_name
    dist.destroy_process_group()
    assert name == "0"
