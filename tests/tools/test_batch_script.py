"""The batch scripts that `samestep slurm` prints."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.runs import ask, refuse


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates train.py in the current directory."""
    path = tmp_path / "train.py"
    path.write_text("print('trained')\n")
    monkeypatch.chdir(tmp_path)
    return path


def read_directives(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: shlex.split(value)[0] if value else "" for name, _, value in (line.partition("=") for line in lines)}


def read_srun(text: str) -> list[str]:
    start = text.index("srun ")
    return shlex.split(text[start : text.index("\nrc=")].replace("\\\n", ""))


def test_batch_script(script: Path, tmp_path: Path) -> None:
    text = ask(
        "slurm", "--nodes", "4", "--gpus-per-node=8", "--time", "2:00:00", "--partition", "gpu", "--run-dir", "runs/x",
        "--sbatch=--mem=64G", "--sbatch", "--constraint=a100", "--max-steps", "9", "--deterministic",
        "train.py", "--lr", "0.1", "a b",
    )  # fmt: skip
    assert read_directives(text) == {
        "job-name": "train", "nodes": "4", "ntasks-per-node": "1", "cpus-per-task": "32", "gpus-per-node": "8",
        "time": "2:00:00", "partition": "gpu", "signal": "USR1@120", "open-mode": "append", "chdir": str(tmp_path),
        "output": "runs/x/slurm/%j.out", "requeue": "", "mem": "64G", "constraint": "a100",
    }  # fmt: skip
    words = read_srun(text)
    node = words[words.index("node") :]
    assert node == [
        "node", "--nproc-per-node", "8", "--run-dir", "runs/x",
        "--max-steps", "9", "--deterministic", "train.py", "--lr", "0.1", "a b",
    ]  # fmt: skip
    assert text.endswith("fi\nexit $rc\n")
    assert (tmp_path / "runs/x/slurm").is_dir(), "Slurm does not create it for the output"


TARGETS = [(["-m", "my.train"], "my.train"), (["mlp", "--total-epochs", "2"], "mlp")]


@pytest.mark.parametrize(("target", "name"), TARGETS)
def test_one_node(script: Path, target: list[str], name: str) -> None:
    """One node needs no rendezvous, and the script names the run's directory. All words after a recipe are its own."""
    url = ["--run-dir", "s3://bucket/run"]
    text = ask("slurm", "--nproc-per-node", "3", "--grace-s", "60", *url, *target)
    words = read_srun(text)
    assert words[words.index("launch") :] == ["launch", "--nproc-per-node", "3", *url, *target]
    assert "MASTER_ADDR" not in text
    directives = read_directives(text)
    assert directives["output"] == "slurm/%j.out", "a URL is no local directory"
    assert (directives["signal"], directives["job-name"]) == ("USR1@60", name)


@pytest.mark.parametrize(
    ("code", "starts", "is_queued"), [(75, 99, True), (138, 9, True), (138, 10, False), (1, 0, False)]
)
def test_which_exits_are_requeued(script: Path, code: int, starts: int, is_queued: bool) -> None:
    """Exit code 138: the signal came before there were ranks. The number of restarts is limited."""
    text = ask("slurm", "train.py")
    stubs = f"srun() {{ return {code}; }}; scontrol() {{ echo $*; }}; SLURM_JOB_ID=7; SLURM_RESTART_COUNT={starts}\n"
    done = subprocess.run(["bash", "-c", stubs + text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "requeue 7\n" if is_queued else "")


def test_each_start_has_a_new_secret(script: Path) -> None:
    """It is in no command, and not in the saved batch script."""
    text = ask("slurm", "--nodes", "2", "train.py")
    [line] = [line for line in text.splitlines() if "SAMESTEP_RDZV_SECRET" in line]
    made = [subprocess.run(["bash", "-c", f"{line}; env"], capture_output=True, text=True).stdout for _ in range(2)]
    assert len({re.search(r"SAMESTEP_RDZV_SECRET=([0-9a-f]{64})\n", each)[1] for each in made}) == 2
    assert "SAMESTEP_RDZV_SECRET" not in ask("slurm", "train.py")


@pytest.mark.parametrize("name", ["a\nscancel 1\n.py", "a\n#SBATCH --wrap=x\n.py", "a\rb.py", "a\x1bb.py"])
def test_names_with_control_characters(script: Path, name: str) -> None:
    script.with_name(name).write_text("")
    assert "without control characters" in refuse("slurm", name)
    assert "without control characters" in refuse("slurm", "--run-dir", f"runs/{name}", "train.py")
    script.with_name(f"in {name}").mkdir()
    os.chdir(script.with_name(f"in {name}"))
    assert "without control characters" in refuse("slurm", str(script))


@pytest.mark.parametrize("name", ['a" --wrap="x.py', 'a\\" --wrap="x.py', "a'; x; '.py", "$(x) `x` ${x}.py"])
def test_names_with_signs(script: Path, name: str) -> None:
    """Slurm reads them, and they reach the script. The exit code is that of the launchers."""
    script.with_name(name).write_text("")
    text = ask("slurm", "--run-dir", f"runs/{name}", name, name, "", "'")
    directives = read_directives(text)
    assert (directives["job-name"], directives["output"]) == (Path(name).stem, f"runs/{name}/slurm/%j.out")
    stubs = 'srun() { printf "%s\\n" "$@" >&2; return 3; }\n'
    done = subprocess.run(["bash", "-c", stubs + text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-4:]) == (3, [name, name, "", "'"])


def test_slurm_writes_no_output_through_a_link(script: Path) -> None:
    """The number of a job can be guessed, and Slurm follows links."""
    for link in (Path("runs/x/slurm/7.out"), Path("runs/y/slurm")):
        link.parent.mkdir(parents=True)
        link.symlink_to("outside")
        said = refuse("slurm", "--run-dir", str(Path(*link.parts[:2])), "train.py")
        assert f"{link} is a link, and Slurm would write the output of the job through it: remove it" in said
