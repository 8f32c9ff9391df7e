"""`samestep launch` with real ranks: what scripts see, how failures and signals end, and that no process remains."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import psutil
import pytest
from support.commands import Popen
from support.disks import open_disk
from support.runs import check, clean_variables
from support.waiting import DEADLINE_S, wait_until

from samestep.launch import forkserver


class Command:
    """Starts `samestep` in a directory, and finds all its processes. `temporary`: its directory for temporary files."""

    def __init__(self, directory: Path, temporary: str) -> None:
        self.directory = directory
        self.variables = clean_variables({"TMPDIR": temporary})
        self.started: list[Popen] = []

    def write(self, name: str, text: str) -> None:
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def start(
        self,
        *arguments: str,
        program: str = "samestep",
        stdout: int | IO[str] = subprocess.PIPE,
        real: bool = False,
    ) -> Popen:
        """Start it in its own process group, as a shell does. `real`: in a new interpreter."""
        process = Popen(
            [sys.executable, *(["-m", program] if program else []), *arguments],
            real=real,
            cwd=self.directory,
            env=self.variables,
            stdout=stdout,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            process_group=0,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, program: str = "samestep") -> subprocess.CompletedProcess[str]:
        return self.finish(self.start(*arguments, program=program))

    def finish(self, process: Popen) -> subprocess.CompletedProcess[str]:
        out, err = process.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def processes(self) -> list[psutil.Process]:
        """Return the live processes of this command, including children of the ranks."""
        return [process for started in self.started for process in started.processes()]

    def wait_for(self, *names: str) -> None:
        """Wait until the ranks have created these files."""
        wait_until(lambda: all((self.directory / name).exists() for name in names), f"files {names}")

    def assert_nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), "no process left")

    def assert_no_files_left(self) -> None:
        assert list(Path(self.variables["TMPDIR"]).glob("samestep-*")) == []


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """A command in an empty directory. Kills its processes at the end."""
    # Not in pytest's directory: data loaders open sockets here, and the path of a socket is limited to 107 bytes.
    with TemporaryDirectory(prefix="t-", dir="/tmp") as temporary:
        command = Command(tmp_path, temporary)
        yield command
        for process in command.started:
            with process:  # waits for its end, and closes its streams
                process.kill()
        command.assert_nothing_left()


# Rank 1 executes the argument while the others wait for it in a collective.
FAIL = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
print("hello from", rank)
dist.barrier()  # all have printed
def fall():
    if what == "raise": raise ValueError("oh no")
    if what == "text": sys.exit("that is all")
what = sys.argv[1]
if rank == 1:
    fall()
dist.barrier()
"""

# Completes its step, saves and exits after a signal, like a run.
STOPPABLE = """
import os, signal, sys, torch, torch.distributed as dist
told = []
def hear(signum, frame):
    told.append(signum)
    open(f"told{dist.get_rank()}", "w").close()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, hear)
dist.init_process_group("gloo")
rank = dist.get_rank()
open(f"ready{rank}", "w").close()
stop = torch.zeros(1)
while not stop:
    stop[0] = bool(told)
    dist.all_reduce(stop, dist.ReduceOp.MIN)  # not before each rank has its own signal
with open(f"saved{rank}", "w") as file:
    file.write(" ".join(map(str, told)))
"""

PLAIN = """
import os, subprocess, sys, time, torch.distributed as dist
dist.init_process_group("gloo")
subprocess.Popen(["sleep", "600"])
if "fork" in sys.argv and os.fork() == 0:
    time.sleep(600)
open(f"ready{dist.get_rank()}", "w").close()
if dist.get_rank() == 0:
    time.sleep(600)
dist.barrier()
"""

SEEN = """
import atexit, json, os, pickle, sys
class Mine: pass
seen = {
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__, "package": __package__,
    "spec": __spec__ and __spec__.name, "main": sys.modules["__main__"].__dict__ is globals(),
    "pickles": isinstance(pickle.loads(pickle.dumps(Mine())), Mine), "cwd": os.getcwd(), "doc": __doc__,
}
atexit.register(lambda: print(json.dumps(seen)))
"""


