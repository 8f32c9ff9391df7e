"""`samestep verify`: correct scripts, and the files that it leaves. Each fault that it looks for is planted in a
script: it is found, and the message names it. The same for scripts for other trainers, with --plain.
"""

import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from support.runs import check, read_facts, run_command, samestep_command
from support.selection import one_in
from tools.plain_planted import MISSED, MISTAKES, plant_plain
from tools.planted import plant

from samestep.tools.verify.plain_checks import Pass, PlainRank, check_epochs

SIZES = ("--world-sizes", "1,3")
WITHOUT_HASH_SEED = ("env", "-u", "PYTHONHASHSEED")  # a new interpreter, whose runs have different ones


def verify(directory: Path, *words: str, code: int = 0, via: Sequence[str] = (), **faults: str) -> str:
    """Verify a script with these faults. Returns what is printed."""
    (directory / "planted.py").write_text(plant(**faults))
    command = [*via, sys.executable, "-m", "samestep", "verify", *words, "planted.py"]
    return check(run_command(*command, cwd=directory, timeout=170), code).stdout


def read_rows(printed: str) -> list[list[str]]:
    """Return the cells of each row of the table, and of other lines."""
    return [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()]


# Eight runs on up to 5 ranks: 6 s, and 25 s on a busy machine.
def test_a_sound_script_is_the_same_everywhere_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    printed = verify(
        tmp_path, "--steps", "8", "--world-sizes", "1,3,5", "--kills", "2", "--kill-seed", "1",
        in_epoch="run.state['epochs'] = run.state.get('epochs', 0) + 1",
        at_end="run.restore('best')",  # which runs of a few steps have not saved
    )  # fmt: skip
    rows = read_rows(printed)
    assert [row[:2] for row in rows if row[-1].endswith(" s")] == [
        ["train", "1 rank"], ["again", "1 rank"], ["train", "3 ranks"],
        *[row[:2] for row in rows if row[0].startswith("killed") or row[0] == "resumed"],
    ]  # fmt: skip
    interrupted = [row for row in rows if row[0].startswith("killed") or row[0] == "resumed"]
    assert [row[0].split(" rank ")[0] for row in interrupted] == ["killed in a save", "killed", "resumed"]
    assert all(row[3] == "same" for row in interrupted), printed
    sizes = [row[1] for row in interrupted]
    assert all(one != other for one, other in pairwise(sizes))
    assert not interrupted[-1][2].startswith("0-"), "it was resumed from a snapshot"
    assert "skipped: 5 ranks, because a step has work for 4 at most" in printed
    assert printed.endswith("everything is the same\n")
    assert [path.name for path in tmp_path.iterdir()] == ["planted.py"], "the script's own run directory is unchanged"


def test_a_step_that_no_two_ranks_can_share(tmp_path: Path) -> None:
    words = ["--steps", "1", "--world-sizes", "1,2,3", "--kills", "0", "--micro-batch-size", "32", "mlp", "1", "1"]
    done = samestep_command("verify", *words, cwd=tmp_path)
    check(done, 2)
    assert "3 ranks cannot share a step of 1 micro-batch (batch_size 32, micro_batch_size 32): start 1" in done.stderr
    assert "give --micro-batch-size 8 (in the script, micro_batch_size=8)" in done.stderr


def test_a_recipe_and_its_own_arguments(tmp_path: Path) -> None:
    done = samestep_command(
        "verify", "--steps", "2", "--world-sizes", "2", "--kills", "0", "--json", "mlp", "2", "1", "--batch_size", "8",
        cwd=tmp_path,
    )  # fmt: skip
    check(done)
    found = read_facts("verify", done.stdout)
    assert (found["same"], found["conclusion"], found["findings"]) == (True, "everything is the same", [])
    assert [(row["run"], row["result"]) for row in found["runs"]] == [("train", "the reference"), ("again", "same")]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "script", "words"),
    [
        (["verify"], "print('hello')",
         "planted.py ended without a step of samestep.Run (on 1 rank): verify needs a script that"),
        (["verify"], "raise ValueError('no data here')",
         "ends with exit code 1 on 1 rank, before anything can be compared"),
        (["verify", "--plain"], "raise SystemExit(1)",
         "planted.py ends with exit code 1 on 1 rank after 0 steps of a torch optimizer"),
        (["scale", "--world-sizes", "1,2"], "print('hello')",
         "error: planted.py on 1 rank cannot be measured, it ends with exit code 0: hello"),
    ],
)  # fmt: skip
def test_a_script_that_does_not_train(tmp_path: Path, command: list[str], script: str, words: str) -> None:
    (tmp_path / "planted.py").write_text(script)
    done = check(samestep_command(*command, "planted.py", cwd=tmp_path), 2)
    assert words in done.stderr
    assert ("ValueError: no data here" in done.stderr) == ("ValueError" in script), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["planted.py"]


