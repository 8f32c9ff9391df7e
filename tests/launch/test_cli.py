"""The command line: its output, also with --json, and its errors. These tests start no ranks."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from support.runs import DOCUMENTED, ask, check, read_facts, run_command
from support.tiny import tiny_run

from samestep.cli import COMMANDS, program
from samestep.launch.target import COMMAND, ScriptCommand, Target
from samestep.tools.launch_command import run_launch, run_train


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["train", "--help"], ["--version"], ["trian"]])
def test_nothing_slow_is_imported(arguments: list[str]) -> None:
    slow = {"torch", "numpy", "psutil", "asyncio", "msgspec"}
    script = f"import sys; from samestep.cli import main; main({arguments!r}); sys.exit(len({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_closes_the_pipe() -> None:
    """With `| head`, there is no traceback, and the exit code is that of a program killed by SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-u", "-m", "samestep", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


MISTAKES = [  # command lines, and a part of the sentence
    ("lanch x.py", "samestep: No such command 'lanch'"),
    ("--versio", "samestep: No such option"),
    ("launch", "launch needs a script or a recipe"),
    ("launch -m", "launch needs a script or a recipe"),
    ("launch --nproc-per-nod 2 x.py", "samestep launch: No such option"),
    ("launch nothing.py", "there is no script nothing.py"),
    ("launch .", "there is no script . that can be read"),
    (f"launch {'x' * 300}", "xxx cannot be used (File name too long): name another"),
    ("launch --nproc-per-node 0 train.py", "--nproc-per-node must be a whole number from 1"),
    ("launch --nproc-per-node=-2 train.py", "--nproc-per-node must be a whole number from 1 to 4096, not -2"),
    (f"launch --nproc-per-node {'9' * 20} train.py", "--nproc-per-node must be a whole number from 1 to 4096"),
    ("launch --nproc-per-node foo train.py", "--nproc-per-node must be a whole number, not 'foo'"),
    ("launch --nproc-per-node", "Option '--nproc-per-node' requires an argument (see samestep --help)"),
    ("launch --num-threads 99999999 train.py", "--num-threads must be a whole number from 1 to 4096, not"),
    ("launch --max-restarts -1 train.py", "--max-restarts must be a whole number of at least 0, not -1"),
    ("launch --batch-size many train.py", "--batch-size must be a whole number, not 'many'"),
    ("launch --batch-size 0 train.py", "--batch-size must be a whole number above 0, found 0"),
    ("launch --snapshot-every 2weeks train.py", "--snapshot-every is '2weeks': give a number of steps such as 10"),
    ("launch --fresh=1 train.py", "Option '--fresh' does not take a value"),
    ("launch --rdzv-endpoint a:1 train.py", "where several machines meet, and --nnodes is not given"),
    ("train mlp --rdzv-endpoint a:1", "where several machines meet, and --nnodes is not given"),
    ("train mlp --seed", "Option '--seed' requires an argument"),
    ("train mlp --micro-batch-size=-1", "--micro-batch-size must be a whole number above 0, found -1"),
    ("train digitz", "there is no recipe digitz: give digits, gpt, images or mlp"),
    ("slurm", "slurm needs a script"),
    ("slurm nothing.py", "there is no script nothing.py"),
    ("slurm --job-name 'a\nb' train.py", "the batch script would have the option '--job-name=\"a\\nb\"'"),
    ("slurm '--sbatch=--mem=1\ntouch x' train.py", "use names without control characters"),
    ("slurm --node 2 train.py", "samestep slurm: No such option"),
    ("slurm --nodes 0 train.py", "--nodes must be a whole number of at least 1, not 0"),
    ("slurm --gpus-per-node a100 train.py", "--gpus-per-node must be a whole number, not 'a100'"),
    (
        "slurm --nodes=2 --gpus-per-node=8 --batch-size=32 --micro-batch-size=8 train.py",
        "16 ranks cannot share a step of 4 micro-batches (batch_size 32, micro_batch_size 8): start 1 to 4 ranks",
    ),
    ("slurm --fresh train.py", "--fresh would apply to each start of the job"),
    ("slurm --resume best train.py", "--resume would apply to each start of the job"),
    ("inspect", "samestep inspect: Missing argument 'RUN' (see samestep inspect --help)"),
    ("inspect missing", "there is no directory missing"),
    (f"inspect {'x' * 300}", "xxx cannot be read (File name too long): fix that, or name another one"),
    ("report", "Missing argument 'RUN...'"),
    ("report missing", "there is no directory missing"),
    ("export a b.safetensors c", "samestep export: Got unexpected extra argument (c) (see samestep export --help)"),
    ("export missing model.safetensors", "there is no directory missing"),
    ("diff missing missing", "there is no directory missing"),
    ("verify", "verify needs a script or a recipe"),
    ("verify nowhere.py", "there is no script nowhere.py"),
    ("verify --world-sizes 1,two mlp", "--world-sizes takes numbers of ranks such as 1,2,4, not '1,two'"),
    ("verify --world-sizes 0 mlp", "--world-sizes takes numbers of ranks"),
    ("verify --steps 0 mlp", "--steps"),
    ("verify --step 3 mlp", "samestep verify: No such option"),
    ("verify --run-dir x mlp", "samestep verify: No such option"),
    ("verify --plain --kills 1 train.py", "--kills cannot be used with --plain"),
    ("verify --plain --steps 0 train.py", "--steps"),
    ("scale missing.py", "there is no script missing.py"),
    ("scale --world-sizes 2,4 train.py", "--world-sizes needs 1, to which all is compared"),
    ("scale --world-sizes a train.py", "--world-sizes takes numbers of ranks"),
    ("scale --steps 1 train.py", "--steps must be a whole number of at least 2, not 1"),
    ("replay run train.py", "replay needs the step: --step S, counted from 0"),
    ("replay run --step 3 --micro-batch -1 train.py", "--micro-batch"),
    ("replay run --step 3 missing.py", "there is no script missing.py"),
    ("doctor --jsn", "samestep doctor: No such option"),
    ("doctor --device tpu", "--device must be cpu, cuda or one GPU"),
    ("doctor --nproc-per-node none", "--nproc-per-node must be a whole number, not 'none'"),
    ("doctor --nnodes 2", "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
]


def test_a_mistake_is_one_sentence_before_torch_is_imported(tmp_path: Path) -> None:
    """The import takes most of the time of such a command. Nothing is written."""
    (tmp_path / "train.py").touch()
    code = (
        "import shlex, sys; sys.modules['torch'] = None\n"
        "from samestep.cli import main\n"
        f"for words, _ in {MISTAKES!r}:\n"
        "    assert main(shlex.split(words)) == 2, words\n"
    )
    done = check(run_command(sys.executable, "-c", code, cwd=tmp_path, real=True))
    assert done.stdout == ""
    for line, (words, said) in zip(done.stderr.splitlines(), MISTAKES, strict=True):
        assert line.startswith("samestep: error: "), line
        assert said in line, words
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(("command", "words", "target", "values"), [
    # Flags of launch may be anywhere before the script.
    (run_launch, ["--nproc_per_node=2", "--batch_size", "8", "--fresh", "a.py", "--seed", "1", "--", "--x"],
     ["a.py", "--seed", "1", "--", "--x"], {"nproc_per_node": 2, "batch_size": 8, "fresh": True}),
    # A module takes all words after it.
    (run_launch, ["--seed", "1", "-m", "module", "--seed", "2", "-m", "--help", "--", "x"],
     ["-m", "module", "--seed", "2", "-m", "--help", "--", "x"], {"seed": 1}),
    # Flags of train mix with the recipe's own.
    (run_train, ["--save_every=5", "mlp", "50", "--seed", "1", "--show-all", "--", "--total_epochs", "2"],
     ["mlp", "--save-every=5", "50", "--total-epochs", "2"], {"seed": 1, "show_all": True}),
])  # fmt: skip
def test_whose_a_flag_is(command: ScriptCommand, words: list[str], target: list[str], values: dict[str, Any]) -> None:
    found, options = command.make_context(str(command.name), words).params.values()
    assert (found.to_words(), options) == (target, values)


def test_a_recipes_help_is_its_own_and_launchs() -> None:
    said = ask("train", "--seed=1", "mlp", "--help")
    assert "[TOTAL_EPOCHS] [SAVE_EVERY]" in said
    assert "--nproc-per-node" in said


# --- the working directory --------------------------------------------------------------------------------------------


PLANTED = "open('planted-has-run', 'w').close()\n"
RUN_AS_RANK = (
    "from samestep.launch.rank_process import load_main; load_main('module', 'samestep', ['doctor']); import bz2"
)


@pytest.mark.parametrize(
    "command",
    [
        Target("script", "train.py").to_full_command(2),
        Target("module", "train").to_full_command(2),
        Target("recipe", "samestep.recipes.digits").to_full_command(2),
        [*COMMAND, "launch"],
        [sys.executable, "-P", "-c", RUN_AS_RANK],
        ["samestep"],
    ],
    ids=lambda command: " ".join(command)[-60:],
)
def test_a_command_imports_nothing_from_the_working_directory(tmp_path: Path, command: list[str]) -> None:
    for name in ("argparse", "bz2", "json", "samestep", "torch"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    if command == ["samestep"]:
        command = [str(Path(sys.executable).with_name("samestep")), "--version"]
    elif "samestep" in command:  # as far as the command's name, and a command that imports no torch
        command = [*command[: command.index("samestep") + 1], "runs", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not (tmp_path / "planted-has-run").exists(), done.stderr


# --- --json -----------------------------------------------------------------------------------------------------------


WITHOUT = ("train", "launch", "node", "slurm")  # they print what the script prints, or a script
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {  # command -> its arguments, and some of the facts
    "inspect": (["one"], {"heals": [], "checked": False}),
    "inspect --digest": (["one"], {"step": 8, "name": None}),
    "inspect --samples": (["one"], {"audit": {"passed": True, "problems": []}}),
    "runs": (["."], {}),
    "diff": (["one", "two"], {"same": True, "common_steps": 8, "first_differing_step": None}),
    "watch": (["one"], {"ranks": []}),
    "report": (["one", "two"], {"file": "report.html", "runs": ["one", "two"]}),
    "export": (
        ["one", "model.safetensors"],
        {"file": "model.safetensors", "object": "model", "step": 8, "num_tensors": 2, "left_out": []},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two equal runs of 8 steps."""
    home = tmp_path_factory.mktemp("json")
    for name in ("one", "two"):
        tiny_run(home / name)
    return home


@pytest.mark.parametrize("command", CASES)
def test_facts(command: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    words, expected = CASES[command]
    facts = read_facts(command, ask(*command.split(), "--json", *words))
    assert {name: facts[name] for name in expected} == expected
    if "size_bytes" in facts:
        assert facts["size_bytes"] == os.path.getsize(facts["file"])


def test_every_command_has_it() -> None:
    assert {command.partition(" ")[0] for command in DOCUMENTED} == {*COMMANDS} - {*WITHOUT}
    context = click.Context(program)
    for name in {*COMMANDS} - {*WITHOUT}:
        params = program.get_command(context, name).params
        assert "--json" in [flag for param in params for flag in param.opts], name