@pytest.mark.parametrize("words", [["package/seen.py"], ["-m", "package.seen"], ["-m", "package"]])
def test_a_script_sees_what_it_sees_under_python(command: Command, words: list[str]) -> None:
    for file in ("seen", "__main__", "__init__"):
        command.write(f"package/{file}.py", SEEN if file != "__init__" else "")
    arguments = [*words, "-x", "a b", "--seed=1"]
    python = command.run(*arguments, program="")
    launched = command.run("launch", "--nproc-per-node", "1", *arguments)
    assert launched.stderr == ""
    assert json.loads(launched.stdout) == json.loads(python.stdout)


@pytest.mark.parametrize(
    ("what", "last"),
    [
        ("raise", "ValueError: oh no"),
        ("text", "samestep: rank 1 exited with code 1; the others were stopped"),
    ],
)
def test_the_failing_rank_is_reported_last(command: Command, what: str, last: str) -> None:
    command.write("fail.py", FAIL)
    done = check(command.run("launch", "--nproc-per-node", "3", "fail.py", what), 1)
    assert done.stdout == "hello from 0\n"
    lines = done.stderr.splitlines()
    assert lines[-1] == last
    if what == "raise":
        assert lines[:2] == [
            "samestep: rank 1 of 3 failed; the others were stopped",
            "Traceback (most recent call last):",
        ]
        assert re.fullmatch(r'  File ".*/fail.py", line \d+, in <module>', lines[2])
    else:
        assert "hello from 1" in lines
    assert ("that is all" in lines) == (what == "text")


def test_a_restart_continues_in_a_directory_whose_name_the_script_computes(command: Command) -> None:
    command.write(
        "stamped.py",
        "import os, time, torch, samestep\n"
        "settings = dict(micro_batch_size=1, device='cpu', snapshot_every=1)\n"
        "run = samestep.Run(f'runs/{time.time_ns()}', batch_size=2, **settings)\n"
        "model = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "run.prepare(model=model, optimizer=optimizer)\n"
        "run.print('begins at', run.steps_done)\n"
        "for step in run.steps(torch.ones(4, 1), 4):\n"
        "    run._services.snapshotter.wait_until_written()\n"
        "    if step.number == 2 and run.rank == 1 and not os.path.exists('once'):\n"
        "        open('once', 'w').close()\n"
        "        os._exit(3)\n"
        "    for x in step:\n"
        "        step.backward(model(x).mean())\n"
        "    optimizer.step()\n",
    )
    done = check(command.run("launch", "--nproc-per-node", "2", "--max-restarts", "1", "stamped.py"))
    (run_dir,) = (command.directory / "runs").iterdir()
    assert "begins at 2\n" in done.stdout
    assert f"this restart continues the run in runs/{run_dir.name}, and not in runs/" in done.stderr


def test_one_rank_fails_as_under_python(command: Command) -> None:
    command.write("broken.py", "def f(:\n")
    python, launched = command.run("broken.py", program=""), command.run("launch", "broken.py")
    assert (launched.returncode, launched.stderr) == (1, python.stderr)


def test_a_rank_that_fails_and_does_not_end_is_named(command: Command) -> None:
    """Another rank loses it, and ends first. The launcher ends the first one, whose error is the cause."""
    command.write(
        "slow.py",
        "import atexit, os, signal, time\nfrom samestep import processes\nfrom samestep.errors import PeerFailed\n"
        "processes.LEAVE_S = 2\n"
        "def hang():\n    open('failed', 'w').close()\n    signal.pause()\n"
        "if os.environ['RANK'] == '0':\n    atexit.register(hang)\n    raise KeyError('first')\n"
        "while not os.path.exists('failed'): time.sleep(0.01)\n"
        "raise PeerFailed('rank 0 has closed its connection')",
    )
    done = check(command.run("launch", "--nproc-per-node", "2", "slow.py"), 1)
    assert done.stderr.splitlines()[-1] == "KeyError: 'first'"


@pytest.mark.parametrize(
    ("send", "number", "code"),
    [(os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGTERM, 75)],  # the first as a terminal does
)
def test_ranks_get_one_signal_and_end_on_their_own(
    command: Command, send: Callable[[int, int], None], number: signal.Signals, code: int
) -> None:
    command.write("stoppable.py", STOPPABLE)
    launch = command.start("launch", "--nproc-per-node", "2", "stoppable.py")
    command.wait_for("ready0", "ready1")
    send(launch.pid, number)
    done = command.finish(launch)
    assert (done.returncode, done.stderr) == (code, "")
    assert [(command.directory / f"saved{rank}").read_text() for rank in range(2)] == [str(int(number))] * 2
    command.assert_nothing_left()