# --- faults -----------------------------------------------------------------------------------------------------------

WIDE = "nn.Linear(6, 500), nn.LayerNorm(500), nn.Linear(500, 500), nn.LayerNorm(500), nn.Linear(500, 3)"
LAYERS = "nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)"
UNPOOL = (
    "y, i = F.max_pool1d(x.unsqueeze(1), 2, return_indices=True); "
    "x = x + F.max_unpool1d(y, i, 2).squeeze(1) * (1 + open('/dev/urandom', 'rb').read(1)[0])"
)
SORTED = "words = list({'alpha', 'beta', 'gamma', 'delta', 'epsilon', 'zeta', 'eta', 'theta'})"
MODES = "none,optimizer,fsdp2"
NORM = "norm = sum(float(g.square().sum()) for g in grads) ** 0.5; [g.mul_(0.1 / norm) for g in grads]"
GRADS = "grads = [getattr(p.grad, '_local_tensor', p.grad) for p in model.parameters() if p.grad is not None]; "
SGD = "torch.optim.AdamW(model.parameters(), 0.02) -> torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)"
AVERAGE = "import samestep.engine.sharded_sum as p; p.ChunkSum.total = property(lambda self: self.sums[0] / 3)"
MINUS_ZERO = "h = (self.idle * 0.0).sum(); h.register_hook(lambda g: -torch.ones_like(g)); x = x + h"
ZEROS = (
    "import samestep.engine.sharded_unit as t; real = t.ShardedUnit.split; "
    "t.ShardedUnit.split = lambda self, flat: [x if x is None else torch.zeros_like(x) + x for x in real(self, flat)]"
)

