"""The recipes from the command line, and their parts."""

import inspect
import json
import math
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.runs import ask, check, digest, read_bits, read_rows, run_command, samestep_command
from support.snapshots import read_snapshot

import samestep
from samestep.errors import Error, MissingPackage
from samestep.recipes import build_schedule, digits, gpt
from samestep.recipes.gpt import GPT2, PRESETS, GPT2Config
from samestep.snapshot.store import Store
from samestep.sources import TokenWindows


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


def test_digits_stops_early_and_its_best_weights_load_without_samestep(tmp_path: Path) -> None:
    """With a learning rate of 0, only the statistics of BatchNorm change."""
    run_dir = tmp_path / "digits"
    options = ["--lr", "0", "--patience", "1", "--epochs", "9", "--trackers", "tensorboard"]
    said = run_train("digits", *options, "--run-dir", str(run_dir))
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


# --- gpt --------------------------------------------------------------------------------------------------------------


SIZES = GPT2Config(vocabulary_size=50, context=12, num_layers=3, num_heads=2, width=16)
SENTENCES = ["the cat sat on the mat\n", "a dog ran to the cat\n", "naïve café\n"]
SMALL = ("--context", "16", "--batch-size", "8", "--validate-samples", "8")  # options for a model of few operations


def build_model(config: GPT2Config = SIZES, **options: Any) -> GPT2:
    """A model whose biases are not zero, either."""
    torch.manual_seed(0)
    model = GPT2(config, **options)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.1)
    return model.eval()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, whose bytes are the tokens."""
    file = tmp_path_factory.mktemp("tokens") / "text.txt"
    file.write_text("".join(SENTENCES[-i % 3] for i in range(180)))
    return file


@pytest.fixture(scope="module")
def run_dir(tokens: Path) -> Path:
    """A run on two ranks. Options may have underscores."""
    directory = tokens.with_name("run")
    done = samestep_command(
        "train", "gpt", "--nproc-per-node", "2", "--data", tokens, *SMALL, "--steps", "20", "--validate_every", "10",
        "--lr=0.02", "--weight_decay=0.2", "--run-dir", directory, cwd=tokens.parent,
    )  # fmt: skip
    check(done)
    assert re.findall(r"^step (\d+)/20 +validation/loss", done.stdout, re.MULTILINE) == ["10", "20"]
    assert json.loads((directory / "run.json").read_text())["config"]["weight_decay"] == 0.2
    return directory


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "num_params"), [("gpt2", 124_439_808), ("small", 6 * (12 * 384**2 + 13 * 384) + (50257 + 256 + 2) * 384)]
)
def test_presets_have_the_published_sizes(preset: str, num_params: int) -> None:
    """The sizes are computed from a model of one block and one token, which is faster to build."""
    config = PRESETS[preset]
    model = GPT2(replace(config, num_layers=1, vocabulary_size=1))
    rest = (config.num_layers - 1) * count(model.h[0]) + (config.vocabulary_size - 1) * config.width
    assert count(model) + rest == num_params


def count(module: torch.nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def test_initialization() -> None:
    torch.manual_seed(0)
    model = GPT2(replace(PRESETS["tiny"], vocabulary_size=257))
    weights = dict(model.named_parameters())
    for name, param in weights.items():
        if name.endswith("bias"):
            assert not param.any(), name
        elif ".ln_" in name or name.startswith("ln_"):
            assert bool((param == 1).all()), name
        else:
            wanted = 0.02 / math.sqrt(8) if name.endswith("c_proj.weight") else 0.02
            assert param.std().item() == pytest.approx(wanted, rel=0.05), name
    tokens, targets = torch.randint(257, (2, 4, 64))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(math.log(257), abs=0.1)


def test_a_token_sees_those_before_it_only() -> None:
    model = build_model()
    tokens = torch.randint(50, (2, 12))
    changed = torch.cat([tokens[:, :8], (tokens[:, 8:] + 1) % 50], 1)
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.isclose(before[:, 8:], after[:, 8:]).all(-1).any()
    with pytest.raises(ValueError, match="13 tokens are more than the context of 12"):
        model(torch.zeros(1, 13, dtype=torch.long))


def test_checkpointing_gives_the_same_gradients() -> None:
    """Dropout draws the same numbers when a block is computed again."""
    found = []
    for is_on in (False, True):
        model = build_model(replace(SIZES, dropout=0.2), checkpoint_activations=is_on).train()
        torch.manual_seed(1)
        model(torch.arange(24).view(2, 12)).square().mean().backward()
        found.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *found))


# --- the data ---------------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_a_file_or_the_bytes_of_a_text(tokens: Path, tmp_path: Path) -> None:
    assert gpt.read_tokens(tokens).tolist() == [*tokens.read_bytes()]
    numbers = np.array([3, 1, 70_000], np.uint32)
    np.save(tmp_path / "tokens.npy", numbers)
    assert gpt.read_tokens(tmp_path / "tokens.npy").tolist() == numbers.tolist()
    numbers[:2].astype("<u2").tofile(tmp_path / "train.bin")
    assert gpt.read_tokens(tmp_path / "train.bin").tolist() == [3, 1]


def test_windows(tokens: Path) -> None:
    data = gpt.read_tokens(tokens)
    train, held_out = gpt.split(data, 16, 256, 0.1, most=8)
    num_tokens = len(data)
    cut = int(num_tokens * 0.9)
    assert len(train) == (cut - 1) // 16
    read = train.__getitems__([3, 0])
    assert (read.dtype, read.shape) == (np.int64, (2, 17))
    assert read.tolist() == [data[48:65].tolist(), data[:17].tolist()]
    every = math.ceil((num_tokens - cut - 1) // 16 / 8)
    assert 4 <= len(held_out) <= 8
    assert held_out[1].tolist() == data[cut + 16 * every :][:17].tolist()
    pickled = pickle.dumps(train)
    assert len(pickled) < 1000, "a worker that is not forked opens the file itself"
    assert pickle.loads(pickled)[3].tolist() == read[0].tolist()
    in_memory = TokenWindows(data[:100].copy(), 16, 0, 100, 257)
    assert pickle.loads(pickle.dumps(in_memory))[2].tolist() == in_memory[2].tolist()


def test_a_corpus_of_the_fewest_tokens() -> None:
    tokens = np.arange(10, dtype=np.uint16)
    train, held_out = gpt.split(tokens, 4, 10, 0.05, most=256)
    assert (len(train), len(held_out)) == (1, 1)
    assert held_out[0].tolist() == [5, 6, 7, 8, 9]
    with pytest.raises(Error, match="the data has 10 tokens, and sequences of 5 need at least 12"):
        gpt.split(tokens, 5, 10, 0.05, most=256)


def test_the_standard_library_is_the_default() -> None:
    files = gpt.list_standard_library()
    assert {"argparse.py", "zipfile.py"} <= {file.name for file in files}
    assert not [file for file in files if {"site-packages", "test", "tests"} & {*file.parts[-4:-1]}]
    assert len(gpt.read_tokens(None)) == sum(file.stat().st_size for file in files) > 5e6


def test_a_token_outside_of_the_vocabulary() -> None:
    windows = TokenWindows(np.array([1, 2, 300, 4], np.uint16), 1, 0, 4, 257)
    assert windows[0].tolist() == [1, 2]
    with pytest.raises(Error, match="the token file holds token 300, and its vocabulary has 257"):
        windows.__getitems__([0, 1])


# --- the recipe -------------------------------------------------------------------------------------------------------


def test_it_learns(run_dir: Path, tokens: Path) -> None:
    losses = [row["validation/loss"] for row in read_rows(run_dir) if "validation/loss" in row]
    assert len(losses) == 2
    assert losses[1] < losses[0] < math.log(256)
    assert json.loads(ask("inspect", run_dir, "--json"))["state"]["best"] == losses[1]


def test_the_same_bits_on_any_ranks_and_after_a_stop(tokens: Path, tmp_path: Path) -> None:
    """On one rank, and on two ranks that are replaced by three after step 2, sharded in two ways."""
    arguments = [
        "--data",
        str(tokens),
        *SMALL,
        "--steps",
        "4",
        "--validate-every",
        "2",
        "--dropout",
        "0.1",
        "--run-dir",
    ]
    found = []
    for name, starts in (
        ("one", [(1, "4", "none")]),
        ("more", [(2, "2", "optimizer"), (3, "4", "fsdp2")]),
    ):
        run_dir = tmp_path / name
        for world_size, last, shard in starts:
            env = {"SAMESTEP_MAX_STEPS": last, "SAMESTEP_SHARD": shard}
            samestep.spawn(gpt.main, world_size, ([*arguments, str(run_dir)],), env=env)
        found.append((digest(run_dir, "best"), *read_bits(run_dir)))
    assert found[0] == found[1]


def test_weight_decay_is_for_matrices() -> None:
    model = build_model()
    optimizer = gpt.build_optimizer(model, 1e-3, 0.1)
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(param): name for name, param in model.named_parameters()}
    assert {names[id(param)].rpartition(".")[2] for param in decayed["params"]} == {"weight"}
    assert all(names[id(p)].endswith("bias") or "ln_" in names[id(p)] for p in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(names)
