"""Complete scripts give one result, unchanged under every launcher and at any number of ranks."""

import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.runs import check, digest, run_command
from support.selection import one_in

from samestep.snapshot.store import Store

SCRIPTS = Path(__file__).parents[1] / "scripts"
PYTHON = (sys.executable,)
LAUNCH = (sys.executable, "-m", "samestep", "launch")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
STARTS = {
    "python": PYTHON,
    "launch on 1": (*LAUNCH, "--nproc-per-node", "1"),
    "launch on 3": (*LAUNCH, "--nproc-per-node", "3"),
    "torchrun on 1": (*TORCHRUN, "1"),
    "torchrun on 3": (*TORCHRUN, "3"),
    "torchrun on 3, random hashes": (*TORCHRUN, "3"),
}
ARGUMENTS = {"trainer": ("4", "2", "--batch_size=20"), "gan": ()}


@dataclass(frozen=True)
class Result:
    """The output of a script, and the results of its run that must be the same."""

    printed: str
    digest: str
    metrics: bytes
    ledger: bytes


class Scripts:
    """Starts each script once in each way, in its own directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @functools.cache  # noqa: B019
    def start(self, name: str, start: str) -> Result:
        cwd = self.root / f"{name} by {start}"
        cwd.mkdir()
        env = {"PYTHONHASHSEED": "random" if "random" in start else "0"} if start.startswith("torchrun") else {}
        done = check(run_command(*STARTS[start], SCRIPTS / f"{name}.py", *ARGUMENTS[name], cwd=cwd, env=env))
        return read_result(cwd / "runs" / name, done.stdout + done.stderr)


def read_result(run_dir: Path, printed: str) -> Result:
    metrics, ledger = ((run_dir / name).read_bytes() for name in ("metrics.jsonl", "ledger.bin"))
    return Result(printed, digest(run_dir), metrics, ledger)


def assert_same(found: Result, wanted: Result) -> None:
    assert (found.digest, found.ledger) == (wanted.digest, wanted.ledger)
    assert found.metrics == wanted.metrics


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    return Scripts(tmp_path_factory.mktemp("scripts"))


@pytest.mark.parametrize(("name", "start"), one_in(3, [
    *((name, start) for name in ARGUMENTS for start in ("launch on 1", "launch on 3")),
    *(("trainer", start) for start in ("torchrun on 3, random hashes", "torchrun on 1")),
]))  # fmt: skip
def test_every_launcher(scripts: Scripts, name: str, start: str) -> None:
    assert_same(scripts.start(name, start), scripts.start(name, "python"))


def test_the_trainer_prints_as_in_the_tutorials(scripts: Scripts) -> None:
    line = "[rank {}] Epoch 3 | Batchsize: 20 | Steps: 5"
    assert line.format(0) in scripts.start("trainer", "python").printed
    from_all = scripts.start("trainer", "torchrun on 3").printed
    assert all(line.format(rank) in from_all for rank in range(3))


@pytest.mark.soak
def test_ranks_that_hash_strings_differently_are_named_once(scripts: Scripts) -> None:
    from_all = scripts.start("trainer", "torchrun on 3, random hashes").printed
    said = "samestep: ranks hash strings differently"
    assert from_all.count(said) == from_all.count("export PYTHONHASHSEED=0") == 1


@pytest.mark.parametrize("start", one_in(6, ["python", "launch on 3", "torchrun on 3"]))
def test_the_mistake_is_named_where_it_is_made(tmp_path: Path, start: str) -> None:
    done = run_command(*STARTS[start], SCRIPTS / "dedent.py", cwd=tmp_path)
    assert done.returncode == (1 if "torchrun" in start else 2), done.stderr
    sentences = re.findall(r"^samestep: error: (.*)$", done.stderr, re.MULTILINE)
    assert len(sentences) == 1, done.stderr
    assert "optimizer.step() inside the micro-batch loop of step 0" in sentences[0]
    assert "dedent it" in sentences[0]
    if start != "torchrun on 3":
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs" / "dedent" / "snapshots").is_dir() or not Store(tmp_path / "runs/dedent").snapshots()


def test_a_notebook_trains_here_and_on_ranks(tmp_path: Path) -> None:
    done = check(run_command(sys.executable, SCRIPTS / "notebook.py", "1", "3", cwd=tmp_path))
    digests = re.findall(r"^(here|spawned) (\w{64})$", done.stdout, re.MULTILINE)
    assert [where for where, _ in digests] == ["here", "spawned", "spawned"]
    assert len({found for _, found in digests}) == 1
    assert list(tmp_path.iterdir()) == []