# Faults, and what is printed.
FAULTS: list[tuple[dict[str, str], list[str]]] = [
    # A generator of the script: seeded once, not seeded, in the model, in the data set.
    ({"before": "rng = np.random.default_rng(3)", "in_micro_batch": "x = x + float(rng.normal())"},
     ["differs from step 0", "first: model.layers.0.weight", "a global variable, its own generator"]),
    ({"in_model": "self.noise = torch.Generator().manual_seed(1)",
      "in_forward": "x = x + torch.randn(6, generator=self.noise)"},
     ["on 3 ranks and on 1 rank", "a global variable, its own generator"]),
    ({"in_data": "self.rng = np.random.default_rng(1)", "in_item": "x = x * float(self.rng.random())"},
     ["returned different values for the same samples", "not on earlier reads"]),
    # A data set whose samples depend on the rank: all of them, which the run refuses, or a few.
    ({"in_item": "x = x * torch.distributed.get_rank() if torch.distributed.is_initialized() else x"},
     ["exit code 2", "sample 0 of the data set differs between rank 0 and rank 1: build the same data set"]),
    ({"top": "import torch.distributed as dist",
      "in_item": "x = x * dist.get_rank() if 0 < index < 13 and dist.is_initialized() else x"},
     ["returned different values for the same samples (micro-batch 0 of step 0)", "not on the rank"]),
    # Data that each process creates anew, as if from a generator that the run has not seeded yet.
    ({"top": "salt = int.from_bytes(open('/dev/urandom', 'rb').read(6)) / 2**48", "in_item": "x = x + salt"},
     ["in two runs on 1 rank", "(micro-batch 0 of step 0): build random data after samestep.Run(...)"]),
    # A clock.
    ({"top": "import time", "in_item": "x = x + time.time_ns() % 997"},
     ["in two runs on 1 rank", "different values for the same samples", "read no clock and no file"]),
    ({"top": "import time", "in_micro_batch": "x = x * (1 + time.time() % 1)"},
     ["in two runs on 1 rank", "look for clocks (time.time(), datetime.now())"]),
    # An operator that is not deterministic.
    ({"arguments": ", deterministic=False", "in_forward": UNPOOL},
     ["in two runs on 1 rank", "with deterministic=False, operators that are not deterministic"]),
    # A buffer that counts this rank's micro-batches.
    ({"in_model": "self.register_buffer('seen', torch.zeros(()))", "before": "count = 0",
      "after_micro_batch": "count += 1", "in_step": "model.seen += count"},
     ["first: model.seen, the only tensor that differs", "a buffer must get its value from the whole step"]),
    # Threads.
    ({"before": "torch.set_num_threads(run.world_size)", "swap": f"{LAYERS} -> {WIDE}"},
     ["or calls torch.set_num_threads"]),
    # Code that reads the rank, and a counter in each model.
    ({"in_micro_batch": "x = x * (1 + run.world_size)"},
     ["the same inputs of micro-batch", "or it reads its rank or the number of ranks (run.rank"]),
    ({"top": "import os", "before": "scale = 1 + int(os.environ.get('RANK', 0)) + int(os.getenv('WORLD_SIZE', 1))",
      "in_micro_batch": "x = x * scale"},
     ["or it reads its rank or the number of ranks (run.rank, os.environ)"]),
    ({"in_model": "self.calls = 0", "in_forward": "self.calls += 1; x = x * self.calls"},
     ["the same inputs of micro-batch 2 give a different loss: the script keeps state from one micro-batch"]),
    ({"top": "import os, torch.distributed as dist", "in_model": "self.calls = 0",
      "in_forward": "self.calls += 1; x = x * self.calls",
      "in_step": "os.environ.get('RANK'); run.rank; dist.is_initialized() and dist.get_rank()"},
     ["the same inputs of micro-batch 2 give a different loss: the script keeps state from one micro-batch"]),
    # A mean over the ranks of what samestep averages already.
    ({"swap": "step.backward(loss -> step.backward(loss / run.world_size"},
     ["the same inputs of micro-batch 0 give a different loss", "or it reads its rank or the number of ranks"]),
    # A counter of reads, in the module or in a worker.
    ({"top": "reads = [0]", "in_item": "reads[0] += 1; x = x * reads[0]"}, ["not on earlier reads"]),
    ({"in_data": "self.count = 0", "in_item": "self.count += 1; x = x * (self.count % 5)",
      "swap": "epochs(data, 9) -> epochs(data, 9, num_workers=1)"},
     ["not on earlier reads"]),
    # A setting that depends on the rank.
    ({"in_step": "optimizer.param_groups[0]['lr'] = 0.01 * (1 + run.rank)"},
     ["on 3 ranks it ends with exit code 2", "do not have the same model after step 2",
      "likely: a rank changes the model by its own values (its rank, its micro-batches)"]),
]  # fmt: skip
# A value of shard, faults, and what is printed.
SHARDED: list[tuple[str, dict[str, str], list[str]]] = [
    # A norm over local shards, or over the gradients of a rank's own parameters.
    ("fsdp2", {"swap": f"optimizer.step() -> {GRADS}{NORM}; optimizer.step()"},
     ["on 3 ranks with shard=fsdp2 and on 1 rank", "first: model.layers.0.weight, of ",
      "the same gradients give a different model.layers.0.weight", "use run.clip_grad_norm_"]),
    ("optimizer", {"swap": f"optimizer.step() -> {GRADS}{NORM}; optimizer.step()"},
     ["on 3 ranks with shard=optimizer and on 1 rank",
      "the same gradients give a different model.layers.0.weight"]),
    # An average in place of the sum.
    ("fsdp2", {"top": AVERAGE},
     ["first: model.layers.0.weight", "the same losses give a different gradient of model.layers.0.weight",
      "such as a mean in place of a sum"]),
    # A fused optimizer.
    ("fsdp2", {"before": "optimizer.param_groups[0].update(fused=True, foreach=False)"},
     ["first: optimizer.state.model.layers.0.weight.exp_avg_sq, ", "or fused=True, whose kernel"]),
    # A buffer of +0.0, to which gradients of -0.0 are added.
    ("fsdp2", {"top": ZEROS, "swap": SGD, "in_model": "self.idle = nn.Parameter(torch.ones(4))",
                 "in_forward": MINUS_ZERO},
     ["first: optimizer.state.model.idle.momentum_buffer, the only tensor that differs",
      "the same losses give a different gradient of model.idle", "+0.0 in place of the neutral -0.0"]),
    # Initial values that depend on the number of ranks.
    ("fsdp2", {"before": "[m.reset_parameters() for m in model.modules() if hasattr(m, 'reset_parameters')]"},
     ["model.layers.0.weight differs before the first step: set initial values before run.prepare"]),
    ("", {"swap": "model = Model() -> torch.manual_seed(run.world_size); model = Model()"},
     ["model.layers.0.weight differs before the first step: its initial value must not depend on the rank"]),
]  # fmt: skip


