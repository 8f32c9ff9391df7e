"""Buffers after a step equal those of training on one device, whichever rank computes which micro-batch."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import samestep
from samestep.engine.buffers import BatchNormStatistics, OtherBuffers, check_module, refuse_lone_sample
from samestep.plan.tree import build_layout


def build_model(momentum: float | None = 0.1) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(3, momentum=momentum), nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=momentum))


def draw(step: int, v: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + v)
    return torch.randn(4, 3, generator=generator) * (1 + v) + step


def read(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def run_steps(
    model: nn.Module, num_micro_batches: list[int], num_ranks: int, forward: Callable[[nn.Module, Tensor, int], object]
) -> dict[str, Tensor]:
    """Compute steps of this many micro-batches with a copy of the model per rank. Returns the buffers of all copies."""
    models = [copy.deepcopy(model) for _ in range(num_ranks)]
    statistics = [BatchNormStatistics([each]) for each in models]
    for step, n in enumerate(num_micro_batches):
        layout = build_layout(n, num_ranks)
        for rank, each in enumerate(statistics):
            each.begin(layout, rank)
            for v in layout.ranges[rank]:
                forward(models[rank], draw(step, v), v)
                each.fold()
        parts = [each.parts() for each in statistics]
        for each in statistics:
            each.finish([part.copy() for part in parts])
    found = [read(each) for each in models]
    for other in found[1:]:
        assert all(torch.equal(other[name], buffer) for name, buffer in found[0].items())
    return found[0]


def call(model: nn.Module, x: Tensor, v: int) -> object:
    return model(x)


def call_twice(model: nn.Module, x: Tensor, v: int) -> object:
    return model(x), model(x.flip(0) * 2)


@pytest.mark.parametrize("momentum", [0.1, 0.9, 1.0, 0.0, None])
@pytest.mark.parametrize("forward", [call, call_twice])
def test_batch_norm_equals_that_of_one_device(momentum: float | None, forward: Callable[..., object]) -> None:
    """The reference accumulates on one device, one micro-batch after the other, in float64."""
    model = build_model(momentum)
    model.double()
    reference = copy.deepcopy(model)
    num_micro_batches = [4, 7, 1, 5]
    for step, n in enumerate(num_micro_batches):
        for v in range(n):
            forward(reference, draw(step, v).double(), v)

    def forward_double(model: nn.Module, x: Tensor, v: int) -> object:
        return forward(model, x.double(), v)

    expected = read(reference)
    for num_ranks in (1, 2, 3, 5):
        found = run_steps(model, num_micro_batches, num_ranks, forward_double)
        for name, buffer in expected.items():
            torch.testing.assert_close(found[name], buffer, rtol=1e-9, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(2, 6))
def test_batch_norm_has_the_same_bits_on_any_number_of_ranks(num_micro_batches: list[int], num_ranks: int) -> None:
    torch.manual_seed(0)
    model = build_model()
    alone = run_steps(model, num_micro_batches, 1, call)
    shared = run_steps(model, num_micro_batches, num_ranks, call)
    assert all(torch.equal(shared[name], buffer) for name, buffer in alone.items())


def test_layers_in_eval_mode_stay() -> None:
    """All layers or one of them; also if the script calls eval() in the middle of a micro-batch."""
    model = build_model()
    before = read(model)
    model.eval()
    assert all(torch.equal(found, before[name]) for name, found in run_steps(model, [3], 2, call).items())
    model.train()
    layer = model.get_submodule("2")
    layer.eval()
    found = run_steps(model, [3], 2, call)
    assert torch.equal(found["2.running_mean"], before["2.running_mean"])
    assert not torch.equal(found["0.running_mean"], before["0.running_mean"])


def test_modules_without_statistics() -> None:
    for model in (nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)):
        assert run_steps(model, [2, 3], 2, call) == {}


def test_layers_of_two_kinds() -> None:
    """The buffers are as with layers on two devices."""
    models = nn.BatchNorm1d(3), nn.BatchNorm1d(3).double()
    apart = [run_steps(each, [3, 2], 1, lambda m, x, v: m(x.to(m.running_mean.dtype))) for each in models]
    for num_ranks in (1, 2, 3):
        both = run_steps(
            nn.ModuleList(copy.deepcopy(models)), [3, 2], num_ranks,
            lambda both, x, v: [each(x.to(each.running_mean.dtype)) for each in both],
        )  # fmt: skip
        for k, wanted in enumerate(apart):
            assert all(torch.equal(both[f"{k}.{name}"], buffer) for name, buffer in wanted.items())


def test_the_buffers_are_still_the_models() -> None:
    """After they moved into one block of memory they are the same tensors: saved, loaded and shared as before."""
    model = build_model()
    buffers = dict(model.named_buffers())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    BatchNormStatistics([model])
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.get_buffer("0.num_batches_tracked").shape == ()


# --- other buffers ----------------------------------------------------------------------------------------------------


class Counter(nn.Module):
    """A module whose buffers are written in place, replaced, left unchanged, and shared under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.register_buffer("none", None)
        self.total: Tensor
        self.last: Tensor
        self.mask: Tensor
        self.same = nn.Module()
        self.same.register_buffer("total", self.total)

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum()
        self.last = x[:2].clone()
        return x