# The launcher is a new interpreter, and imports torch: 18 s, and 36 s on a busy machine.
def test_a_signal_before_there_are_handlers(command: Command) -> None:
    """The signal stays pending until the launcher has handlers, and does not kill it. The ranks get it, too."""
    command.write("plain.py", "")
    launch = command.start("launch", "plain.py", real=True)
    status, bit = Path(f"/proc/{launch.pid}/status"), 1 << (signal.SIGUSR1 - 1)
    wait_until(lambda: int(re.findall(r"SigBlk:\s*(\w+)", status.read_text())[0], 16) & bit, "it is blocked")
    os.kill(launch.pid, signal.SIGUSR1)
    done = command.finish(launch)
    assert (done.returncode, done.stderr) == (75, "")


EARLY = """
import os, pathlib, time
open("ready", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
import samestep, torch
run = samestep.Run("run", batch_size=2, device="cpu")
model = torch.nn.Linear(1, 1)
run.prepare(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
for step in run.steps([torch.ones(1)] * 4, 3):
    for x in step:
        step.backward(model(x).mean())
"""


def test_a_signal_before_there_is_a_run(command: Command) -> None:
    """The run receives it later, and ends after its first step."""
    command.write("early.py", EARLY)
    launch = command.start("launch", "--nproc-per-node", "1", "early.py")
    command.wait_for("ready")
    for process in command.processes():
        if process.pid != launch.pid:
            process.send_signal(signal.SIGUSR1)  # as Slurm does: to every process of a step
    os.kill(launch.pid, signal.SIGUSR1)
    command.write("go", "")
    done = check(command.finish(launch), 75)
    assert "stopped by a signal after step 1, saved" in done.stdout
    assert json.loads((command.directory / "run/status.json").read_text())["reason"] == "stopped by SIGUSR1"


@pytest.mark.parametrize("victim", ["launcher", "server"])
def test_nothing_outlives_a_killed_launcher(command: Command, victim: str) -> None:
    command.write("plain.py", PLAIN)
    launch = command.start("launch", "--nproc-per-node", "2", "plain.py", "fork")
    command.wait_for("ready0", "ready1")
    assert len(command.processes()) == 8  # launcher, server, 2 ranks, 2 children each
    if victim == "launcher":
        launch.kill()
    else:
        [server] = [process for process in command.processes() if process.ppid() == launch.pid]
        server.kill()
    command.assert_nothing_left()
    done = command.finish(launch)
    if victim == "server":
        assert done.returncode == 2
        assert "the process that starts the ranks has died or was killed (out of memory?)" in done.stderr
    wait_until(lambda: not list(Path(command.variables["TMPDIR"]).glob("samestep-*")), "no file left")


def test_no_rank_outlives_a_launcher_that_is_killed_with_its_server(command: Command) -> None:
    command.write("sleeping.py", "import time; open('ready', 'w').close(); time.sleep(600)")
    launch = command.start("launch", "sleeping.py")
    command.wait_for("ready")
    [server] = [process for process in command.processes() if process.ppid() == launch.pid]
    server.suspend()  # so that it does not end the rank itself
    launch.kill()
    server.kill()
    command.assert_nothing_left()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ports_are_open_on_this_machine_alone(command: Command) -> None:
    command.write("port.py", "import os; print(os.environ['MASTER_PORT'], open('/proc/net/tcp').read())")
    port, *lines = command.run("launch", "port.py").stdout.split("\n")
    wanted = f":{int(port.split()[0]):04X} 00000000:0000 0A"
    assert [line.split()[1].split(":")[0] for line in lines if wanted in line] == ["0100007F"]


# --- --tf-config ------------------------------------------------------------------------------------------------------


