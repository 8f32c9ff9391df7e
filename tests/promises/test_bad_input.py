"""Bad input to the commands: one sentence, exit code 2, and nothing written or overwritten."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from promises.trial import Started, Trial, read_tree
from promises.wrong import MISTAKES, learn_well
from support.disks import fill
from support.ports import reserve_port
from support.runs import ask, check, samestep_command
from support.tiny import Tiny, tiny_run, update

import samestep
from samestep.watch.records import read_status

SCRIPT = Path(__file__).with_name("wrong.py")
ON_LO = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
Done = subprocess.CompletedProcess[str]


def assert_refused(done: Done, *expected: str) -> None:
    """Exit code 2, and one sentence that matches all of `expected`, and nothing else, on stderr."""
    check(done, 2)
    said = re.fullmatch(r"samestep: error: ([^\n]+) \[SS\d{3}\]\n", done.stderr)
    assert said, done.stderr
    assert "Traceback" not in done.stdout
    assert "error" not in done.stdout.lower(), done.stdout
    for words in expected:
        assert re.search(words, said[1]), done.stderr


def launch(name: str, run_dir: Path, num_ranks: int, *flags: str) -> Done:
    command = ["launch", "--nproc-per-node", str(num_ranks), *flags, SCRIPT, run_dir, name]
    return samestep_command(*command, cwd=run_dir.parent, env=ON_LO)


# --- directories of other runs ----------------------------------------------------------------------------------------


def test_another_run(tmp_path: Path) -> None:
    """The error names the numbers that differ. --fresh starts in a new directory beside it."""
    run_dir = tmp_path / "x"
    samestep.spawn(learn_well, 1, (run_dir,))
    before = read_tree(run_dir)
    assert_refused(
        launch("nothing", run_dir, 2, "--batch-size", "4", "--seed", "3"),
        f"{run_dir} holds another run",
        "seed 0 there, 3 here",
        "batch_size 8 there, 4 here",
        "or start beside it with SAMESTEP_FRESH=1 in the environment",
    )
    assert read_tree(run_dir) == before
    times = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    assert str(tmp_path / "x-2") in check(launch("nothing", run_dir, 2, "--batch-size", "4", "--fresh")).stdout
    assert read_tree(run_dir) == before
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == times
    assert json.loads((tmp_path / "x-2" / "run.json").read_text())["numbers"]["batch_size"] == 4
    assert {path.name for path in tmp_path.iterdir()} == {"x", "x-2"}


# --- in the loop ------------------------------------------------------------------------------------------------------


def test_once_without_a_launcher(tmp_path: Path) -> None:
    """Each rank is a program, as mpirun and srun start them, and no launcher filters the output. One rank prints the
    error. The other ranks print at most that they have lost a rank.
    """
    name = "a data set that fails"
    with reserve_port() as port:
        places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONHASHSEED": "0"}
        ranks = [
            Started([sys.executable, SCRIPT, "x", name], tmp_path / rank, {**ON_LO, **places, "RANK": rank})
            for rank in ("0", "1")
        ]
        codes = [rank.finish() for rank in ranks]
    printed = [rank.err.read_text() for rank in ranks]
    words = "".join(printed)
    assert words.count("samestep: error: ") == 1, words
    assert "Traceback" not in words
    assert re.search(MISTAKES[name].sentence, words), words
    for rank, (code, said) in enumerate(zip(codes, printed, strict=True)):
        assert code in (1, 2)
        lost = rf"samestep: rank {rank} has lost another rank \(.*\)\n"
        assert re.fullmatch(lost if code == 1 else r"(samestep: error: [^\n]+\n)?", said), said


# --- disks ------------------------------------------------------------------------------------------------------------


def test_full_disk_without_snapshots(disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Lost rows and records are reported when they are lost, and by `samestep inspect`. (The simulated runs fill a disk
    for a while.)"""
    run_dir, filler = disk / "x", disk / "filler"

    def then(t: Tiny) -> None:
        update(t)
        if t.step.number == 0 and t.run.rank == 0:
            fill(filler)

    def train() -> None:
        from samestep.snapshot import logs, run_directory

        run_directory.METRICS_FLUSH_S = logs.LEDGER_FLUSH_S = 0.0
        tiny_run(run_dir, snapshot_every=None, log_every=2, then=then)

    samestep.spawn(train, 2)
    printed = capfd.readouterr().out
    for name in ("metrics.jsonl", "ledger.bin"):
        said = f"{run_dir / name} cannot be written (No space left on device): its new entries are kept in memory"
        assert printed.count(said) == 1
    status = read_status(run_dir)
    assert (status["status"], status["steps"]) == ("done", 8)
    done = samestep_command("inspect", run_dir, "--samples", cwd=disk)
    lost = f"{run_dir} could not be written (No space left on device): the end of metrics.jsonl or ledger.bin is lost"
    assert printed.count("could not be written") == printed.count(f"samestep: {lost}\n") == 1
    check(done, 1)
    assert done.stdout == f"audit failed:\n  steps 0 to 7: the ledger has no record of them, {lost}\n"
    assert f"when the run ended, {lost}" in ask("inspect", run_dir)
    filler.unlink()
    samestep.spawn(learn_well, 1, (run_dir,))
    assert "audit passed" in ask("inspect", run_dir, "--samples")
    assert "could not be written" not in ask("inspect", run_dir)


def test_the_directory_is_removed_during_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """There is a message, and the same command begins a new run."""

    def then(t: Tiny) -> None:
        update(t)
        if t.step.number == 3:
            t.run._services.snapshotter.wait_until_written()
            shutil.rmtree(tmp_path / "x")

    with pytest.raises(samestep.Error, match="the snapshot of step 8 could not be written"):
        samestep.spawn(tiny_run, 1, (tmp_path / "x",), {"snapshot_every": 2, "then": then})
    assert "was removed during the run" in capfd.readouterr().out
    assert samestep.spawn(learn_well, 1, (tmp_path / "x",)) == 8


# --- one writer -------------------------------------------------------------------------------------------------------


def test_second_process(trial: Trial, tmp_path: Path) -> None:
    """It is refused while the first process lives, however it is started."""
    held = trial.start("python", 1, "hold rank 0 at step 3 in forward", num_workers=1, epochs=1, settled=True)
    trial.wait_held()
    before = read_tree(trial.dir)
    pid, host = held.pid, socket.gethostname()
    alive = rf"the run in {trial.dir} is locked by process {pid} on {host} since .*: stop it, or start beside "
    assert_refused(launch("nothing", trial.dir, 2), alive)
    assert read_tree(trial.dir) == before
    [worker] = psutil.Process(pid).children()
    lock = str(trial.dir / "lock")
    assert lock in open_files(pid)
    assert lock not in open_files(worker.pid), "a worker that outlives its rank would keep the lock"
    held.kill()
    held.wait()
    for num_ranks in (2, 1):  # The lock is free at once, and after the run has ended.
        trial.spawn(num_ranks, epochs=1)
    check(samestep_command("inspect", trial.dir, "--samples", cwd=tmp_path))
    held.finish()  # for its worker


def open_files(pid: int) -> set[str]:
    """By /proc: psutil leaves out what was removed, and what is no regular file."""
    return {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if os.path.lexists(entry.path)}
