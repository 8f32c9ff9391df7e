"""The recipe gpt: its model and its data."""

import json
import math
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.runs import ask, check, digest, read_rows, samestep_command

import samestep
from samestep.errors import Error
from samestep.recipes import gpt
from samestep.recipes.gpt import GPT2, PRESETS, GPT2Config
from samestep.sources import TokenWindows

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


# Five starts of a recipe, on one to three ranks: 24 s, and 25 s on a busy machine.
def test_the_same_bits_on_any_ranks_and_after_a_stop(tokens: Path, tmp_path: Path) -> None:
    """On one rank, on two ranks that are replaced by three after step 2, and sharded in two ways."""
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
        ("more", [(2, "2", "none"), (3, "4", "none")]),
        ("sharded", [(3, "2", "fsdp2"), (2, "4", "optimizer")]),
    ):
        run_dir = tmp_path / name
        for world_size, last, shard in starts:
            env = {"SAMESTEP_MAX_STEPS": last, "SAMESTEP_SHARD": shard}
            samestep.spawn(gpt.main, world_size, ([*arguments, str(run_dir)],), env=env)
        files = [(run_dir / name).read_bytes() for name in ("metrics.jsonl", "ledger.bin")]
        found.append((digest(run_dir), digest(run_dir, "best"), *files))
    assert found[0] == found[1] == found[2]


def test_weight_decay_is_for_matrices() -> None:
    model = build_model()
    optimizer = gpt.build_optimizer(model, 1e-3, 0.1)
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(param): name for name, param in model.named_parameters()}
    assert {names[id(param)].rpartition(".")[2] for param in decayed["params"]} == {"weight"}
    assert all(names[id(p)].endswith("bias") or "ln_" in names[id(p)] for p in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(names)
