"""`samestep verify --plain` on scripts for other trainers: planted mistakes and options."""

import re
from pathlib import Path

import pytest
from support.runs import check, samestep_command
from tools.plain_planted import MISSED, MISTAKES, find_mistakes, plant

from samestep.tools.verify.plain_checks import Pass, PlainRank, check_epochs

ROOT = Path(__file__).parents[2]
VERDICT = re.compile(r"^  (\w+) +(ok|MISTAKE|not observed) +(.*)$", re.MULTILINE)

LIGHTNING = """\
import os
import lightning, torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(8, 1)
    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.model(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx):
        self.log("val", F.mse_loss(self.model(batch[0]), batch[1]), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
lightning.seed_everything(0)
data = TensorDataset(x, x[:, :1])
save = lightning.pytorch.callbacks.ModelCheckpoint(dirpath="ckpt", save_last=True)
trainer = lightning.Trainer(
    max_epochs=3, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), logger=False, strategy="ddp",
    enable_progress_bar=False, default_root_dir=".", callbacks=[save],
)
held_out = DataLoader(TensorDataset(x[:33], x[:33, :1]), 8)
last = "ckpt/last.ckpt" if os.path.exists("ckpt/last.ckpt") else None
trainer.fit(Regression(), DataLoader(data, 8, shuffle=True), held_out, ckpt_path=last)
"""
ACCELERATE = """\
import torch, torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
x = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x[:, :1])
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loaders = DataLoader(data, 8, shuffle=True), DataLoader(data, 8)
model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, *loaders)
for epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()
    with torch.no_grad():
        for inputs, targets in held_out:
            accelerator.gather_for_metrics(model(inputs))
"""
TRAINER = """\
import glob
import torch, torch.nn.functional as F
from transformers import Trainer, TrainingArguments

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
rows = [{"inputs": row, "labels": row[:1]} for row in x]

class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, inputs, labels):
        outputs = self.layer(inputs)
        return {"loss": F.mse_loss(outputs, labels), "logits": outputs}

args = TrainingArguments(
    "out", per_device_train_batch_size=8, num_train_epochs=3, use_cpu=True, save_steps=3, eval_strategy="epoch",
    report_to=[],
)
Trainer(Regression(), args, train_dataset=rows, eval_dataset=rows[:33]).train(
    resume_from_checkpoint=bool(glob.glob("out/checkpoint-*"))
)
"""


def write(directory: Path, *mistakes: str) -> None:
    (directory / "planted.py").write_text(plant(*mistakes))


def test_a_sound_script(tmp_path: Path) -> None:
    write(tmp_path)
    done = check(samestep_command("verify", "--plain", "planted.py", cwd=tmp_path))
    found = {name: (verdict, text) for name, verdict, text in VERDICT.findall(done.stdout)}
    assert [*found] == ["samples", "order", "gradient", "replicas", "evaluation"]
    assert {verdict for verdict, _ in found.values()} == {"ok"}, done.stdout
    assert "on 2 ranks, an epoch has each of 64 samples" in found["samples"][1]
    assert found["gradient"][1] == "the mean over the ranks in 12 steps"
    assert [path.name for path in tmp_path.iterdir()] == ["planted.py"], "nothing else was written"


@pytest.mark.parametrize(
    ("mistakes", "wanted"),
    [
        (("set_epoch forgotten", "sum in place of the mean", "evaluation padded"), {"order", "gradient", "evaluation"}),
        (("no sampler", "weights that change on one rank"), {"samples", "replicas"}),
        (("no distributed code",), {"gradient"}),
    ],
)  # fmt: skip
def test_several_mistakes_in_one_script(tmp_path: Path, mistakes: tuple[str, ...], wanted: set[str]) -> None:
    write(tmp_path, *mistakes)
    assert find_mistakes(tmp_path) == wanted


def record(num_batches: int, *batches: list[int], is_training: bool) -> list[PlainRank]:
    """Return the ranks of a run. Each has one of the shares of 5 samples, in batches of 2."""
    ranks = []
    for ids in batches:
        each = Pass(0, 5, num_batches, ids=[ids[:2], ids[2:]], num_backwards=num_batches if is_training else 0)
        ranks.append(PlainRank(len(ranks), [each]))
    return ranks