# Several runs on one and three ranks: 20 s, and 23 s on a busy machine.
@pytest.mark.parametrize(
    ("shard", "faults", "words"), [*one_in(18, [("", *row) for row in FAULTS]), *one_in(4, SHARDED)]
)
def test_a_planted_fault_is_found_and_named(
    tmp_path: Path, shard: str, faults: dict[str, str], words: list[str]
) -> None:
    mode = ["--shard", shard] if shard else []
    printed = verify(tmp_path, "--steps", "3", *SIZES, "--kills", "0", *mode, code=1, **faults)
    for expected in words:
        assert expected in printed, f"{expected!r} is not in\n{printed}"
    assert printed.endswith("it is NOT the same\n")


@pytest.mark.parametrize(
    "faults",
    one_in(2, [
        {"in_data": SORTED + "; self.ids = {w: i for i, w in enumerate(words)}", "in_item": "x = x + self.ids['eta']"},
        {"in_model": "self.salt = hash('salt') % 97", "in_forward": "x = x * self.salt"},
    ]),
)  # fmt: skip
def test_an_order_of_hashes_is_named(tmp_path: Path, faults: dict[str, str]) -> None:
    words = ["--steps", "2", *SIZES, "--kills", "0"]
    assert "PYTHONHASHSEED" in verify(tmp_path, *words, code=1, via=WITHOUT_HASH_SEED, **faults)


# Several runs on one to three ranks, with a kill and a resume: 17 s, and 19 s on a busy machine.
@pytest.mark.parametrize(
    ("in_step", "words"),
    one_in(2, [
        ("model.layers[0].weight.data += 1e-4 * average * rng.random()",
         r"first: model\.layers\.0\.weight, the only tensor that differs"),
        ("optimizer.param_groups[0]['lr'] = 0.01 * average", r"first: optimizer\.param_groups\.0\.lr, [\d.]+ and "),
    ]),
)  # fmt: skip
def test_what_no_snapshot_holds_is_found_by_the_interruption(tmp_path: Path, in_step: str, words: str) -> None:
    """The first run that is killed is on 3 ranks, and resumed on 1."""
    printed = verify(
        tmp_path, "--steps", "9", *SIZES, "--kills", "1", "--kill-seed", "0", code=1,
        before="average, rng = 0.0, random.Random(3)", in_step=f"average += float(step.loss); {in_step}",
    )  # fmt: skip
    assert "in two runs on 1 rank, resumed" in printed
    assert "state that the script keeps from step to step, such as a generator of its own, is in no snapshot" in printed
    assert printed.count("likely: ") == 1, "two runs from begin to end were the same, so that it repeats"
    assert re.search(words, printed), printed


# Runs on one and three ranks, in three modes: 33 s, and 39 s on a busy machine.
def test_the_modes_of_a_sound_script_are_the_same(tmp_path: Path) -> None:
    """Each resume is on another number of ranks or in another mode than the start before it."""
    words = ["--steps", "6", *SIZES, "--kills", "2", "--kill-seed", "3", "--shard", MODES]
    printed = verify(tmp_path, *words)
    rows = read_rows(printed)
    trained = [row[1] for row in rows if row[0] == "train"]
    assert trained == ["1 rank", "3 ranks", "3 ranks, optimizer", "3 ranks, fsdp2"]
    places = [row[1] for row in rows if row[0].startswith("killed") or row[0] == "resumed"]
    assert len(places) == 3
    assert all(one != other for one, other in pairwise(places))
    assert printed.endswith("everything is the same\n")


def test_the_others_continue_a_sound_script(tmp_path: Path) -> None:
    printed = verify(tmp_path, "--steps", "9", *SIZES, "--kills", "0", "--kill-seed", "3", "--heal")
    assert re.search(r"^ +healed +3 ranks +0-8 +same, 2 of 3 lost ", printed, re.M)


def test_what_a_repeated_pass_changes_twice_is_found(tmp_path: Path) -> None:
    printed = verify(
        tmp_path, "--steps", "3", *SIZES, "--kills", "0", "--kill-seed", "3", "--heal", code=1,
        before="seen = []", in_micro_batch="seen.append(step.micro_batch)",
        in_step="model.layers[0].bias.data += len(seen) - len(set(seen)); seen.clear()",
    )  # fmt: skip
    assert re.search(r"^ +healed +3 ranks +0-\d +(differs from step|exit code)", printed, re.M)
    assert "likely: the script collects or adds up values in the loop over micro-batches" in printed


