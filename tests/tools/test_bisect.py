"""`samestep bisect`: the commit that changed a script's bits or a metric, without touching the repository."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import Popen
from support.runs import check, clean_variables, samestep_command
from support.waiting import DEADLINE_S, wait_until

SCRIPT = """
import sys
import samestep, torch
from layers import SIZE, scale

run = samestep.Run("runs/x", batch_size=8, micro_batch_size=4)
data = torch.utils.data.TensorDataset(torch.rand(32, 4), torch.rand(32, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), float(sys.argv[1]))
run.prepare(model=model, optimizer=optimizer)
for step in run.steps(data, 100):
    for x, y in step:
        step.backward(((model(x) - y) * scale(1.0)).square().mean())
    optimizer.step()
"""
LAYERS = [
    "SIZE = 4\ndef scale(x): return x\n",
    "SIZE = 4\ndef scale(x):\n    return x\n",
    "import nothing_of_this_name\n",
    "SIZE = 4\ndef scale(x): return x * 1.0001\n",
    "SIZE = 5\ndef scale(x): return x * 1.0001\n",
]
SUBJECTS = ["begin", "reformat", "break it", "scale the loss", "enlarge"]


def git(home: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    return subprocess.check_output(["git", *who, *words], cwd=home, env=clean_variables(), text=True).strip()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of five commits, tagged v0 to v4, with an uncommitted change."""
    home = tmp_path_factory.mktemp("bisect") / "repository"
    (home / "code").mkdir(parents=True)
    git(home, "init", "--quiet")
    (home / "code/train.py").write_text(SCRIPT)
    for number, (text, subject) in enumerate(zip(LAYERS, SUBJECTS, strict=True)):
        (home / "code/layers.py").write_text(text)
        git(home, "add", ".")
        git(home, "commit", "--quiet", "-m", subject)
        git(home, "tag", f"v{number}")
    git(home, "branch", "side", git(home, "commit-tree", "v0^{tree}", "-p", "v0", "-m", "aside"))
    (home / "code/layers.py").write_text("not python")
    (home / "untracked").touch()
    return home


def bisect(home: Path, *words: str, code: int = 0) -> tuple[str, str]:
    """Return what a search prints. Checks that the repository and the directory for temporary files are unchanged."""
    scratch = home.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    before = describe(home)
    done = check(samestep_command("bisect", *words, cwd=home / "code", env={"TMPDIR": str(scratch)}), code)
    assert describe(home) == before
    assert [*scratch.iterdir()] == []
    return done.stdout, done.stderr


def describe(home: Path) -> tuple[str, ...]:
    asked = ("status --porcelain", "worktree list", "log --all --oneline", "branch --all")
    return *(git(home, *words.split()) for words in asked), (home / "code/layers.py").read_text()


def test_the_commit_that_changed_the_bits(home: Path, tmp_path: Path) -> None:
    """A failing commit next to the changed one is skipped, so both are named. One end is a run directory."""
    run = tmp_path / "good"
    run.mkdir()
    record = {"git": {"commit": git(home, "rev-parse", "v0"), "is_dirty": False}}
    (run / "run.json").write_text(json.dumps(record))
    out, err = bisect(home, "--steps", "2", str(run), "v4", "train.py", "0.1")
    outcomes = [line.partition("): ")[2].split()[0] for line in err.splitlines()[1:]]
    assert outcomes == ["the", "differs", "fails,", "same", "differs"]
    assert "samestep: uncommitted changes are ignored" in err
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in err
    assert out.startswith("one of ")
    assert "(break it), " in out
    assert "(scale the loss) is the first commit that changed the bits (the script fails at all of them but " in out
    assert ": step 0: the loss is 0." in out


def test_the_commit_that_changed_a_metric(home: Path) -> None:
    words = ["--steps", "2", "--metric", "train/loss"]
    out, _ = bisect(home, *words, "--json", "--nproc-per-node", "2", "v3^^^", "v3", "train.py", "0.1")
    found = json.loads(out)
    assert found["candidates"] == [git(home, "rev-parse", "v2"), git(home, "rev-parse", "v3")]
    assert (found["first"], found["step"], len(found["tried"])) == (None, None, 4)
    _, err = bisect(home, *words, "--tolerance", "0.01", "v0", "v3", "train.py", "0.1", code=2)
    assert "the metric is the same at both commits after 2 steps: give more --steps, or other commits" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["v4", "v0", "train.py"], "v0 is an ancestor of v4: name the earlier commit first, v0 v4; it does"),
        (["side", "v4", "train.py"], "side is not an ancestor of v4: name a commit before it, such as the"),
        (["v0", "v0^{}", "train.py"], "v0 and v0^{} are the same commit"),
        (["v0", "v9", "train.py"], "v9 is neither a commit of the repository"),
        (["v0", "v4", "missing.py"], "there is no script missing.py"),
        (["v0", "v4", "digits"], "bisect runs a script in a git repository, and samestep.recipes.digits is not one"),
        (["v0", "v4", "../untracked"], "v0 does not have the script untracked: name a commit that has it"),
        (["--tolerance", "1", "v0", "v4", "train.py"], "--tolerance is a number from 0 on, and goes with --metric"),
        (["--steps", "0", "v0", "v4", "train.py"], "--steps and --nproc-per-node are counted from 1"),
        (["v0", "v4"], "bisect needs GOOD BAD and a script or a recipe"),
    ],
)
def test_what_cannot_be_searched(words: list[str], message: str, home: Path) -> None:
    assert message in bisect(home, *words, code=2)[1]


def test_a_script_of_no_repository(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = check(samestep_command("bisect", "a", "b", "train.py", cwd=tmp_path), 2)
    assert "is in no git repository that can be read: git says 'fatal: not a git repository" in done.stderr


def test_an_interrupted_search_leaves_nothing(home: Path) -> None:
    (home / "code/layers.py").write_text("import time\ntime.sleep(600)\n")
    git(home, "commit", "--quiet", "-am", "sleep")
    before, scratch = describe(home), home.parent / "scratch"
    killed = scratch / "samestep-bisect-x" / "tree"  # the directory of a search that was killed
    killed.parent.mkdir(parents=True)
    git(home, "worktree", "add", "--quiet", "--detach", str(killed))
    shutil.rmtree(killed.parent)
    command = [sys.executable, "-m", "samestep", "bisect", "v0", "HEAD", "train.py", "0.1"]
    env = clean_variables({"TMPDIR": str(scratch)})
    process = Popen(command, cwd=home / "code", env=env, stderr=subprocess.PIPE, text=True)
    # Not by a glob, which fails if a directory is removed meanwhile.
    wait_until(lambda: str([*os.walk(scratch)]).count(".out'") == 2, "the last commit runs")
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert describe(home) == before
    assert [*scratch.iterdir()] == []
