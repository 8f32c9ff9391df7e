"""torch's private names still mean what samestep takes them for. A failure names the one that a release has changed."""

import torch
from torch import nn
from torch.utils.data import get_worker_info

from samestep import torch_internals


def test_a_version_counts_writes_but_not_those_through_data() -> None:
    tensor = torch.zeros(3)
    before = torch_internals.read_version(tensor)
    tensor.data.add_(1)
    assert torch_internals.read_version(tensor) == before
    tensor.add_(1)
    assert torch_internals.read_version(tensor) == before + 1


def test_buffers_are_a_live_dict_with_those_that_are_none() -> None:
    module = nn.Module()
    buffers = torch_internals.get_buffers(module)
    module.register_buffer("none", None)
    module.register_buffer("mask", torch.ones(2))
    assert [*buffers] == ["none", "mask"]
    buffers["mask"] = torch.zeros(2)
    assert module.get_buffer("mask").tolist() == [0, 0]


def test_storage_and_its_uses() -> None:
    tensor = torch.zeros(4)
    view = tensor[1:]
    storage = torch_internals.get_storage(tensor)
    assert torch_internals.get_storage(view) == storage != torch_internals.get_storage(tensor.clone())
    before = torch_internals.count_storage_uses(storage)
    del view
    assert torch_internals.count_storage_uses(storage) == before - 1


def test_a_lane_is_reported_as_a_worker() -> None:
    with torch_internals.as_worker(2, 5, "data"):
        info = get_worker_info()
        assert info is not None
        assert (info.id, info.num_workers, info.dataset) == (2, 5, "data")
    assert get_worker_info() is None


def test_backward_accumulates_what_torch_autograd_backward_does() -> None:
    param = nn.Parameter(torch.ones(2))
    seed = torch.tensor(3.0)
    torch_internals.run_backward(
        (param.sum(),), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    assert param.grad is not None
    assert param.grad.tolist() == [3.0, 3.0]


def test_the_iterator_of_a_loader() -> None:
    iterator = iter(torch.utils.data.DataLoader(range(4), 2))
    assert isinstance(iterator, torch_internals.LoaderIterator)
    assert iterator._next_index() == [0, 1]
    assert hasattr(torch_internals.LoaderIterator, "_reset")