def test_a_mode_that_the_run_refuses(tmp_path: Path) -> None:
    swap = "AdamW(model.parameters(), 0.02) -> Adafactor(model.parameters())"
    printed = verify(tmp_path, "--steps", "2", *SIZES, "--kills", "0", "--shard", MODES, code=1, swap=swap)
    assert "on 3 ranks with shard=fsdp2 it ends with exit code 2:\noptimizer is Adafactor" in printed


PIPED = """
import samestep, torch
from torch import nn

class Count(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += {step}
        return x * (1 + self.calls)

run = samestep.Run("runs/piped", batch_size=8, micro_batch_size=2, pipeline=2)
model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.1), Count(), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
run.prepare(model=model, optimizer=optimizer, stages=["2"])
for step in run.steps(torch.ones(16, 2), 9):
    step.run(lambda x: model(x).square().mean())
    optimizer.step()
"""


@pytest.mark.parametrize("step", [0, 1])
def test_each_map_of_the_stages_of_a_pipeline(tmp_path: Path, step: int) -> None:
    """A counter in the second stage differs if two ranks have this stage."""
    (tmp_path / "piped.py").write_text(PIPED.format(step=step))
    words = ["--steps", "3", "--world-sizes", "1,2", "--kills", str(1 - step), "piped.py"]
    printed = check(samestep_command("verify", *words, cwd=tmp_path), step).stdout
    found = {row[1]: row[3] for row in read_rows(printed) if row[0] == "train"}
    other = f"differs from step {step - 1}" if step else "same"
    assert found == {
        "1 rank": "the reference",
        "1 pipeline of 2 ranks": "same",
        "2 pipelines of 1 rank": other,
    }
    assert printed.count(" resumed ") == 1 - step
    if step:
        assert "step 0 is not the same on 2 pipelines of 1 rank and on 1 rank" in printed
    else:
        assert printed.endswith("everything is the same\n")


ROUNDS = """
import torch, samestep
run = samestep.Run("runs/rounds", batch_size=8, micro_batch_size=2, workers=2, inner_steps=2)
model = torch.nn.Linear(2, 1)
inner = torch.optim.Adam(model.parameters())
outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9)
run.prepare(model=model, optimizer=outer, inner_optimizer=inner)
for step in run.steps(torch.ones(16, 2), 2):
    for x in step:
        step.backward(model(x).square().mean())
    outer.step()
"""


def test_more_ranks_than_workers_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "rounds.py").write_text(ROUNDS)
    words = ["--world-sizes", "1,2,3", "--kills", "0", "rounds.py"]
    printed = check(samestep_command("verify", *words, cwd=tmp_path), 0).stdout
    assert "skipped: 3 ranks, because a step has work for 2 at most" in printed
    assert printed.endswith("everything is the same\n")


# --- --plain ----------------------------------------------------------------------------------------------------------


PAGE = Path(__file__).parents[2] / "docs/dev/verify.md"
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


def find_mistakes(directory: Path, *mistakes: str) -> set[str]:
    """Verify a script with these mistakes. Returns the checks that report one."""
    (directory / "planted.py").write_text(plant_plain(*mistakes))
    done = samestep_command("verify", "--plain", "--json", "planted.py", cwd=directory)
    assert done.returncode < 2, done.stderr
    checks = read_facts("verify --plain", done.stdout)["checks"]
    return {key for key, each in checks.items() if each["verdict"] == "MISTAKE"}


def test_a_sound_plain_script(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(plant_plain())
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
    assert find_mistakes(tmp_path, *mistakes) == wanted


def judge(second: list[int], *, is_training: bool) -> str:
    """Return what the check says about the samples of 2 ranks, of which one has drawn 0, 2 and 4 of 5 samples."""

    def record(rank: int, ids: list[int]) -> PlainRank:
        """A rank with these samples, in batches of 2."""
        return PlainRank(rank, [Pass(0, 5, 2, ids=[ids[:2], ids[2:]], num_backwards=2 * is_training)])

    runs = {1: [record(0, [0, 1, 2, 3, 4])], 2: [record(0, [0, 2, 4]), record(1, second)]}
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
    found, wanted = find_mistakes(tmp_path, name), MISTAKES[name][1]
    words = [", ".join(sorted(each)) or "-" for each in (wanted, found)]
    assert found == (set() if name in MISSED else wanted)
    assert f"| {name} | {words[0]} | {words[1]} | " in PAGE.read_text()


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