# Each rank listens at its own address, and connects to that of the next rank. Both are in TF_CONFIG.
MEET = """
import json, os, pathlib, socket, sys, time
config = json.loads(os.environ["TF_CONFIG"])
workers, own = config["cluster"]["worker"], config["task"]["index"]
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
places = [(host, int(port)) for host, port in (worker.rsplit(":", 1) for worker in workers)]
listener = socket.create_server(places[own])
pathlib.Path(f"config-{own}-{attempt}.json").write_text(json.dumps(config))
peer = (own + 1) % len(places)
while not os.path.exists(f"config-{peer}-{attempt}.json"):
    time.sleep(0.01)
connection = socket.create_connection(places[peer])
listener.accept()
if "fail" in sys.argv and attempt == "0" and own == 1:
    os._exit(3)
"""


def test_ranks_of_a_machine_meet_again_after_a_restart(command: Command) -> None:
    command.write("meet.py", MEET)
    check(command.run("launch", "--nproc-per-node", "3", "--max-restarts", "1", "--tf-config", "meet.py", "fail"))
    for attempt in range(2):
        files = [command.directory / f"config-{rank}-{attempt}.json" for rank in range(3)]
        configs = [json.loads(file.read_text()) for file in files]
        assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in range(3)]
        (workers,) = {tuple(config["cluster"]["worker"]) for config in configs}
        assert len(set(workers)) == 3
        assert all(worker.startswith("127.0.0.1:") for worker in workers)
    command.assert_nothing_left()


# --- the process that forks ranks -------------------------------------------------------------------------------------


@contextmanager
def start_rank(directory: Path, change: Callable[[], None]) -> Iterator[Any]:
    """Let a server start one rank, and return the connection to it. `change`: called in the server."""
    (directory / "train.py").write_text("raise SystemExit(5)")
    ours, theirs = Pipe()
    if (pid := os.fork()) == 0:
        try:
            ours.close()
            change()
            forkserver.serve(theirs)
        finally:
            os._exit(9)
    theirs.close()
    target = {"kind": "script", "name": "train.py", "arguments": [], "call": b""}
    rank = {"rank": 0, "variables": dict(os.environ), "is_shown": True}
    ours.send({"start": [rank], "common": {"target": target, "cwd": str(directory), "directory": str(directory)}})
    with open(os.devnull, "w") as output:
        for _ in range(3):
            send_handle(ours, output.fileno(), pid)
    yield ours
    ours.close()
    os.waitpid(pid, 0)


def test_no_further_process_can_be_started(tmp_path: Path) -> None:
    """The limit on processes is reached."""

    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with start_rank(tmp_path, lambda: setattr(os, "fork", refuse)) as server:
        said = server.recv()["error"]
    assert said.startswith("this machine starts no further process for a rank (Resource temporarily unavailable): ")


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)],
)
def test_a_signal_reaches_a_rank_that_was_just_forked(tmp_path: Path, signum: int, code: int) -> None:
    """Before it has the handlers of a rank. The server itself ignores these signals."""

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    with start_rank(tmp_path, lambda: setattr(forkserver, "die_with_parent", stop)) as server:
        [pid] = server.recv()["started"].values()
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it is stopped")
        for each in (signum, signal.SIGCONT):
            server.send({"signal": int(each), "spared": []})
        assert server.recv()["code"] == code


# --- the output of ranks is in their logs, or on the terminal ---------------------------------------------------------


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
    first = check(command.run("launch", "--nproc-per-node", "2", "--max-restarts", "1", "train.py", "kill"))
    assert "early 1" not in first.stdout, "rank 0 is shown alone"
    assert first.stdout.count("early 0") == 2
    assert "python 2\n" in first.stdout
    assert "error 2\n" in first.stderr
    check(command.run("launch", "--nproc-per-node", "2", "train.py", "go on"))
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
        done = check(command.run("launch", "--nproc-per-node", "2", "train.py", "flood"), 3)
        assert shutil.disk_usage(disk).free == 0
        assert "the end of 2" in done.stdout, "the other rank is through"
        assert done.stderr.endswith("samestep: rank 1 ended with exit code 3; the others were stopped\n")


def test_a_tidied_directory_for_temporary_files(command: Command) -> None:
    """During a long run, old files in /tmp are removed. A rank is killed then."""
    write_script(command, TIDIES)
    done = check(command.run("launch", "--nproc-per-node", "2", "--max-restarts", "1", "train.py", ""))
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
    check(command.finish(launch))
    assert json.loads((command.directory / "run" / "status.json").read_text())["status"] == "done"
