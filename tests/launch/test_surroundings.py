"""A run survives faults of its surroundings: its output, the directory for temporary files, odd names."""

import shutil
from pathlib import Path

import pytest
from processes import Command
from support.snapshots import read_snapshot

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
    if what == "wait" and run.rank == run.world_size - 1 and step.number == 1 and not os.path.exists("waits"):
        open("waits", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def find_steps(directory: Path) -> list[int]:
    """Return the steps of the snapshots, after a check that all are complete."""
    store = Store(directory)
    for snapshot in store.snapshots():
        read_snapshot(store, snapshot)
    return [snapshot.step for snapshot in store.snapshots()]


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


def test_a_tidied_directory_for_temporary_files(command: Command) -> None:
    """During a long run, old files in /tmp are removed. A rank is killed then."""
    command.write("train.py", SCRIPT)
    launch = command.start("launch", "--nproc-per-node", "2", "--max-restarts", "1", "train.py", "wait")
    command.wait_for("waits")
    for path in Path(command.variables["TMPDIR"]).glob("samestep-*"):
        shutil.rmtree(path)
    (command.directory / "go").touch()
    done = command.finish(launch)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert find_steps(command.directory / "run")[-1] == 5
    command.assert_no_files_left()
