"""`samestep replay`: replayed steps have the run's bits, and the run is unchanged."""

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.runs import ask, check, clean_variables, read_facts, samestep_command
from support.snapshots import flip

from samestep.plan.ledger import Entry, to_float
from samestep.snapshot.logs import read_records
from samestep.tools.replay import compare_bits

SCRIPT = """
import sys
import samestep
import torch
from torch import nn

class Log(nn.Module):
    def forward(self, x):
        return x.log()

rate, bad = float(sys.argv[1]), int(sys.argv[2])
run = samestep.Run("run", batch_size=16, micro_batch_size=4, snapshot_every=4, keep_last=2)
x = torch.rand(64, 8) + 0.5
x[bad:bad + 1] = 0
data = torch.utils.data.TensorDataset(torch.arange(64), x, torch.rand(64, 1))
model = nn.Sequential(nn.Identity(), Log(), nn.Linear(8, int(sys.argv[3])), nn.Dropout(0.2), nn.LazyLinear(1))
model(x[:2] + 1)
optimizer = torch.optim.Adam(model.parameters(), lr=rate)
run.prepare(model=model, optimizer=optimizer)
for step in run.steps(data, 12):
    for numbers, inputs, targets in step:
        losses = (model(inputs) - targets).square().squeeze(1)
        step.log(per_sample=losses, first=numbers[0])
        step.backward(losses.mean())
    optimizer.step()
"""
ARGUMENTS = ("0.01", "64", "6")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of 12 steps on 2 ranks, and snapshots of the steps 8 and 12."""
    home = tmp_path_factory.mktemp("replay")
    (home / "train.py").write_text(SCRIPT)
    check(samestep_command("launch", "--nproc-per-node", 2, "train.py", *ARGUMENTS, cwd=home))
    return home


def replay(home: Path, *words: str | int, code: int = 0) -> str:
    """Return the output of a replay. Checks that the run is unchanged and no files are left."""
    scratch = home / "scratch"
    scratch.mkdir(exist_ok=True)
    before = list_files(home / "run")
    arguments = () if ARGUMENTS[0] in words else ARGUMENTS
    done = samestep_command("replay", "run", *map(str, words), *arguments, cwd=home, env={"TMPDIR": str(scratch)})
    check(done, code)
    assert list_files(home / "run") == before
    assert [*scratch.iterdir()] == []
    return done.stdout + done.stderr


def list_files(run: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}


def read_samples(home: Path, step: int) -> list[int]:
    return json.loads(ask("inspect", home / "run", "--samples", "--json"))["steps"][step]["samples"]


def test_a_step_after_a_snapshot(home: Path) -> None:
    out = replay(home, "--step", 10, "train.py")
    assert "replaying steps 8 to 10 from the snapshot of step 8" in out
    assert "the bits of steps 8 to 10 agree with the run's ledger: samples, loss and gradient" in out
    assert "not as in the run" not in out
    assert 'step 10, counted from 0, is "step": 11 in metrics.jsonl' in out
    entries = [*read_records(home / "run/ledger.bin")][9:12]
    losses = [f"step {entry.step} {to_float(entry.loss):.6g}" for entry in entries]
    assert f"losses in the run: {', '.join(losses)}\n" in out
    found = [int(word) for line in re.findall(r"samples of micro-batch \d: (.*)", out) for word in line.split()]
    assert found == read_samples(home, 10)
    loss = float(re.search(r"^loss (.*)$", out, re.M)[1])
    parts = [float(each) for each in re.findall(r"^loss of micro-batch \d: (.*)$", out, re.M)]
    assert (len(parts), sum(parts) / 4) == (4, pytest.approx(loss))
    assert [*read_records(home / "run/ledger.bin")][10].loss == int.from_bytes(
        torch.tensor([loss], dtype=torch.float64).numpy().tobytes(), "little"
    )


def test_a_step_of_a_sharded_run(tmp_path: Path) -> None:
    """On one rank, and on several with whole tensors, although the script asks for a shard."""
    script = SCRIPT.replace("keep_last=2)", "keep_last=2, shard='fsdp2')")
    assert script != SCRIPT
    (tmp_path / "train.py").write_text(script)
    check(samestep_command("launch", "--nproc-per-node", 2, "train.py", *ARGUMENTS, cwd=tmp_path))
    for words, first in ((("--step", 10), 8), (("--step", 2, "--nproc-per-node", 3), 0)):
        out = replay(tmp_path, *words, "train.py")
        assert f"the bits of steps {first} to {words[1]} agree with the run's ledger: samples, loss and gradient" in out
        assert "4.weight" in out, "the norms of all parameters"
    assert "micro-batch 3 of 4: 4 samples" in replay(tmp_path, "--step", 10, "--micro-batch", 3, "train.py")


@pytest.mark.parametrize(
    ("plant", "said"),
    [(os.mkfifo, "is not a regular file"), (lambda path: path.symlink_to("/etc/passwd"), "is a symbolic link")],
)
def test_a_hostile_run(home: Path, tmp_path: Path, plant: Callable[[Path], object], said: str) -> None:
    """It is refused in one sentence, and links and devices in it are not read."""
    shutil.copytree(home / "run", tmp_path / "run")
    shutil.copy(home / "train.py", tmp_path)
    (tmp_path / "run/orders").mkdir(exist_ok=True)
    plant(tmp_path / "run/orders/epoch-00000009.npy")
    done = check(samestep_command("replay", "run", "--step", "9", "train.py", *ARGUMENTS, cwd=tmp_path), 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_one_micro_batch(home: Path) -> None:
    """It has the loss and the samples that it has in its step, and the gradient of this loss."""
    printed = replay(home, "--step", 9, "--json", "train.py")
    whole = read_facts("replay", printed[printed.index("{") : printed.rindex("}") + 1])
    out = replay(home, "--step", 9, "--nproc-per-node", 2, "--micro-batch", 2, "train.py")
    samples = read_samples(home, 9)[8:12]
    assert whole["samples"][2] == samples
    assert f"samples of micro-batch 2: {' '.join(map(str, samples))}\n" in out
    assert f"loss {whole['losses'][2][0]}, weight 4\n" in out
    assert "the bits of step 8 agree with the run's ledger: samples, loss and gradient; of step 9, the samples\n" in out
    losses = [float(word) for word in re.search(r"^logged per_sample: (.*)$", out, re.M)[1].split()]
    assert sum(losses) / 4 == pytest.approx(whole["losses"][2][0])
    signs = itertools.product((-1, 1), repeat=4)  # of the differences between outputs and targets
    gradients = [abs(sum(s * 2 * loss**0.5 for s, loss in zip(each, losses, strict=True)) / 4) for each in signs]
    norm = float(re.search(r"model\.4\.bias\W+([\d.e-]+)", out)[1])
    assert any(norm == pytest.approx(gradient, rel=1e-3) for gradient in gradients)


def test_a_damaged_snapshot_and_another_script(home: Path) -> None:
    [tensors] = (home / "run/snapshots/step-00000008").glob("*.safetensors")
    flip(tensors, -1)
    (home / "other.py").write_text(f"{SCRIPT}\n# changed\n")
    try:
        out = replay(home, "--step", 8, "other.py")
    finally:
        flip(tensors, -1)
    assert "skipping the snapshot step-00000008, which is damaged: " in out
    assert "replaying steps 0 to 8 from the beginning" in out
    assert "not as in the run: script (file train.py -> other.py, sha256 " in out
    assert "the bits of steps 0 to 8 agree" in out


def test_other_data(home: Path) -> None:
    """Other data are refused, unless an option accepts them."""
    (home / "data.py").write_text(SCRIPT.replace("x[bad:bad + 1] = 0", "x[0] = 1"))
    assert "SAMESTEP_OVERRIDE=1" in replay(home, "--step", 9, "data.py", code=2)
    assert "the bits DIFFER from step " in replay(home, "--step", 9, "--override", "data.py", code=1)


def test_another_commit_and_a_loss_that_is_not_finite_as_json(home: Path) -> None:
    (home / "loss.py").write_text(SCRIPT.replace(".square()", ".abs().neg().log()"))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "--quiet"], ["add", "loss.py"], ["commit", "--quiet", "-m", "a"]):
        subprocess.run([*git, *words], cwd=home, env=clean_variables(), check=True)
    path = home / "run/run.json"
    content = path.read_text()
    path.write_text(json.dumps(json.loads(content) | {"git": {"commit": "0" * 40, "is_dirty": False}}))
    try:
        out = replay(home, "--step", 8, "--micro-batch", 3, "--json", "loss.py")
    finally:
        path.write_text(content)
        shutil.rmtree(home / ".git")
    said, _, text = out.partition("{")
    found = read_facts("replay --micro-batch", "{" + text[: text.rindex("}") + 1])
    assert "not as in the run" in said + text
    assert found["changed"]["git"].startswith(f"commit {'0' * 40} -> ")
    assert "file train.py -> loss.py" in found["changed"]["script"]
    assert (found["losses"], found["same"], found["first_step"]) == (["nan"], True, 8)
    assert found["compared"] == "the samples of step 8 agree with the run's ledger"
    assert found["not_finite"][0] == "the loss is not finite, but all modules' outputs are: it arises after them"
    assert set(found["norms"]) == {f"model.{layer}.{kind}" for layer in (2, 4) for kind in ("weight", "bias")}


def test_what_was_compared_in_words() -> None:
    entries = [Entry(step, 0, 16, 7, loss=1, gradient=2) for step in range(3)]
    last = Entry(2, 0, 16, 7)
    which = "the bits of steps 0 to 1 agree with the run's ledger: samples, loss and gradient; of step 2, the samples"
    ledger = dict(enumerate(entries))
    assert compare_bits([*entries[:2], last], ledger) == (which, True)
    assert compare_bits([last._replace(fingerprint=8)], ledger) == (
        "the bits DIFFER from step 2 on: other samples", False
    )  # fmt: skip
    zero = [entries[2]._replace(loss=0)]
    differ = f"the bits DIFFER from step 2 on: the loss is 0.0 in the replay and {to_float(1)!r} in the run"
    assert compare_bits(zero, ledger) == (differ, False)
    assert compare_bits([last], {}) == ("no bits were compared: the run's ledger has none of these steps", True)


def test_a_step_after_the_last_one_is_refused_at_once(home: Path) -> None:
    said = "samestep: error: the ledger of run has steps 0 to 11: there is no step 12"
    assert replay(home, "--step", 12, "train.py", code=2).startswith(said)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--micro-batch", "4", "train.py"], r"step 8 has 4 micro-batches, 0 to 3, not 4 \[SS709\]"),
        (["train.py", "0.01", "64", "5"], r"run holds another run \(models\.model .*\): use its numbers, .*"),
    ],
)
def test_what_the_script_refuses(home: Path, words: list[str], message: str) -> None:
    out = replay(home, "--step", 8, *words, code=2)
    last = out.rstrip().splitlines()[-1]
    assert re.fullmatch(rf"samestep: error: step 8 cannot be replayed: {message} \[SS710\]", last), out


def test_the_step_in_which_a_run_failed(tmp_path: Path) -> None:
    """The loss was nan: the replay of its micro-batch names the sample and the layer."""
    (tmp_path / "train.py").write_text(SCRIPT)
    failed = check(samestep_command("launch", "train.py", "0.01", "20", "6", cwd=tmp_path), 2)
    found = re.search(r"the loss of step (\d+) is (?:nan|inf) in micro-batch (\d)", failed.stderr)
    command = ("train.py", "0.01", "20", "6")
    refused = replay(tmp_path, "--step", found[1], *command, code=2)
    assert refused.rstrip().endswith(f"; --micro-batch {found[2]} describes it [SS710]")
    out = replay(tmp_path, "--step", found[1], "--micro-batch", found[2], *command)
    assert "the output of model.1 (Log) is the first that is not finite; its inputs are finite\n" in out
    per_sample = re.search(r"^logged per_sample: (.*)$", out, re.M)
    samples = re.search(r"^samples of micro-batch \d: (.*)$", out, re.M)
    values = dict(zip(samples[1].split(), per_sample[1].split(), strict=True))
    assert [sample for sample, value in values.items() if value in ("nan", "inf", "-inf")] == ["20"]
