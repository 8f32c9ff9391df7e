"""The recipes from the command line, and their parts."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
from support.runs import ask, check, read_rows, run_command, samestep_command
from support.snapshots import read_snapshot

from samestep.errors import MissingPackage
from samestep.recipes import build_schedule, digits
from samestep.snapshot.store import Store


def run_train(*words: str) -> str:
    """Run `samestep train`. Returns its output."""
    done = check(samestep_command("train", *words, cwd=Path.cwd()))
    return done.stdout + done.stderr


@pytest.mark.soak
def test_digits_learns_to_read(tmp_path: Path) -> None:
    run_dir = tmp_path / "digits"
    said = run_train("digits", "--nproc-per-node", "2", "--run-dir", str(run_dir))
    assert float(re.search(r"validation accuracy\W+([\d.]+)%", said)[1]) >= 98
    for row in ("steps", "samples/s", "wall time"):
        assert row in said
    assert str(run_dir) in said
    best = max(row.get("validation/accuracy", 0.0) for row in read_rows(run_dir))
    store = Store(run_dir)
    assert read_snapshot(store, store.find("best"))["state"]["best"] == best


def test_mlp_prints_a_line_per_epoch_from_each_rank(tmp_path: Path) -> None:
    options = ["--batch_size", "256", "--run_dir", str(tmp_path / "mlp")]
    said = run_train("mlp", "3", "2", "--nproc-per-node", "2", "--show-all", *options)
    assert "4 micro-batches on 2 ranks" in said
    for rank in range(2):
        for epoch in range(3):
            assert f"[rank {rank}] Epoch {epoch} | Batchsize: 256 | Steps: 8\n" in said
    steps = [snapshot.step for snapshot in Store(tmp_path / "mlp").snapshots()]
    assert steps == [16, 24]


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # importing it raises ImportError
    with pytest.raises(MissingPackage, match=r"digits needs scikit-learn .*'samestep\[recipes\]'$"):
        digits.load_data()


# A recipe on two ranks, an export, and a new interpreter that imports torch: 9 s, and 16 s on a busy machine.
def test_digits_stops_early_and_its_best_weights_load_without_samestep(tmp_path: Path) -> None:
    """With a learning rate of 0, only the statistics of BatchNorm change."""
    run_dir = tmp_path / "digits"
    options = ["--lr", "0", "--patience", "1", "--epochs", "9", "--trackers", "tensorboard"]
    said = run_train("digits", "--nproc-per-node", "2", *options, "--run-dir", str(run_dir))
    assert "1 validations in a row were not better" in said
    assert [*(run_dir / "tensorboard").iterdir()]
    accuracies = [row["validation/accuracy"] for row in read_rows(run_dir) if "validation/accuracy" in row]
    assert len(accuracies) == accuracies.index(max(accuracies)) + 2 < 9
    ask("export", run_dir, tmp_path / "model.safetensors", "--snapshot", "best")
    (tmp_path / "cnn.py").write_text(f"from torch import Tensor, nn\n\n{inspect.getsource(digits.CNN)}")
    _, held_out = digits.load_data()
    torch.save([held_out.images, held_out.digits], tmp_path / "held_out.pt")
    (tmp_path / "plain.py").write_text(
        "import torch\nfrom safetensors.torch import load_file\nfrom cnn import CNN\n"
        "model = CNN().eval()\n"
        "model.load_state_dict(load_file('model.safetensors'))\n"
        "images, digits = torch.load('held_out.pt')\n"
        "print((model(images).argmax(1) == digits).double().mean().item())\n"
    )
    printed = check(run_command(sys.executable, "plain.py", cwd=tmp_path)).stdout
    assert float(printed) == pytest.approx(max(accuracies))


def test_digits_split_is_fixed_and_disjoint() -> None:
    train, held_out = digits.load_data()
    assert (len(train), len(held_out)) == (1438, 359)
    again, _ = digits.load_data()
    assert torch.equal(train.images, again.images)
    assert train.images.max() == 1
    image, digit = held_out[0]
    assert image.shape == (1, 8, 8)
    assert digit.dtype == torch.int64
    assert torch.equal(image, held_out[0][0])  # held-out images are not shifted


@pytest.mark.parametrize(
    ("num_steps", "num_warm_up", "end"), [(100, 10, 0.1), (100, 0, 0.0), (3, 400, 0.0), (1, 0, 0.5)]
)
def test_the_learning_rate_rises_then_falls_to_its_end(num_steps: int, num_warm_up: int, end: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = build_schedule(optimizer, num_steps, num_warm_up, end)
    curve = []
    for _ in range(num_steps):
        curve.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    top = curve.index(max(curve))
    assert top == min(num_warm_up, num_steps - 1)
    assert curve[top] == 2
    assert curve[:top] == pytest.approx([2 * (step + 1) / (top + 1) for step in range(top)])
    assert curve[top:] == sorted(curve[top:], reverse=True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2 * end)
