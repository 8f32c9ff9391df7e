"""The loss scale of float16: powers of two, halved by an overflow, alike on all ranks."""

import math

import pytest
import torch

import samestep
from samestep.engine.precision import build_precision

CPU = torch.device("cpu")


def test_overflow_halves_the_scale_and_refuses_the_gradient() -> None:
    precision = build_precision("fp16", CPU)
    before = precision.scale
    assert precision.accepts([torch.ones(3)])
    assert not precision.accepts([torch.ones(3), torch.tensor([1.0, math.inf])])
    assert precision.scale == before / 2
    assert not precision.accepts([torch.tensor([math.nan])])
    assert math.log2(precision.scale).is_integer()


def test_scale_grows_after_many_good_steps_and_is_restored() -> None:
    precision = build_precision("fp16", CPU)
    before = precision.scale
    for _ in range(2000):
        assert precision.accepts([torch.ones(1)])
    assert precision.scale == 2 * before
    precision.accepts([torch.ones(1)])
    other = build_precision("fp16", CPU)
    other.load_state_dict(precision.state_dict())
    assert other.state_dict() == precision.state_dict()


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast(name: str, dtype: torch.dtype) -> None:
    precision = build_precision(name, CPU)
    with precision.autocast():
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype
    assert precision.scale == 1.0
    assert precision.accepts(iter([torch.tensor([math.inf])]))


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(samestep.Error, match="fp32, bf16 or fp16"):
        build_precision("fp8", CPU)


def test_fp16_on_a_cpu_is_slow_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    samestep.Run(None, batch_size=4, precision="fp16", device="cpu")
    samestep.Run(None, batch_size=4, precision="bf16", device="cpu")
    assert "".join(capfd.readouterr()).count("fp16 is slower than fp32 on most CPUs: use bf16") == 1
