"""A run survives faults of its surroundings: its output, the directory for temporary files, odd names."""

import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import Command
from support.selection import one_in
from support.waiting import DEADLINE_S

from samestep.snapshot.store import Store

SCRIPT = """
import os, signal, sys, time, torch, samestep
what = sys.argv[1]
run = samestep.Run(os.environ.get("RUN", "run"), batch_size=2, micro_batch_size=1, device="cpu", snapshot_every=1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.prepare(model=model, optimizer=optimizer)
for step in run.steps(torch.utils.data.TensorDataset(torch.ones(8, 1)), 5):
    for (x,) in step:
        step.backward(model(x).mean())
    optimizer.step()
    for file in map(int, os.environ.get("FILES", "").split()):
        os.write(file, b"a warning of a library")
    if what == "wait" and run.rank == run.world_size - 1 and step.number == 1 and not os.path.exists("waits"):
        open("waits", "w").close()
        while not os.path.exists("go") and not run._services.stopping.signals.heard:
            time.sleep(0.005)
        if "KILL" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def find_steps(directory: Path) -> list[int]:
    """Return the steps of the snapshots, after a check that all are complete."""
    store = Store(directory)
    for snapshot in store.snapshots():
        store.read(snapshot)
    return [snapshot.step for snapshot in store.snapshots()]


@pytest.mark.parametrize("words", one_in(4, [["train.py"], ["-m", "samestep", "launch", "train.py"]]))
@pytest.mark.soak
def test_closed_standard_files(command: Command, words: list[str]) -> None:
    """Some daemons start programs so. Output of C code must not be written into the run's files."""
    command.write("train.py", SCRIPT)
    line = f"{' '.join([sys.executable, *words, 'once'])} <&- >&- 2>&-"
    variables = {**command.variables, "FILES": "1 2"}
    assert subprocess.run(["sh", "-c", line], cwd=command.directory, env=variables, check=False).returncode == 0
    files = [path for path in (command.directory / "run").rglob("*") if path.is_file() and path.suffix != ".log"]
    assert find_steps(command.directory / "run") == [3, 4, 5]
    assert not any(b"warning" in path.read_bytes() for path in files)


@pytest.mark.soak
def test_output_that_cannot_be_written(command: Command) -> None:
    """A full disk under the output is reported without a traceback."""
    command.write("train.py", SCRIPT)
    with open("/dev/full", "w") as full:
        done = command.finish(command.start("train.py", "once", program="", stdout=full))
        assert "Traceback" not in done.stderr
        assert find_steps(command.directory / "run") == [3, 4, 5]
        for words in (["--help"], ["inspect", "run"]):
            done = command.finish(command.start(*words, stdout=full))
            assert done.stderr == (
                "samestep: error: the output cannot be written (No space left on device): "
                "make room, or send it elsewhere [SS113]\n"
            )
            assert done.returncode == 2


@pytest.mark.soak
@pytest.mark.parametrize("program", one_in(4, ["samestep", ""]))
def test_names_that_the_output_lacks(command: Command, program: str) -> None:
    command.write("train.py", SCRIPT)
    name = os.fsdecode(b"r\xc3\xbcn \xff")  # not valid in any encoding
    command.variables |= {"PYTHONIOENCODING": "ascii", "RUN": name}
    done = command.run(*(["launch"] if program else []), "train.py", "once", program=program)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"r\xfcn \udcff" in done.stdout
    assert find_steps(command.directory / name) == [3, 4, 5]
    done = command.run("export", name, "model.safetensors")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_tidied_directory_for_temporary_files(command: Command, how: str) -> None:
    """During a long run, old files in /tmp are removed."""
    command.write("train.py", SCRIPT)
    command.variables |= {"KILL": "1"} if how == "killed" else {}
    launch = command.start("launch", "--nproc-per-node", "2", "--max-restarts", "1", "train.py", "wait")
    command.wait_for("waits")
    for path in Path(command.variables["TMPDIR"]).glob("samestep-*"):
        shutil.rmtree(path)
    if how == "stopped":
        launch.send_signal(signal.SIGTERM)
    else:
        (command.directory / "go").touch()
    done = command.finish(launch)
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if how == "killed" else 75), done.stderr
    assert find_steps(command.directory / "run")[-1] == (5 if how == "killed" else 3)
    command.assert_no_files_left()


@pytest.mark.soak
def test_a_closed_terminal(command: Command) -> None:
    """As after a lost ssh connection, for a run that ignores SIGHUP."""
    command.write("train.py", SCRIPT)
    ours, theirs = pty.openpty()
    line = f"trap '' HUP; exec {sys.executable} train.py wait"
    run = subprocess.Popen(
        ["sh", "-c", line], cwd=command.directory, env={**command.variables, "TERM": "xterm"},
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    command.wait_for("waits")
    os.close(ours)
    (command.directory / "go").touch()
    assert run.wait(DEADLINE_S) == 0
    assert find_steps(command.directory / "run") == [3, 4, 5]


def test_an_unreadable_script(command: Command) -> None:
    """As another user, if this one is root."""
    command.write("train.py", SCRIPT).chmod(0)
    if os.access(command.directory / "train.py", os.R_OK):
        pytest.skip("root may read everything")
    done = command.run("launch", "train.py")
    assert done.stderr.startswith("samestep: error: train.py cannot be read (Permission denied): ")
    assert done.returncode == 2


def test_a_removed_working_directory(command: Command) -> None:
    line = f"mkdir gone; cd gone; rmdir ../gone; exec {sys.executable} -m samestep doctor"
    done = subprocess.run(
        ["sh", "-c", line], cwd=command.directory, env=command.variables, capture_output=True, text=True, check=False
    )
    assert done.stderr == "samestep: error: the working directory has been removed: change to one that exists [SS112]\n"
    assert done.returncode == 2
