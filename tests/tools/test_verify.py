"""`samestep verify` from the command line: correct scripts, the files that it leaves, and input that it refuses."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from support.runs import check, read_facts, samestep_command
from tools.planted import plant


def write(directory: Path, **faults: str) -> Path:
    script = directory / "planted.py"
    script.write_text(plant(**faults))
    return script


# Eight runs on up to 5 ranks: 6 s, and 25 s on a busy machine.
def test_a_sound_script_is_the_same_everywhere_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        in_epoch="run.state['epochs'] = run.state.get('epochs', 0) + 1",
        at_end="run.restore('best')",  # which runs of a few steps have not saved
    )
    done = check(
        samestep_command(
            "verify", "--steps", "8", "--world-sizes", "1,3,5", "--kills", "2", "--kill-seed", "1",
            script.name, cwd=tmp_path, timeout=170,
        )
    )  # fmt: skip
    rows = [re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines()]
    assert [row[:2] for row in rows if row[-1].endswith(" s")] == [
        ["train", "1 rank"], ["again", "1 rank"], ["train", "3 ranks"],
        *[row[:2] for row in rows if row[0].startswith("killed") or row[0] == "resumed"],
    ]  # fmt: skip
    interrupted = [row for row in rows if row[0].startswith("killed") or row[0] == "resumed"]
    assert [row[0].split(" rank ")[0] for row in interrupted] == ["killed in a save", "killed", "resumed"]
    assert all(row[3] == "same" for row in interrupted), done.stdout
    sizes = [row[1] for row in interrupted]
    assert all(one != other for one, other in pairwise(sizes))
    assert not interrupted[-1][2].startswith("0-"), "it was resumed from a snapshot"
    assert "skipped: 5 ranks, because the number of micro-batches of a step is 4" in done.stdout
    assert done.stdout.endswith("everything is the same\n")
    assert [path.name for path in tmp_path.iterdir()] == ["planted.py"], "the script's own run directory is unchanged"


def test_runs_that_are_not_the_same_end_with_1(tmp_path: Path) -> None:
    script = write(tmp_path, in_step="optimizer.param_groups[0]['lr'] = 0.01 * (1 + run.rank)")
    done = check(samestep_command("verify", "--steps", "3", "--world-sizes", "1,3", script.name, cwd=tmp_path), 1)
    assert "on 3 ranks it ends with exit code 2" in done.stdout
    assert "do not have the same model after step 2" in done.stdout
    assert "likely: a rank changes the model by its own values (its rank, its micro-batches)" in done.stdout
    assert done.stdout.endswith("it is NOT the same\n")


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
    ("script", "words"),
    [
        ("print('hello')", "planted.py ended without a step of samestep.Run (on 1 rank): verify needs a script that"),
        ("raise ValueError('no data here')", "ends with exit code 1 on 1 rank, before anything can be compared"),
    ],
)
def test_a_script_that_does_not_train(tmp_path: Path, script: str, words: str) -> None:
    (tmp_path / "planted.py").write_text(script)
    done = check(samestep_command("verify", "planted.py", cwd=tmp_path), 2)
    assert words in done.stderr
    assert ("ValueError: no data here" in done.stderr) == ("ValueError" in script), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["planted.py"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "verify needs a script or a recipe"),
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--world-sizes", "1,two", "mlp"], "--world-sizes takes numbers of ranks such as 1,2,4, not '1,two'"),
        (["--world-sizes", "0", "mlp"], "--world-sizes takes numbers of ranks"),
        (["--steps", "0", "mlp"], "--steps"),
        (["--step", "3", "mlp"], "samestep verify: No such option"),
        (["--run-dir", "x", "mlp"], "samestep verify: No such option"),
    ],
)
def test_what_it_refuses(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = check(samestep_command("verify", *arguments, cwd=tmp_path), 2)
    assert words in done.stderr
    assert not list(tmp_path.iterdir())
