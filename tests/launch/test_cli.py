"""The command line: its output and its errors. These tests start no ranks."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from support import commands
from support.runs import check, run_command

from samestep.launch.target import ScriptCommand
from samestep.tools.launch_command import run_launch, run_train


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run([sys.executable, "-m", "samestep", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["train", "--help"], ["--version"], ["trian"]])
def test_nothing_slow_is_imported(arguments: list[str]) -> None:
    slow = {"torch", "numpy", "psutil", "asyncio"}
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lanch", "x.py"], "samestep: No such command 'lanch'"),
        (["--versio"], "samestep: No such option"),
        (["launch"], "launch needs a script or a recipe"),
        (["launch", "-m"], "launch needs a script or a recipe"),
        (["launch", "--nproc-per-nod", "2", "x.py"], "samestep launch: No such option"),
        (["launch", "nothing.py"], "there is no script nothing.py"),
        (["launch", "."], "there is no script . that can be read"),
        (["launch", "--nproc-per-node", "0", __file__], "--nproc-per-node must be a whole number from 1"),
        (["launch", "--nproc-per-node=-2", __file__], "--nproc-per-node must be a whole number from 1 to 4096, not -2"),
        (["launch", "--nproc-per-node", "9" * 20, __file__], "--nproc-per-node must be a whole number from 1 to 4096"),
        (["launch", "--num-threads", "99999999", __file__], "--num-threads must be a whole number from 1 to 4096, not"),
        (["launch", "--max-restarts", "-1", __file__], "--max-restarts must be a whole number of at least 0, not -1"),
        (["slurm", "--job-name", "a\nb", __file__], "the batch script would have the option '--job-name=\"a\\nb\"'"),
        (["slurm", "--sbatch=--mem=1\ntouch x", __file__], "use names without control characters"),
        (["launch", "--nproc-per-node", "foo", __file__], "--nproc-per-node must be a whole number, not 'foo'"),
        (["launch", "--nproc-per-node"], "Option '--nproc-per-node' requires an argument (see samestep --help)"),
        (["launch", "--batch-size", "many", __file__], "--batch-size must be a whole number, not 'many'"),
        (["launch", "--fresh=1", __file__], "Option '--fresh' does not take a value"),
        (["launch", "--rdzv-endpoint", "a:1", __file__], "where several machines meet, and --nnodes is not given"),
        (["train", "mlp", "--rdzv-endpoint", "a:1"], "where several machines meet, and --nnodes is not given"),
        (["inspect"], "samestep inspect: Missing argument 'RUN' (see samestep inspect --help)"),
        (
            ["export", "a", "b.safetensors", "c"],
            "samestep export: Got unexpected extra argument (c) (see samestep export --help)",
        ),
        (["train", "digitz"], "there is no recipe digitz: give digits, gpt, images or mlp"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("samestep: error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


BAD = [  # arguments, and a part of the sentence
    ("launch missing.py", "there is no script missing.py"),
    ("launch --nproc-per-node x file", "--nproc-per-node must be a whole number"),
    ("launch --batch-size 0 file", "--batch-size must be a whole number above 0, found 0"),
    ("train mlp --micro-batch-size=-1", "--micro-batch-size must be a whole number above 0, found -1"),
    ("verify missing.py", "there is no script missing.py"),
    ("scale missing.py", "there is no script missing.py"),
    ("slurm missing.py", "there is no script missing.py"),
    ("inspect missing", "there is no directory missing"),
    ("report missing", "there is no directory missing"),
    ("export missing model.safetensors", "there is no directory missing"),
    ("diff missing missing", "there is no directory missing"),
    ("doctor --device tpu", "--device must be cpu, cuda"),
]


def test_bad_input_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    """The import takes most of the time of such a command."""
    (tmp_path / "file").touch()
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from samestep.cli import main\n"
        f"for words, _ in {BAD!r}:\n"
        "    assert main(words.split()) == 2, words\n"
    )
    done = check(run_command(sys.executable, "-c", code, cwd=tmp_path, real=True))
    lines = done.stderr.splitlines()
    assert [part in line for line, (_, part) in zip(lines, BAD, strict=True)] == [True] * len(BAD), done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def parse(command: ScriptCommand, *words: str) -> tuple[list[str], dict[str, Any]]:
    """Return the command that starts the target, after its name, and the values of the options."""
    target, values = command.make_context(str(command.name), [*words]).obj
    return target.to_words(), values


def test_flags_of_launch_may_be_anywhere_before_the_script() -> None:
    words = ["--nproc_per_node=2", "--batch_size", "8", "--fresh", "a.py", "--seed", "1", "--", "--x"]
    program, values = parse(run_launch, *words)
    assert values == {"nproc_per_node": 2, "batch_size": 8, "fresh": True}
    assert program == ["a.py", "--seed", "1", "--", "--x"]


def test_a_module_takes_all_words_after_it() -> None:
    program, values = parse(run_launch, "--seed", "1", "-m", "module", "--seed", "2", "-m", "--help", "--", "x")
    assert (program, values) == (["-m", "module", "--seed", "2", "-m", "--help", "--", "x"], {"seed": 1})


def test_flags_of_train_mix_with_the_recipes_own() -> None:
    words = ["--save_every=5", "mlp", "50", "--seed", "1", "--show-all", "--", "--total_epochs", "2"]
    program, values = parse(run_train, *words)
    assert values == {"seed": 1, "show_all": True}
    assert program == ["mlp", "--save-every=5", "50", "--total-epochs", "2"]
    with pytest.raises(click.UsageError, match="'--seed' requires an argument"):
        parse(run_train, "mlp", "--seed")


def test_a_recipes_help_is_its_own_and_launchs() -> None:
    done = run("train", "--seed=1", "mlp", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "[TOTAL_EPOCHS] [SAVE_EVERY]" in done.stdout
    assert "--nproc-per-node" in done.stdout
