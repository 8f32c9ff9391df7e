"""`samestep scale`: what it measures and fits, and its options."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs import check, read_facts, samestep_command

from samestep.errors import Error
from samestep.tools.scale import Size, build_rows, fit_steps

SCRIPT = """
import samestep
import torch
from torch import nn

run = samestep.Run("run", batch_size=32, micro_batch_size=8)
data = torch.utils.data.TensorDataset(torch.rand(256, 16), torch.rand(256, 1))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model=model, optimizer=optimizer)
for epoch in run.epochs(data, 9):
    for step in epoch:
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
"""


def test_a_script_is_measured(tmp_path: Path) -> None:
    """Two starts, the fit, and the memory of a model without blocks with SGD, which has no state."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "scratch").mkdir()
    words = ["scale", "--json", "--world-sizes", "2,1", "--steps", "90", "--warm-up", "2", "--repeats", "1"]
    words += ["--for-steps", "1000", "train.py"]
    done = check(samestep_command(*words, cwd=tmp_path, env={"TMPDIR": str(tmp_path / "scratch")}, timeout=300))
    assert "samestep: 70 steps were measured, not 90: after the warm-up, the script trains for no more" in done.stderr
    assert [*(tmp_path / "scratch").iterdir()] == []
    assert not (tmp_path / "run").exists()
    found = read_facts("scale", done.stdout)
    rows = found["sizes"]
    sizes = [(row["world_size"], row["is_measured"]) for row in rows]
    is_faster = found["fit"]["micro_batch_s"] > 0  # other programs may use this machine
    assert sizes == [(1, True), (2, True), *([(4, False)] if is_faster else [])]
    for row in rows:
        assert row["samples_per_s"] == pytest.approx(32 / row["step_s"])
        assert row["efficiency"] == pytest.approx(rows[0]["step_s"] / row["step_s"] / row["world_size"])
        assert row["finish_s"] == pytest.approx(1000 * row["step_s"])
    memory = {(row["world_size"], row["shard"]): row for row in found["memory"]}
    params = 4 * (16 * 64 + 64 + 64 + 1)
    part = 4 * (16 * 32 + 32 + 64 + 1)  # one row cannot be divided
    assert memory[2, "none"]["total"] == memory[2, "optimizer"]["total"] == 2 * params
    assert memory[2, "fsdp2"] == {
        "world_size": 2, "shard": "fsdp2", "shard_copies": 1, "parameters": part, "gradients": part,
        "optimizer_state": 0, "gathered_block": 2 * params, "total": 2 * part + 2 * params,
    }  # fmt: skip


def test_a_step_takes_as_long_as_on_the_slowest_rank() -> None:
    """Seven steps in five blocks. Rank 1 takes twice as long for the last two steps."""
    size = Size(2)
    size.add_steps([[float(i) for i in range(8)], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0]], "here")
    assert size.blocks_s == [1.0, 1.0, 1.0, 1.0, 2.0]
    assert (size.step_s, size.error, size.num_steps) == (1.0, 0.0, 7)
    with pytest.raises(Error, match="here trains for 1 steps after the warm-up"):
        size.add_steps([[0.0, 1.0], [0.0, 1.0, 2.0]], "here")


@given(st.floats(0, 10), st.floats(0.1, 10), st.sets(st.integers(2, 64), min_size=1))
def test_a_step_of_this_form_is_fitted(fixed_s: float, micro_s: float, sizes: set[int]) -> None:
    fit = fit_steps(64, {w: (fixed_s + micro_s * math.ceil(64 / w), 0.02) for w in (1, *sizes)})
    for size in (1, 3, 64):
        step_s, error_s = fit.predict(size)
        assert step_s == pytest.approx(fixed_s + micro_s * math.ceil(64 / size), rel=1e-3, abs=1e-3)
        assert error_s > 0


def test_the_error_of_a_fit() -> None:
    """It is that of the measurement at a measured size, larger away from them, and larger if they disagree."""
    errors = [fit_steps(8, {1: (80.0, 0.01), 4: (last, 0.01), 2: (40.0, 0.01)}).predict(8)[1] for last in (20.0, 30.0)]
    assert errors[0] < errors[1]
    exact = fit_steps(8, {1: (80.0, 0.01), 2: (45.0, 0.01)})
    assert exact.predict(1) == pytest.approx((80.0, 0.8))
    assert exact.predict(8)[1] > exact.predict(2)[1] * 1.5
    assert fit_steps(8, {1: (80.0, 0.01), 2: (30.0, 0.01)}).fixed_s == 0.0


@pytest.mark.parametrize(("second_s", "sizes"), [(55, [1, 2, 4, 8]), (130, [1, 2, 4])])
def test_larger_sizes_are_estimated_unless_more_ranks_are_slower(second_s: float, sizes: list[int]) -> None:
    measured = {size: Size(size, 8, 1, [step_s] * 5) for size, step_s in ((1, 100), (2, second_s), (4, second_s + 20))}
    rows = build_rows(fit_steps(8, {w: (size.step_s, size.error) for w, size in measured.items()}), measured)
    assert [row["world_size"] for row in rows] == sizes


def test_ranks_divide_workers(tmp_path: Path) -> None:
    """Two micro-batches of one worker are work for one rank only."""
    script = SCRIPT.replace("batch_size=32, micro_batch_size=8", "batch_size=16, workers=1, inner_steps=2")
    inner = "optimizer=optimizer, inner_optimizer=torch.optim.SGD(model.parameters())"
    script = script.replace("optimizer=optimizer", inner)
    (tmp_path / "train.py").write_text(script)
    words = ["scale", "--world-sizes", "1,2", "--steps", "2", "--warm-up", "1", "--repeats", "1", "train.py"]
    done = samestep_command(*words, cwd=tmp_path, timeout=300)
    assert "the workers of a step are work for 1 rank only" in done.stderr
    assert "give more --workers" in done.stderr
