"""The output of a rank is in its log, however it ends, or on the terminal."""

import json
import os
import shutil
from pathlib import Path

import pytest
from processes import Command
from support.disks import open_disk

START = """
import ctypes, glob, os, shutil, subprocess, sys, torch, samestep
what, rank = sys.argv[1], int(os.environ["RANK"])
print("early", rank, flush=True)
run = samestep.Run(None if "without" in what else "run", batch_size=2, micro_batch_size=1, device="cpu")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.prepare(model=model, optimizer=optimizer)
for step in run.steps(torch.utils.data.TensorDataset(torch.ones(8, 1)), 3):
    for (x,) in step:
        step.backward(model(x).mean())
    optimizer.step()
    at_step(step.number)
"""

PRINTS = """
def at_step(number):
    print("python", number)
    print("error", number, file=sys.stderr)
    subprocess.run(["sh", "-c", f"echo child {number}; echo its error {number} >&2"])
    ctypes.CDLL(None).puts(f"C {number}".encode())
    ctypes.CDLL(None).fflush(None)
    os.write(1, b"no newline")
    if "kill" in what and number == 1 and run.rank == 1 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), 9)
    os.write(1, b"\\n")
"""

FLOODS = """
def at_step(number):
    for i in range(40):
        print("x" * 10_000, i)
    print("the end of", number, flush=True)
    if number == 2 and run.rank == 1:
        os._exit(3)
"""

TIDIES = """
def at_step(number):
    if number == 1 and run.rank == 1 and not os.path.exists("killed"):
        open("killed", "w").close()
        for path in glob.glob(os.environ["TMPDIR"] + "/samestep-*"):
            shutil.rmtree(path)
        os.kill(os.getpid(), 9)
"""


def said_at(number: int) -> list[str]:
    """Return the lines in the order in which any process printed them."""
    words = ["python {0}", "error {0}", "child {0}", "its error {0}", "C {0}", "no newline"]
    return [word.format(number) for word in words]


def write_script(command: Command, at_step: str) -> None:
    head, loop, tail = START.partition("for step")
    command.write("train.py", head + at_step + loop + tail)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a log without those of samestep."""
    return [line for line in path.read_text().splitlines() if not line.startswith("samestep:")]


def test_what_hidden_ranks_print_is_in_their_logs(command: Command) -> None:
    """In order, from the first line on, by whomever it was printed, to the last one before a SIGKILL; each start has
    its own, also one of another command.
    """
    write_script(command, PRINTS)
    first = command.run("launch", "--nproc-per-node", "2", "--max-restarts", "1", "train.py", "kill")
    assert first.returncode == 0, first.stderr
    assert "early 1" not in first.stdout, "rank 0 is shown alone"
    assert first.stdout.count("early 0") == 2
    assert "python 2\n" in first.stdout
    assert "error 2\n" in first.stderr
    second = command.run("launch", "--nproc-per-node", "2", "train.py", "go on")
    assert second.returncode == 0
    logs = command.directory / "run" / "logs"
    assert read_lines(logs / "0" / "1.log") == ["early 1", *said_at(0), *said_at(1)], "all output of the killed rank"
    assert read_lines(logs / "1" / "1.log") == ["early 1", *said_at(0), *said_at(1), *said_at(2)]
    assert read_lines(logs / "2" / "1.log") == ["early 1"], "nothing is left to do"
    rows = (command.directory / "run" / "restarts.jsonl").read_text().splitlines()
    assert [json.loads(row)["restart"] for row in rows] == [1, 2], "numbered alike"


def test_a_disk_that_is_full_ends_the_log_and_nothing_else(command: Command) -> None:
    write_script(command, FLOODS)
    (command.directory / "run").mkdir()
    with open_disk(command.directory / "run" / "logs") as disk:
        done = command.run("launch", "--nproc-per-node", "2", "train.py", "flood")
        assert shutil.disk_usage(disk).free == 0
        assert "the end of 2" in done.stdout, "the other rank is through"
        assert done.returncode == 3
        assert done.stderr.endswith("samestep: rank 1 ended with exit code 3; the others were stopped\n")


def test_a_tidied_directory_for_temporary_files(command: Command) -> None:
    """During a long run, old files in /tmp are removed. A rank is killed then."""
    write_script(command, TIDIES)
    done = command.run("launch", "--nproc-per-node", "2", "--max-restarts", "1", "train.py", "")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    command.assert_no_files_left()


@pytest.mark.parametrize("what", ["kill", "kill without a directory"])
def test_the_end_of_what_a_hidden_rank_printed_is_shown(command: Command, what: str) -> None:
    """From its log in the run's directory, if there is one."""
    write_script(command, PRINTS)
    done = command.run("launch", "--nproc-per-node", "2", "train.py", what)
    where = f" ({command.directory}/run/logs/0/1.log)" if what == "kill" else ""
    last = "\n".join(["early 1", *said_at(0), *said_at(1)])
    assert f"samestep: the end of rank 1's output{where}:\n{last}\n" in done.stderr
    assert done.stderr.endswith("samestep: rank 1 was killed by SIGKILL (out of memory?); the others were stopped\n")
    command.assert_no_files_left()


def test_a_closed_output(command: Command) -> None:
    """As after `| head`: the run continues."""
    write_script(command, FLOODS)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as end:
        launch = command.start("launch", "train.py", "flood", stdout=end)
    os.close(reader)
    assert command.finish(launch).returncode == 0
    assert json.loads((command.directory / "run" / "status.json").read_text())["status"] == "done"
