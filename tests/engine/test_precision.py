"""The loss scale of float16 (powers of two, halved by an overflow, the same on all ranks) and the settings of TF32."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_run

import samestep
from samestep.engine.passes import MixedPrecision
from samestep.train.determinism import read_float32_settings, use_tf32

CPU = torch.device("cpu")


def test_a_gradient_that_is_finite_at_no_scale_is_an_error() -> None:
    """(That an overflow halves the scale is in promises/cases.py.)"""
    precision = MixedPrecision("fp16", CPU)
    with pytest.raises(samestep.Error, match="at every loss scale"):
        for _ in range(100):
            assert not precision.accepts([torch.tensor([math.nan])])


def test_scale_grows_after_many_good_steps_and_is_restored() -> None:
    precision = MixedPrecision("fp16", CPU)
    before = precision.scale
    for _ in range(2000):
        assert precision.accepts([torch.ones(1)])
    assert precision.scale == 2 * before
    precision.accepts([torch.ones(1)])
    other = MixedPrecision("fp16", CPU)
    other.load_state_dict(precision.state_dict())
    assert other.state_dict() == precision.state_dict()


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_autocast(name: str, dtype: torch.dtype) -> None:
    precision = MixedPrecision(name, CPU)
    with precision.autocast():
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype
    assert precision.scale == 1.0
    assert precision.accepts(iter([torch.tensor([math.inf])]))


def train_with_tf32(run_dir: Path, step: int) -> dict[str, str]:
    """Train up to `step` with torch's settings of TF32 changed by a script. Return those of a GPU."""
    if step == 1:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix"):  # so samestep does not read it
            torch.get_float32_matmul_precision()
    else:
        torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
    tiny_run(run_dir, num_steps=step, precision="tf32")
    return read_float32_settings("cuda")


def test_the_settings_of_tf32_are_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = samestep.spawn(train_with_tf32, 1, (tmp_path / "run", 1))
    assert found == {"matmul": "tf32", "convolution": "tf32"}  # torch's default for convolutions
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["numbers"]["precision"] == "tf32"
    assert record["machine"]["matmul"] == record["machine"]["convolution"] == "ieee"  # of the CPU
    samestep.spawn(train_with_tf32, 1, (tmp_path / "run", 2))
    assert "(convolution ieee -> tf32, matmul ieee -> tf32)" in "".join(capfd.readouterr())


def test_tf32_of_a_run_leaves_all_interfaces_of_torch_readable() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        assert read_float32_settings("cuda") == {"matmul": "ieee", "convolution": "ieee"}
        use_tf32()
        assert read_float32_settings("cuda") == {"matmul": "tf32", "convolution": "tf32"}
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def clip(precision: Any, scale: float) -> list[float]:
    """Return the norms of a step's gradient before and after clipping to 1. The weights do not change."""
    run = samestep.Run(None, batch_size=8, micro_batch_size=4, precision=precision, device="cpu")
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    run.prepare(model=model, optimizer=optimizer)
    for step in run.steps(torch.arange(32.0).view(8, 4) / 8, 6):  # the first ones overflow with fp16
        for x in step:
            with run.autocast():
                loss = model(x).square().mean() * scale
            step.backward(loss)
        before = run.clip_grad_norm_(model.parameters(), 1.0)
        after = torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
        optimizer.step()
        norms = [float(before), float(after)]
    return norms


def test_fp16_clips_the_gradient_without_the_loss_scale() -> None:
    full = clip("fp32", 2.0)
    assert full[0] > 1
    assert full[1] == pytest.approx(1, rel=1e-3)
    assert clip("fp16", 2.0) == pytest.approx(full, rel=1e-2)
    small = clip("fp32", 0.01)
    assert small[0] == pytest.approx(small[1])  # nothing to clip
    assert clip("fp16", 0.01) == pytest.approx(small, rel=1e-2)
