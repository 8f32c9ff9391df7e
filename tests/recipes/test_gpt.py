"""The recipe gpt: its model, its data, `samestep prepare` and `samestep sample`."""

import contextlib
import io
import json
import math
import pickle
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.commands import Popen
from support.runs import ask, check, clean_variables, digest, read_rows, run_command, samestep_command
from support.tiny import tiny_run
from support.waiting import DEADLINE_S, wait_until

import samestep
from samestep.cli import main
from samestep.errors import Error
from samestep.recipes import gpt
from samestep.recipes.corpora.text_tokenizer import BYTES, Tokenizer, train_bpe
from samestep.recipes.corpora.token_file import (
    TokenCorpus,
    list_standard_library,
    open_corpus,
    read_standard_library,
    split,
)
from samestep.recipes.models.gpt2 import GPT2, PRESETS, GPT2Config
from samestep.sources import TokenWindows

SIZES = GPT2Config(vocabulary_size=50, context=12, num_layers=3, num_heads=2, width=16)
SENTENCES = ["the cat sat on the mat\n", "a dog ran to the cat\n", "naïve café\n"]
SMALL = ("--context", "16", "--batch-size", "8", "--validate-samples", "8")  # options for a model of few operations


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """With tiny operations, several threads are slower than one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def build_model(config: GPT2Config = SIZES, **options: Any) -> GPT2:
    """A model whose biases are not zero, either."""
    torch.manual_seed(0)
    model = GPT2(config, **options)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.1)
    return model.eval()


def train(arguments: list[str]) -> None:
    gpt.main(arguments)


def refuse(*arguments: str | Path) -> str:
    """Return the one sentence of the error with which a command ends."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert main([str(argument) for argument in arguments]) == 2
    sentence = said.getvalue()
    assert sentence.startswith("samestep: error: ")
    assert sentence.count("\n") == 1
    return sentence


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token file of bytes, made by the command."""
    directory = tmp_path_factory.mktemp("tokens")
    for name, num_sentences in (("a.txt", 20), ("b.txt", 160)):
        (directory / name).write_text("".join(SENTENCES[-i % 3] for i in range(num_sentences)))
    (directory / "empty.txt").touch()
    files = [directory / name for name in ("a.txt", "b.txt", "empty.txt")]
    said = ask("prepare", "text", *files, "--out", directory / "tokens")
    assert " tokens, bytes" in said
    return directory / "tokens"


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


def test_generation() -> None:
    model, prompt = build_model(), torch.tensor([1, 2, 3])

    def generate(num: int, **options: Any) -> list[int]:
        stream = model.generate(prompt, **options)
        return [next(stream) for _ in range(num)]

    greedy = generate(20, temperature=0)  # goes on beyond the context of 12
    tokens = [1, 2, 3]
    for token in greedy:
        assert token == model(torch.tensor([tokens[-12:]]))[0, -1].argmax()
        tokens.append(token)
    assert generate(20, top_k=1) == greedy
    seeded = [generate(20, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert seeded[0] == seeded[1] != seeded[2]
    likely = model(prompt[None])[0, -1].topk(2).indices.tolist()
    assert {generate(1, top_k=2, temperature=9.0)[0] for _ in range(50)} == {*likely}


# --- the data ---------------------------------------------------------------------------------------------------------


def test_tokens_are_the_bytes_of_the_documents(tokens: Path) -> None:
    corpus = open_corpus(tokens)
    first, second = [(tokens.parent / name).read_bytes() for name in ("a.txt", "b.txt")]
    assert corpus.tokens.tolist() == [*first, 256, *second, 256]
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.tokenizer == BYTES
    assert BYTES.decode(corpus.tokens[:13].tolist()) == "the cat sat o"
    assert BYTES.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_windows(tokens: Path) -> None:
    corpus = open_corpus(tokens)
    train, held_out = split(corpus, 16, 0.1, most=8)
    num_tokens = len(corpus.tokens)
    cut = int(num_tokens * 0.9)
    assert len(train) == (cut - 1) // 16
    read = train.__getitems__([3, 0])
    assert (read.dtype, read.shape) == (np.int64, (2, 17))
    assert read.tolist() == [corpus.tokens[48:65].tolist(), corpus.tokens[:17].tolist()]
    assert torch.from_numpy(read).shape == (2, 17)
    every = math.ceil((num_tokens - cut - 1) // 16 / 8)
    assert 4 <= len(held_out) <= 8
    assert held_out[1].tolist() == corpus.tokens[cut + 16 * every :][:17].tolist()
    pickled = pickle.dumps(train)
    assert len(pickled) < 1000, "a worker that is not forked opens the file itself"
    assert pickle.loads(pickled)[3].tolist() == read[0].tolist()
    in_memory = TokenWindows(corpus.tokens[:100].copy(), 16, 0, 100, 257)
    assert pickle.loads(pickle.dumps(in_memory))[2].tolist() == in_memory[2].tolist()


def test_a_corpus_of_the_fewest_tokens() -> None:
    corpus = TokenCorpus("it", np.arange(10, dtype=np.uint16), BYTES)
    train, held_out = split(corpus, 4, 0.05, most=256)
    assert (len(train), len(held_out)) == (1, 1)
    assert held_out[0].tolist() == [5, 6, 7, 8, 9]
    with pytest.raises(Error, match="it has 10 tokens, and sequences of 5 need at least 12"):
        split(corpus, 5, 0.05, most=256)


def test_the_standard_library_is_the_default() -> None:
    files = list_standard_library()
    names = {file.name for file in files}
    assert {"argparse.py", "zipfile.py"} <= names
    assert not [file for file in files if {"site-packages", "test", "tests"} & {*file.parts[-4:-1]}]
    corpus = read_standard_library()
    assert len(corpus.tokens) > 5e6
    assert corpus.tokens.dtype == np.uint16
    assert (corpus.tokens == 256).sum() == sum(file.stat().st_size > 0 for file in files)
    first = next(file for file in files if file.stat().st_size)
    assert BYTES.decode(corpus.tokens[: first.stat().st_size].tolist()) == first.read_text()


def test_bpe(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    for i, sentence in enumerate(SENTENCES):
        (tmp_path / f"{i}.txt").write_text(sentence * 10)
    files = [tmp_path / f"{i}.txt" for i in range(3)]
    ask("prepare", "text", *files, "--out", tmp_path / "bpe", "--tokenizer", "bpe", "--vocab-size", "280")
    corpus = open_corpus(tmp_path / "bpe")
    tokenizer, end = corpus.tokenizer, corpus.tokenizer.end
    assert end is not None
    assert tokenizer.vocabulary_size == 280
    assert (corpus.tokens == end).sum() == 3
    documents = "".join(f"{chr(int(token) + 1000)}" for token in corpus.tokens).split(chr(end + 1000))[:3]
    assert [tokenizer.decode([ord(c) - 1000 for c in text]) for text in documents] == [s * 10 for s in SENTENCES]
    assert len(corpus.tokens) < sum(len(sentence.encode()) for sentence in SENTENCES) * 10
    assert tokenizer.decode(tokenizer.encode_prompt("\x00 日本\n")) == "\x00 日本\n"
    assert tokenizer.encode_prompt("") == [end]
    assert Tokenizer(**tokenizer.state_dict()) == tokenizer
    with pytest.raises(Error, match=r"the run's tokens are 280 kinds \(\w{8}\), and the data's are bytes"):
        BYTES.load_state_dict(tokenizer.state_dict())
    # A model's own tokenizer gives the same tokens.
    ask("prepare", "text", *files, "--out", tmp_path / "own", "--tokenizer", tmp_path / "bpe" / "tokenizer.json")
    assert (tmp_path / "own" / "tokens.npy").read_bytes() == (tmp_path / "bpe" / "tokens.npy").read_bytes()


def test_a_token_for_each_character(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("".join(SENTENCES))
    ask("prepare", "text", tmp_path / "a.txt", "--out", tmp_path / "chars", "--tokenizer", "chars")
    corpus = open_corpus(tmp_path / "chars")
    characters = sorted({*"".join(SENTENCES)})
    assert corpus.tokens.tolist() == [*map(characters.index, "".join(SENTENCES)), len(characters)]
    assert str(corpus.tokenizer).startswith(f"{len(characters) + 1} kinds (")
    assert corpus.tokenizer.decode(corpus.tokens.tolist()) == "".join(SENTENCES)
    assert corpus.tokenizer.decode(corpus.tokenizer.encode_prompt("café\n")) == "café\n"
    with pytest.raises(Error, match="the tokenizer has no tokens for the prompt 'cat!': it gives 'cat'"):
        corpus.tokenizer.encode_prompt("cat!")


def test_a_prompt_that_a_tokenizer_does_not_know() -> None:
    library = pytest.importorskip("tokenizers")
    words = library.Tokenizer(library.models.WordLevel({"cat": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(words.to_str())
    assert tokenizer.encode_prompt("cat cat") == [0, 0]
    with pytest.raises(Error, match="the tokenizer has no tokens for the prompt 'cat dog': it gives"):
        tokenizer.encode_prompt("cat dog")
    with pytest.raises(Error, match="the tokenizer has no tokens for the prompt '': it gives"):
        tokenizer.encode_prompt("")
    with pytest.raises(Error, match=r"no tokens for the prompt '\\udcff'"):
        train_bpe(["abc"], 257).encode_prompt("\udcff")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("truncated", "mmap length is greater than file size"),
        ("no array", "tokens.npy"),
        ("missing", "No such file or directory"),
        ("a file", "Not a directory"),
    ],
)
def test_a_damaged_token_file(tokens: Path, tmp_path: Path, how: str, said: str) -> None:
    content = (tokens / "tokens.npy").read_bytes()
    if how == "truncated":
        (tmp_path / "tokens.npy").write_bytes(content[:-100])
    elif how == "no array":
        np.save(tmp_path / "tokens.npy", np.zeros((2, 2)))
    with pytest.raises(Error, match=r"is no token file .*: make one with samestep prepare text") as caught:
        open_corpus(tokens / "tokens.npy" if how == "a file" else tmp_path)
    assert said in str(caught.value)


def test_a_token_outside_of_the_vocabulary() -> None:
    windows = TokenWindows(np.array([1, 2, 300, 4], np.uint16), 1, 0, 4, 257)
    assert windows[0].tolist() == [1, 2]
    with pytest.raises(Error, match="the token file holds token 300, and its vocabulary has 257"):
        windows.__getitems__([0, 1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.txt", "--out", "here"], "here exists already"),
        (["no.txt", "--out", "new"], "no.txt cannot be read (No such file or directory): name text files"),
        (["here", "--out", "new"], "here cannot be read (Is a directory): name text files"),
        (["empty.txt", "--out", "new"], "there is no text in the input"),
        (["a.txt", "--out", "new", "--vocab-size", "9"], "9 is not in the range x>=257"),
        (["a.txt", "--out", "new", "--tokenizer", "a.txt"], "a.txt is no tokenizer of the library tokenizers ("),
        (["a.txt", "--out", "new", "--tokenizer", "bqe"], "bqe is no tokenizer of the library tokenizers ("),
        (["a.txt", "latin1.txt", "--out", "new", "--tokenizer", "bpe"], "latin1.txt is not UTF-8 ("),
        (["cut.txt", "--out", "new"], "unexpected end of data): convert it, such as by iconv"),
        (["a.txt"], "the following arguments are required: --out"),
    ],
)
def test_prepare_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str) -> None:
    if "--tokenizer" in arguments:
        pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("empty.txt").touch()
    Path("a.txt").write_text("text")
    Path("latin1.txt").write_bytes(b"\n" * 80_001 + b"caf\xe9s\n")
    Path("cut.txt").write_bytes("café".encode()[:-1])
    before = sorted(tmp_path.iterdir())
    assert said in refuse("prepare", "text", *arguments)
    assert sorted(tmp_path.iterdir()) == before
    assert not any(Path("here").iterdir())


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_prepare_leaves_nothing(tmp_path: Path, signum: signal.Signals) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n" * 100_000_000)  # so many lines take seconds
    command = [sys.executable, "-m", "samestep", "prepare", "text", "a.txt", "--out", "tokens"]
    program = Popen(command, cwd=tmp_path, env=clean_variables())
    wait_until(lambda: any(path.is_dir() for path in tmp_path.iterdir()), "the command writes")
    program.send_signal(signum)
    assert program.wait(DEADLINE_S) in (128 + signum, -signum)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


# --- the recipe -------------------------------------------------------------------------------------------------------


def test_it_learns(run_dir: Path, tokens: Path) -> None:
    losses = [row["validation/loss"] for row in read_rows(run_dir) if "validation/loss" in row]
    assert len(losses) == 2
    assert losses[1] < losses[0] < math.log(257)
    assert json.loads(ask("inspect", run_dir, "--json"))["state"]["best"] == losses[1]


def test_sample(run_dir: Path) -> None:
    command = ("sample", run_dir, "--prompt", "the c", "--max-tokens", "10")
    texts = [ask(*command, "--seed", seed, "--temperature", "2") for seed in "001"]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("the c") and len(text) <= 10 + 6 for text in texts)
    assert ask(*command, "--temperature", "0") == ask(*command, "--top-k", "1", "--snapshot", "best")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-tokens", "0"], "Invalid value for '--max-tokens': 0 is not in the range x>=1"),
        (["--temperature", "-1"], "-1.0 is not in the range x>=0"),
        (["--snapshot", "worst"], "there is no snapshot named worst in"),
    ],
)
def test_sample_refuses(run_dir: Path, options: list[str], said: str) -> None:
    assert said in refuse("sample", run_dir, *options)


def test_several_samples_are_separated_by_a_line(run_dir: Path) -> None:
    command = ("sample", run_dir, "--prompt", "the c", "--max-tokens", "10", "--temperature", "2")
    first, *others = ask(*command, "--num-samples", "3").split("\n---\n")
    assert first + "\n" == ask(*command)
    assert len({first, *others}) == 3


def test_sample_of_another_run(tmp_path: Path) -> None:
    samestep.spawn(tiny_run, 1, (tmp_path / "other",), {"num_steps": 1})
    assert "is no run of the recipe gpt: name one" in refuse("sample", tmp_path / "other", "--snapshot", "latest")
    assert f"there is no directory {tmp_path}/none" in refuse("sample", tmp_path / "none")


def test_exported_weights_load_without_samestep(run_dir: Path, tmp_path: Path) -> None:
    ask("export", run_dir, tmp_path / "model.safetensors", "--snapshot", "best")
    (tmp_path / "gpt2.py").write_bytes((Path(gpt.__file__).parent / "models" / "gpt2.py").read_bytes())
    (tmp_path / "plain.py").write_text(
        "import torch\nfrom safetensors.torch import load_file\nfrom gpt2 import GPT2, GPT2Config\n"
        "model = GPT2(GPT2Config(vocabulary_size=257, context=16, num_layers=4, num_heads=4, width=128)).eval()\n"
        "model.load_state_dict(load_file('model.safetensors'))\n"
        "tokens = model.generate(torch.tensor([*b'the c']), temperature=0)\n"
        "print(bytes(next(tokens) for _ in range(8)).decode())\n"
    )
    printed = check(run_command(sys.executable, "plain.py", cwd=tmp_path)).stdout
    assert f"the c{printed}" == ask("sample", run_dir, "--prompt", "the c", "--temperature", "0", "--max-tokens", "8")


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
            samestep.spawn(train, world_size, ([*arguments, str(run_dir)],), env=env)
        files = [(run_dir / name).read_bytes() for name in ("metrics.jsonl", "ledger.bin")]
        found.append((digest(run_dir), digest(run_dir, "best"), *files))
    assert found[0] == found[1] == found[2]


@pytest.mark.soak
@pytest.mark.parametrize("options", [[], ["--precision", "bf16"], ["--checkpoint-activations"]], ids=str)
def test_the_same_bits_after_kills(tokens: Path, tmp_path: Path, options: list[str]) -> None:
    done = samestep_command(
        "verify", "--steps", "4", "--world-sizes", "1,2,3", "--kills", "1", "gpt", "--data", tokens, *SMALL,
        "--validate-every", "2", "--dropout", "0.1", *options, cwd=tmp_path,
    )  # fmt: skip
    check(done)


@pytest.mark.soak
@pytest.mark.timeout(1300)  # it compiles C++, if no earlier run has
def test_the_same_bits_compiled(tokens: Path, tmp_path: Path) -> None:
    for ranks in ("1", "2"):
        done = samestep_command(
            "train", "gpt", "--nproc-per-node", ranks, "--data", tokens, *SMALL, "--steps", "3", "--compile",
            "--validate-every", "2", "--run-dir", tmp_path / ranks, cwd=tmp_path, timeout=600,
        )  # fmt: skip
        check(done)
    assert digest(tmp_path / "1") == digest(tmp_path / "2")


def test_early_stopping(tokens: Path, tmp_path: Path) -> None:
    """With a learning rate of 0, no validation is better than the first."""
    arguments = [
        "--data",
        str(tokens),
        *SMALL,
        "--steps",
        "9",
        "--validate-every",
        "1",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    samestep.spawn(train, 1, ([*arguments, "--lr", "0", "--patience", "2"],))
    assert [row["step"] for row in read_rows(tmp_path / "run") if "validation/loss" in row] == [1, 2, 3]


@pytest.mark.parametrize("arguments", [["--context", "8"], ["--layers", "2"]])
def test_another_model_than_the_runs(run_dir: Path, tokens: Path, arguments: list[str]) -> None:
    before = digest(run_dir)
    with pytest.raises(Error, match="holds another run"):
        samestep.spawn(train, 1, (["--data", str(tokens), *SMALL, "--run-dir", str(run_dir), *arguments],))
    assert digest(run_dir) == before


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--preset", "smal"], "'smal' is not one of 'tiny', 'small', 'gpt2'"),
        (["--heads", "0"], "Invalid value for '--heads': 0 is not in the range x>=1"),
        (["--validate-everi", "1"], "train gpt has no option --validate-everi; did you mean --validate-every?"),
    ],
)
def test_wrong_arguments(argv: list[str], said: str) -> None:
    with pytest.raises(Error) as caught:
        gpt.main(argv)
    assert said in str(caught.value)


def test_weight_decay_is_for_matrices() -> None:
    model = build_model()
    optimizer = gpt.build_optimizer(model, 1e-3, 0.1)
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(param): name for name, param in model.named_parameters()}
    assert {names[id(param)].rpartition(".")[2] for param in decayed["params"]} == {"weight"}
    assert all(names[id(p)].endswith("bias") or "ln_" in names[id(p)] for p in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(names)