def build_others(model: nn.Module) -> OtherBuffers:
    return OtherBuffers({"model": model}, BatchNormStatistics([model]))


def test_micro_batch_0_decides() -> None:
    model = Counter()
    buffers = build_others(model)
    for step in range(2):
        buffers.begin()
        for v in range(3):
            before = model.total.item(), model.last.tolist()
            model(torch.full((3,), 1.0 + v + step))
            buffers.fold(v)
            assert (model.total.item(), model.last.tolist()) == before, "each starts where the step began"
        assert buffers.changed
        values = buffers.copy_first()
        assert len(values) == 3
        buffers.finish(values)
    assert model.total.item() == 3.0 + 6.0
    assert model.last.tolist() == [2.0, 2.0]
    assert model.total is model.same.total


def test_a_rank_without_micro_batch_0_waits_for_its_buffers() -> None:
    model = Counter()
    buffers = build_others(model)
    buffers.begin()
    model(torch.ones(3))
    buffers.fold(1)
    assert not buffers.changed
    values = buffers.copy_first()
    for tensor in values:
        tensor.fill_(5.0)  # as the broadcast does
    assert model.total.item() == 0.0, "until all ranks have them"
    buffers.finish(values)
    assert (model.total.item(), model.last.tolist(), model.mask.tolist()) == (5.0, [5.0, 5.0], [5.0, 5.0])
    buffers.begin()
    model(torch.ones(3))
    buffers.fold(1)
    assert model.total.item() == 5.0, "from here on they start with the received values"


def test_unchanged_buffers() -> None:
    model = Counter()
    buffers = build_others(model)
    buffers.begin()
    buffers.fold(0)
    assert not buffers.changed


def test_the_script_may_change_buffers_between_steps() -> None:
    model = Counter()
    buffers = build_others(model)
    model.total.fill_(7.0)
    model.last = torch.ones(2)
    buffers.begin()
    model(torch.ones(3))
    buffers.undo()
    assert (model.total.item(), model.last.tolist()) == (7.0, [1.0, 1.0])


def test_large_buffers_with_the_same_bits_share_a_copy() -> None:
    model = nn.Module()
    for name, value in {"a": 0.0, "b": 0.0, "c": -0.0, "d": 0.0, "e": 1.0}.items():
        model.register_buffer(name, torch.full((100, 100), value))
    buffers = build_others(model)
    assert len({copy.data_ptr() for copy in buffers._start}) == 3
    model.get_buffer("b").add_(1)
    buffers.begin()
    model.get_buffer("b").add_(1)
    model.get_buffer("d").data.add_(1)
    buffers.fold(1)
    means = [buffer.mean().item() for buffer in model.buffers()]
    assert means == [0, 1, 0, 0, 1]
    assert model.get_buffer("c").signbit().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.bfloat16, torch.float64, torch.complex64])
def test_large_buffers_of_any_dtype_share_a_copy(dtype: torch.dtype) -> None:
    model = nn.Module()
    for name, value in {"a": 1.0, "b": 1.0, "c": 0.0}.items():
        model.register_buffer(name, torch.full((100, 100), value).to(dtype))
    assert len({copy.data_ptr() for copy in build_others(model)._start}) == 2


def test_buffers_that_cannot_be_followed() -> None:
    model = Counter()
    buffers = build_others(model)
    buffers.begin()
    model._buffers["last"] = None
    with pytest.raises(samestep.Error, match=r"buffer model\.last was added or removed inside the micro-batch loop"):
        buffers.fold(0)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_sync_batch_norm() -> None:
    check_module("model", build_model())
    with pytest.raises(samestep.Error, match=r"model\.0 is a SyncBatchNorm, .*: use BatchNorm"):
        check_module("model", nn.Sequential(nn.SyncBatchNorm(3)))


def test_lone_samples() -> None:
    """A single value per channel is refused; a sequence, eval mode, and calls after the micro-batch are not."""
    flat, sequence = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    modules = {"model": nn.ModuleDict({"flat": flat, "sequence": sequence})}
    guards = refuse_lone_sample(modules, 7, 2, 1)
    sequence(torch.ones(1, 3, 4))
    with pytest.raises(
        samestep.Error, match=r"micro-batch 2 of step 7 \(rank 1\) .* model\.flat cannot .*\(1, 3\)"
    ) as caught:
        flat(torch.ones(1, 3))
    assert caught.value.rank == 1
    flat.eval()
    flat(torch.ones(1, 3))
    flat.train()
    for guard in guards:
        guard.remove()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        flat(torch.ones(1, 3))