def judge(second: list[int], *, is_training: bool) -> str:
    """Return what the check says about the samples of 2 ranks, of which one has drawn 0, 2 and 4 of 5 samples."""
    shares = {1: [[0, 1, 2, 3, 4]], 2: [[0, 2, 4], second]}
    runs = {size: record(2, *ids, is_training=is_training) for size, ids in shares.items()}
    found = check_epochs(runs, is_training=is_training)
    return "; ".join(sentence for _, sentence in found if sentence.startswith("on 2 ranks"))


def test_padding_is_allowed_in_training_only() -> None:
    repeated = judge([1, 3, 0], is_training=True)
    assert repeated == "on 2 ranks, 1 of 5 samples are repeated in an epoch, as padding"
    for second, how in (([1, 3, 0], ", as padding"), ([0, 1, 3], "")):
        said = judge(second, is_training=False)
        assert said.startswith(f"on 2 ranks, 1 of 5 samples count more than once{how}: give each rank its share")


@pytest.mark.soak
@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake(tmp_path: Path, name: str) -> None:
    """A row of the table in docs/dev/verify.md."""
    write(tmp_path, name)
    found, wanted = find_mistakes(tmp_path), MISTAKES[name][1]
    words = [", ".join(sorted(each)) or "-" for each in (wanted, found)]
    assert found == (set() if name in MISSED else wanted)
    assert f"| {name} | {words[0]} | {words[1]} | " in (ROOT / "docs/dev/verify.md").read_text()


@pytest.mark.soak
def test_lightning(tmp_path: Path) -> None:
    """The training is correct, but the sampler pads the evaluation."""
    pytest.importorskip("lightning")
    (tmp_path / "trained.py").write_text(LIGHTNING)
    done = check(samestep_command("verify", "--plain", "trained.py", cwd=tmp_path), 1)
    found = {name: (verdict, text) for name, verdict, text in VERDICT.findall(done.stdout)}
    assert {name for name, (verdict, _) in found.items() if verdict != "ok"} == {"evaluation"}, done.stdout
    assert "on 2 ranks, 1 of 33 samples count more than once, as padding" in found["evaluation"][1]


@pytest.mark.soak
@pytest.mark.parametrize(("trainer", "script"), [("accelerate", "ACCELERATE"), ("transformers", "TRAINER")])
def test_other_trainers(tmp_path: Path, trainer: str, script: str) -> None:
    pytest.importorskip(trainer)
    (tmp_path / "trained.py").write_text(globals()[script])
    done = samestep_command("verify", "--plain", "trained.py", cwd=tmp_path)
    found = {name: verdict for name, verdict, _ in VERDICT.findall(done.stdout)}
    assert "MISTAKE" not in found.values(), done.stdout
    assert {"samples", "order", "gradient", "replicas"} <= {name for name, v in found.items() if v == "ok"}, done.stdout


def test_a_script_that_fails(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit(1)")
    done = check(samestep_command("verify", "--plain", "planted.py", cwd=tmp_path), 2)
    assert "planted.py ends with exit code 1 on 1 rank after 0 steps of a torch optimizer" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["planted.py"]


def test_the_working_directory_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "saves").mkdir()
    (tmp_path / "saves" / "old.pt").write_text("mine")
    (tmp_path / "planted.py").write_text(
        "import os, torch; p = torch.nn.Parameter(torch.ones(1)); optimizer = torch.optim.SGD([p])\n"
        "assert open('saves/old.pt').read() == 'mine'\n"
        "open(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'saves/old.pt'), 'w').write('changed')\n"
        "p.sum().backward(); optimizer.step()"
    )
    command = ["verify", "--plain", "--world-sizes", "1"]
    script = tmp_path / "planted.py"  # the copy runs for this name, too
    check(samestep_command(*command, script, cwd=tmp_path))
    with open(tmp_path / "large", "w") as file:
        file.truncate(1 << 31)
    done = check(samestep_command(*command, "planted.py", cwd=tmp_path), 2)
    assert f"too large to be copied for each start, at {tmp_path / 'large'}: move large data" in done.stderr
    assert (tmp_path / "saves" / "old.pt").read_text() == "mine"
