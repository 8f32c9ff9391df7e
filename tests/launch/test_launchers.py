"""One script, unchanged, under each launcher in the table of docs/running.md: the same run, or a refusal."""

import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.ports import reserve_port
from support.runs import digest, run_command

TESTS = Path(__file__).parents[1]
SCRIPT = str(TESTS / "scripts" / "launched.py")
PYTHON = sys.executable
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

ALONE = ["rank 0 of 1, local 0"]
PAIR = ["rank 0 of 2, local 0", "rank 1 of 2, local 1"]

TEST = "from launched import train\n\ndef test_training():\n    train()\n"
POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from launched import train
if __name__ == "__main__":
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        [*pool.map(train, ["run", "another"])]
"""
DASK = """
from dask.distributed import Client
from launched import train
if __name__ == "__main__":
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        client.gather(client.map(train, ["run", "another"]))
"""
# Name in the table -> the command, which runs `launched.py` or the text of a script of its own; what the ranks print;
# and the program or package that it needs.
CASES = {
    "`python`": ([PYTHON, SCRIPT], ALONE, ""),
    "`torchrun`": ([*TORCHRUN, "--standalone", "--nproc-per-node=2", SCRIPT], PAIR, ""),
    "`torchrun --nnodes 1:2`": (
        [*TORCHRUN, "--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
         "--rdzv-conf=last_call_timeout=1", SCRIPT],
        PAIR, "",
    ),
    "`mpirun` of Open MPI": (["mpirun.openmpi", "--oversubscribe", "-np", "2", PYTHON, SCRIPT], PAIR, "mpirun.openmpi"),
    "`mpirun` of MPICH": (["mpirun.mpich", "-np", "2", PYTHON, SCRIPT], PAIR, "mpirun.mpich"),
    "`accelerate launch`": (
        [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", SCRIPT],
        PAIR, "accelerate",
    ),
    "`deepspeed`": (
        [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2", "--no_local_rank", SCRIPT],
        PAIR, "deepspeed",
    ),
    "Dask": ([sys.executable, "own.py", DASK], ALONE * 2, "distributed"),
    "`concurrent.futures`": ([PYTHON, "own.py", POOL], ALONE * 2, ""),
    "`pytest`": ([PYTHON, "-m", "pytest", "-s", "own.py", TEST], ALONE, ""),
    "`uv run`": (["uv", "run", "--no-project", "--active", "python", SCRIPT], ALONE, "uv"),
}  # fmt: skip
# Rows that other tests run.
ELSEWHERE = {"`srun`", "Jupyter", "`init_process_group`"}


def launch(command: list[str], cwd: Path, **extra: str) -> str:
    """Run a command of the table. Returns its output."""
    (cwd / "own.py").write_text(command[-1])
    words = command[: -1 if "own.py" in command else None]
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    paths = f"{TESTS}:{TESTS / 'scripts'}"
    variables = {"PATH": programs, "PYTHONPATH": paths, "VIRTUAL_ENV": sys.prefix, "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    variables["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    done = run_command(*words, cwd=cwd, env=variables | extra)
    return done.stdout + done.stderr


def assert_trained(said: str, places: list[str], cwd: Path, plain: str) -> None:
    """The ranks printed these places, and each run ended in the bits of the plain one."""
    assert sorted(re.findall(r"rank \d of \d, local \d", said)) == places, said
    runs = [path.parent for path in cwd.glob("*/run.json")]
    assert len(runs) == (places.count(ALONE[0]) or 1)
    assert {digest(run) for run in runs} == {plain}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the run under `python`."""
    directory = tmp_path_factory.mktemp("plain")
    launch([PYTHON, SCRIPT], directory)
    return digest(directory / "run")


# Each launcher and each of its ranks is a new interpreter that imports torch: 17 s, and 24 s on a busy machine.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.packages) if "mpirun" in name else name for name in CASES]
)
def test_a_launcher(name: str, plain: str, tmp_path: Path) -> None:
    command, places, needed = CASES[name]
    if needed and not (shutil.which(needed) or (needed.isidentifier() and find_spec(needed))):
        pytest.skip(f"needs {needed}")
    assert_trained(launch(command, tmp_path), places, tmp_path, plain)


def launch_group(how: str, cwd: Path) -> str:
    """Run the script with a process group of its own."""
    with reserve_port() as port:
        return launch([PYTHON, SCRIPT, how], cwd, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


@pytest.mark.parametrize("how", ["env", "file", "gpu"])
def test_a_process_group_of_the_script(how: str, plain: str, tmp_path: Path) -> None:
    """It is used, however its ranks met, and if it serves tensors on GPUs only."""
    assert_trained(launch_group(how, tmp_path), PAIR, tmp_path, plain)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("late", "a process group of 2 ranks was created after samestep.Run, which has 1: create"),
        ("other", "and WORLD_SIZE 2: create the process group with the launcher's ranks, or unset both"),
    ],
)  # fmt: skip
def test_a_process_group_that_cannot_be_used(how: str, sentence: str, tmp_path: Path) -> None:
    assert sentence in launch_group(how, tmp_path)
    assert not (tmp_path / "run" / "run.json").exists()


def test_the_table_names_what_is_tested() -> None:
    page = (TESTS.parent / "docs" / "running.md").read_text()
    rows = re.findall(
        r"^\| ([^|]+?) +\|", page.partition("\n## Other launchers\n")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert {name for row in rows[1:] for name in row.split(", ")} == {*CASES} | ELSEWHERE
