"""A program on the command server behaves as in its own interpreter."""

import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.commands import Popen, find_programs, is_forkable, run
from support.runs import check, clean_variables, digest, run_command
from support.selection import one_in
from support.waiting import DEADLINE_S, wait_until

EVERYTHING = """
import __main__, atexit, gc, os, random, signal, sys, tempfile, threading, torch, numpy
from helper import NAME
atexit.register(lambda: print("at exit", flush=True))
signals = {s.name: str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE)}
print(__name__, __main__.__dict__.get("__file__"), __main__.__spec__ and __main__.__spec__.name, NAME)
print(sys.argv, sys.orig_argv, sys.path, sys.flags.safe_path, sys.executable, sys.gettrace(), gc.isenabled())
print(signals, signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getitimer(signal.ITIMER_REAL))
print({name: value for name, value in os.environ.items() if name not in ("_", "PWD", "OLDPWD", "SHLVL")})
print(os.getcwd(), tempfile.gettempdir(), sorted(os.listdir("/proc/self/fd")), os.umask(0o22))
for stream in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__):
    print(stream.name, stream.mode, stream.encoding, stream.errors, stream.line_buffering, stream.write_through)
torch.manual_seed(3)
print(torch.get_num_threads(), torch.rand(3), torch.randn(64, 64).mm(torch.randn(64, 64)).sum())
print(threading.current_thread().name, threading.active_count())
print(os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid())
with open("/proc/self/cmdline") as shown:
    print(shown.read().rstrip(chr(0)))
"""
TRAIN = """
import samestep
import torch
from torch import nn

run = samestep.Run("run", batch_size=16, micro_batch_size=4, snapshot_every=3)
data = torch.utils.data.TensorDataset(torch.rand(96, 32), torch.rand(96, 1))
model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.BatchNorm1d(64), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
run.prepare(model=model, optimizer=optimizer)
for epoch in run.epochs(data, 2):
    for step in epoch:
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
"""
ENDS = {
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit('a sentence')": 1,
    "import sys; print('out'); sys.exit(-1)": 255,
    "def inner():\n    1 / 0\ninner()": 1,
    "import os; os._exit(7)": 7,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('last'))).start()": 0,
    "print('unfinished', end=''); 1 +": 1,
}


def run_twice(*words: str | Path, cwd: Path, **more: object) -> list[subprocess.CompletedProcess[str]]:
    """Run a program on the server, and in its own interpreter."""
    return [
        run([sys.executable, *words], cwd=cwd, real=real, capture_output=True, text=True, **more)
        for real in (False, True)
    ]


@pytest.mark.soak
@pytest.mark.parametrize("kind", one_in(3, ["script", "module", "code"]))
def test_a_program_finds_the_same(tmp_path: Path, kind: str) -> None:
    (tmp_path / "program.py").write_text(EVERYTHING)
    (tmp_path / "helper.py").write_text("NAME = 'beside the script'")
    (tmp_path / "more").mkdir()
    words = {"script": ["program.py"], "module": ["-m", "program"], "code": ["-c", EVERYTHING]}[kind]
    variables = clean_variables({"PYTHONPATH": str(tmp_path / "more"), "PYTHONHASHSEED": "0", "TMPDIR": str(tmp_path)})
    forked, real = run_twice(*words, "a", "--b", cwd=tmp_path, env=variables, stdin=subprocess.DEVNULL)
    assert forked.stdout.splitlines() == real.stdout.splitlines()
    assert (forked.returncode, forked.stderr) == (real.returncode, real.stderr) == (0, "")


@pytest.mark.parametrize("code", ENDS)
def test_a_program_ends_the_same(tmp_path: Path, code: str) -> None:
    (tmp_path / "program.py").write_text(code)
    forked, real = run_twice(tmp_path / "program.py", cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)
    assert forked.returncode == ENDS[code]


def test_a_module_that_fails(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("1 / 0")
    for module in ("program", "no_such_module"):
        forked, real = run_twice("-m", module, cwd=tmp_path)
        assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)


@pytest.mark.soak  # two whole runs by new interpreters
@pytest.mark.parametrize("start", [[], ["-m", "samestep", "launch", "--nproc-per-node", "2"]], ids=["python", "launch"])
def test_bits_and_words_of_a_run(tmp_path: Path, start: list[str]) -> None:
    """A run has the same state, bit for bit, and the same output."""
    (tmp_path / "train.py").write_text(TRAIN)
    done = []
    for name, real in (("forked", False), ("real", True)):
        (tmp_path / name).mkdir()
        words = [sys.executable, *start, "../train.py"]
        done.append(check(run_command(*words, cwd=tmp_path / name, env={"PYTHONHASHSEED": "0"}, real=real)))
    forked, real_run = tmp_path / "forked" / "run", tmp_path / "real" / "run"
    assert digest(forked) == digest(real_run)
    for name in ("ledger.bin", "metrics.jsonl"):
        assert (forked / name).read_bytes() == (real_run / name).read_bytes()
    assert done[0].stderr == done[1].stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_and_waiting(tmp_path: Path, signum: signal.Signals) -> None:
    code = "import sys, time\nprint('ready', flush=True)\ntime.sleep(60)"
    for real in (False, True):
        program = Popen(
            [sys.executable, "-c", code], real=real, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )
        assert program.stdout.readline() == b"ready\n"
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.01)
        assert os.getpgid(program.pid) == program.pid
        os.killpg(program.pid, signum)
        assert program.wait(DEADLINE_S) == -signum
        assert (b"KeyboardInterrupt" in program.communicate()[1]) == (signum == signal.SIGINT)


