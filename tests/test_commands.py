"""A program that is a fork of the tests behaves as in its own interpreter."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import run
from support.runs import clean_variables

EVERYTHING = """
import __main__, atexit, gc, os, signal, sys, tempfile, threading, torch
from helper import NAME
atexit.register(lambda: print("at exit", flush=True))
signals = {s.name: str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGPIPE)}
print(__name__, __main__.__dict__.get("__file__"), __main__.__spec__ and __main__.__spec__.name, NAME)
print(sys.argv, sys.orig_argv, sys.path, sys.executable, sys.gettrace(), gc.isenabled())
print(signals, signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getitimer(signal.ITIMER_REAL))
print({name: value for name, value in os.environ.items() if name not in ("_", "PWD", "OLDPWD", "SHLVL")})
print(os.getcwd(), tempfile.gettempdir(), os.umask(0o22))
for stream in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__):
    print(stream.name, stream.mode, stream.encoding, stream.errors, stream.line_buffering, stream.write_through)
torch.manual_seed(3)
print(torch.rand(3), threading.current_thread().name, threading.active_count())
print(os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid())
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
    "import warnings; warnings.warn('careful')": 0,
}


@pytest.mark.parametrize("kind", [pytest.param("script", marks=pytest.mark.soak), "module"])
def test_a_program_finds_the_same(tmp_path: Path, kind: str) -> None:
    (tmp_path / "program.py").write_text(EVERYTHING)
    (tmp_path / "helper.py").write_text("NAME = 'beside the script'")
    words = [sys.executable, *{"script": ["program.py"], "module": ["-m", "program"]}[kind], "a", "--b"]
    variables = clean_variables({"PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": "0", "TMPDIR": str(tmp_path)})
    options = {"cwd": tmp_path, "env": variables, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    forked, real = (run(words, real=real, **options) for real in (False, True))
    assert forked.stdout.splitlines() == real.stdout.splitlines()
    assert (forked.returncode, forked.stderr) == (real.returncode, real.stderr) == (0, "")


@pytest.mark.parametrize("code", ENDS)
def test_a_program_ends_the_same(tmp_path: Path, code: str) -> None:
    (tmp_path / "program.py").write_text(code)
    words = [sys.executable, tmp_path / "program.py"]
    forked, real = (run(words, real=real, capture_output=True, text=True) for real in (False, True))
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)
    assert forked.returncode == ENDS[code]
