"""The shapes of other stages are computed once, and as if they were computed each time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from samestep.pipeline import outlines
from samestep.pipeline.outlines import Outlines


def build_double(calls: list[float]) -> Callable[[Tensor, float], Tensor]:
    """A function of a library, which notes when it runs."""

    def double(x: Tensor, factor: float) -> Tensor:
        if has_torch_function((x,)):
            return handle_torch_function(double, (x,), x, factor)  # type: ignore[no-any-return]
        calls.append(factor)
        return torch.cat([x, x * factor])

    return double


def test_once_for_the_same_arguments() -> None:
    calls: list[float] = []
    double = build_double(calls)
    long, short = torch.empty(4, 2, device="meta"), torch.empty(1, 2, device="meta")
    with Outlines():
        shapes = [double(x, factor).shape for x in (long, short, long) for factor in (1, 1.0, 1)]
    assert calls == [1, 1.0, 1, 1.0]
    assert shapes == [(8, 2)] * 3 + [(2, 2)] * 3 + [(8, 2)] * 3


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that differs each time does not fill the memory."""
    monkeypatch.setattr(outlines, "MAX_KNOWN", 2)
    calls: list[float] = []
    double = build_double(calls)
    x = torch.empty(4, 2, device="meta")
    with Outlines():
        for factor in (1, 2, 1, 3, 1):
            double(x, factor)
    assert calls == [1, 2, 3, 1]


def unsqueeze(x: Tensor) -> Any:
    y = x.clone()
    y.unsqueeze_(0)
    return y.shape


def drop_grad(x: Tensor) -> Any:
    y = x.detach()
    y.grad = x
    assert y.grad is not None
    y.grad = None
    return y.grad


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "containers": lambda x: x.max(0),
    "several": lambda x: torch.cat(x.chunk(2, dim=1)[::-1]),
    "nested": lambda x: nn.LSTM(6, 3, device="meta")(x)[1],
    "strides": lambda x: [each.relu().stride() for each in (x[:4, :4], x[:4, :4].t())],
    "an argument that changes": unsqueeze,
    "an attribute": drop_grad,
    "an argument without a hash": lambda x: x[torch.zeros(3, dtype=torch.int64, device="meta")],
    "no tensor": lambda x: (x.shape, x.dtype, x.is_floating_point()),
    "dtypes": lambda x: [F.relu(each) for each in (x, x.double())],
    "devices": lambda x: [F.relu(each) for each in (x[0, :2], torch.ones(2))],
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_as_without_it(function: Callable[[Tensor], Any]) -> None:
    mode = Outlines()
    for shape in [(4, 6), (8, 6), (4, 6), (4, 6)]:
        x = torch.empty(shape, device="meta")
        with torch.no_grad():  # outlines have no graph
            expected = function(x)
            with mode:
                assert repr(function(x)) == repr(expected)


def test_values_are_computed_each_time() -> None:
    with Outlines():
        assert not torch.equal(torch.rand(4), torch.rand(4))