def test_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    code = "import sys; print(sys.stdout.isatty(), sys.stdout.line_buffering, input('? '))"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    program = Popen([sys.executable, "-c", code], env=variables, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, b"answer\n")
    assert program.wait(DEADLINE_S) == 0
    assert b"True True answer" in os.read(ours, 1 << 12)
    os.close(ours)


def test_programs_of_a_program(tmp_path: Path) -> None:
    """Programs that it starts run on the server, too, unless their environment needs a new interpreter."""
    code = """
import subprocess, sys
def ask(**more):
    words = [sys.executable, "-c", "import sys; print('torch' in sys.modules, sys.stdout.encoding)"]
    print(subprocess.run(words, capture_output=True, text=True, **more).stdout.strip())
ask()
ask(env={"PYTHONIOENCODING": "latin-1"})
"""
    done = run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["True utf-8", "False iso8859-1"]


# 1 needs its own server, as do the ranks of torchrun in promises/test_scripts.py.
@pytest.mark.parametrize("hash_seed", ["0", pytest.param("1", marks=pytest.mark.soak), "2"])
def test_hashes_of_strings(hash_seed: str) -> None:
    code = "print(hash('a string'), {'a', 'b', 'c', 'd'})"
    variables = clean_variables({"PYTHONHASHSEED": hash_seed})
    forked, real = run_twice("-c", code, cwd=Path.cwd(), env=variables)
    assert forked.stdout == real.stdout


def test_what_is_not_forked(tmp_path: Path) -> None:
    variables = dict(os.environ)
    assert is_forkable([sys.executable, "-m", "samestep"], variables)
    assert is_forkable([sys.executable, "-m", "samestep"], {**variables, "KMP_INIT_AT_FORK": "FALSE"})
    assert not is_forkable(["python-of-another-environment", "-m", "samestep"], variables)
    assert not is_forkable([sys.executable, "-I", "-m", "samestep"], variables)
    assert not is_forkable([sys.executable, tmp_path / "missing.py"], variables)
    assert not is_forkable([sys.executable, "-m", "samestep"], {**variables, "PYTHONHASHSEED": "7"})
    assert not is_forkable([sys.executable, "-m", "samestep"], {**variables, "PYTHONWARNINGS": "error"})


@pytest.mark.soak
def test_no_program_outlives_its_tests(tmp_path: Path) -> None:
    """The server ends when the process that started it ends or is killed, and ends its programs."""
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from support.commands import Popen
print(Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
time.sleep(60)
"""
    tests = Popen([sys.executable, "-c", code], real=True, stdout=subprocess.PIPE)
    program = psutil.Process(int(tests.stdout.readline()))
    server = program.parent()
    assert server is not None
    assert server.ppid() == tests.pid
    tests.kill()
    tests.communicate()
    wait_until(lambda: not program.is_running() and not server.is_running(), "both have ended")


def test_programs_for_a_shell(tmp_path: Path) -> None:
    """Arguments, pipes, signals and exit codes are as for real programs."""
    (tmp_path / "own.py").write_text("import sys; print(sys.stdin.read(), sys.argv, 'torch' in sys.modules)")
    variables = clean_variables({"PATH": f"{find_programs()}:{os.environ['PATH']}"})
    line = "echo in | python own.py a 'b c' | tr a-z A-Z; python -c 'import os; os.kill(os.getpid(), 15)'; echo $?"
    done = run(["bash", "-c", line], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.stdout == "IN\n ['OWN.PY', 'A', 'B C'] TRUE\n143\n"
    done = run(["samestep", "--version"], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == check(run_command(sys.executable, "-m", "samestep", "--version", cwd=tmp_path)).stdout
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    for signum in (signal.SIGTERM, signal.SIGKILL):
        client = Popen(["python", "-c", code], env=variables, stdout=subprocess.PIPE)
        program = psutil.Process(int(client.stdout.readline()))
        assert program.pid != client.pid
        client.send_signal(signum)
        assert client.wait(DEADLINE_S) == -signum
        client.stdout.close()
        wait_until(lambda program=program: not program.is_running(), "it ends with its client")


@pytest.mark.parametrize("sent", [b"", b"\0", b"\0\0\0\x09", b"\0\0\0\x09{"])
def test_a_client_that_ends_while_it_sends(sent: bytes) -> None:
    """It was killed, for example. The server takes the requests of others."""
    with connect() as connection:
        connection.sendall(sent)
    assert run([sys.executable, "-c", "print(7)"], capture_output=True, text=True, timeout=DEADLINE_S).stdout == "7\n"


def test_a_client_that_waits_before_it_sends() -> None:
    """It was stopped, for example."""
    with connect():
        run([sys.executable, "-c", ""], check=True, timeout=DEADLINE_S)


def connect() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(find_programs().with_name("socket")))
    return connection
