"""Buffers after a step are the same on all ranks, whichever rank computes which micro-batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.engine.buffers import Buffers
from samestep.plan.tree import build_layout
from samestep.world.environment import read_environment
from samestep.world.group import open_group


class Counter(nn.Module):
    """A module whose buffers are written in place, replaced, left unchanged, and shared under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.register_buffer("lowest", torch.full((), torch.inf))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("is_begun", torch.tensor(False))
        self.register_buffer("none", None)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.same = nn.Module()
        self.same.register_buffer("total", self.total)

    def forward(self, x: Tensor, v: int) -> Tensor:
        self.total += x.sum()
        self.last = x[:2].clone()
        if v == 2:  # only this micro-batch changes these
            torch.minimum(self.lowest, x.min(), out=self.lowest)
            self.is_begun.fill_(True)
        self.calls.data.add_(v + 2)  # torch does not count this
        self.cache = torch.zeros(len(self.cache) + 1)
        return x


def run_pass(buffers: Buffers, n: int, forward: Callable[[int], object]) -> None:
    buffers.begin(build_layout(n, 1))
    for v in range(n):
        forward(v)
        buffers.take()
    buffers.finish(buffers.exchange([buffers.pack()]))


def build_buffers(model: nn.Module) -> Buffers:
    return Buffers({"model": model}, open_group(read_environment(), torch.device("cpu")))


def test_values_after_a_step() -> None:
    model = Counter()
    buffers = build_buffers(model)
    for step in range(2):
        start = model.total.item()

        def forward(v: int, start: float = start) -> None:
            assert model.total.item() == start, "each micro-batch starts where the step began"
            model(torch.full((3,), 1.0 + v), v)

        run_pass(buffers, 4, forward)
        assert model.total.item() == start + 3 * (1 + 2 + 3 + 4) / 4
        assert model.last.tolist() == [2.5, 2.5]
        assert model.lowest.item() == 3.0, "micro-batches that do not change it do not count"
        assert (model.calls.item(), model.is_begun.item()) == (4 * (step + 1), True), "the rounded mean"
        assert model.mask.tolist() == [-torch.inf] * 2
        assert len(model.cache) == 1 + 4 * (step + 1), "it is no state"
    assert model.total is model.same.total


@pytest.mark.parametrize(("dtype", "value"), [
    (torch.float16, 30000.0), (torch.float32, torch.finfo(torch.float32).min), (torch.float32, 0.1),
    (torch.complex64, 3e38),
])  # fmt: skip
def test_a_value_that_all_micro_batches_give_stays(dtype: torch.dtype, value: float) -> None:
    """No sum overflows or is rounded."""
    model = nn.Module()
    model.register_buffer("same", torch.zeros(2, dtype=dtype))
    run_pass(build_buffers(model), 3, lambda v: model.same.fill_(value))
    assert torch.equal(model.same, torch.full((2,), value, dtype=dtype))


def test_the_script_may_change_buffers_between_steps() -> None:
    model = Counter()
    buffers = build_buffers(model)
    run_pass(buffers, 1, lambda v: model(torch.ones(3), v))
    model.total.fill_(7.0)
    model.last = torch.ones(2)
    buffers.hold()
    model(torch.ones(3), 0)
    buffers.undo()
    assert (model.total.item(), model.last.tolist()) == (7.0, [1.0, 1.0])


def test_buffers_that_cannot_be_followed() -> None:
    model = Counter()
    buffers = build_buffers(model)
    buffers.begin(build_layout(2, 1))
    model.last = torch.zeros(3)
    with pytest.raises(samestep.Error, match=r"buffer model\.last changed its shape .* \(2,\) to \(3,\): keep"):
        buffers.take()
    model._buffers["last"] = None
    with pytest.raises(samestep.Error, match=r"buffer model\.last was added or removed inside the micro-batch loop"):
        buffers.take()
