"""The process that forks ranks."""

import errno
import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path

import pytest

from samestep.launch.forkserver import serve

SIGNALED_EARLY = """
import os, signal, sys
import psutil
from samestep.launch import forkserver
from samestep.waiting import wait_until

def stop(): os.kill(os.getpid(), signal.SIGSTOP)

forkserver.PRELOAD = ()
forkserver.die_with_parent = stop
server = forkserver.ForkServer(fork=True)
target = {"kind": "script", "name": sys.argv[2], "arguments": []}
variables = {"rank": 0, "variables": dict(os.environ), "is_shown": True}
server.start([variables], target=target, cwd=os.getcwd(), directory=os.getcwd())
[pid] = server.receive(60)["started"].values()
rank = psutil.Process(pid)
wait_until(lambda: rank.status() == psutil.STATUS_STOPPED, 60)
server.signal(int(sys.argv[1]))
server.signal(signal.SIGCONT)
print(server.receive(60)["code"])
server.close()
"""


def test_no_further_process_can_be_started(tmp_path: Path) -> None:
    """The limit on processes is reached."""

    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    ours, theirs = Pipe()
    if (pid := os.fork()) == 0:
        try:
            ours.close()
            os.fork = refuse
            serve(theirs)
        finally:
            os._exit(9)
    theirs.close()
    ours.send({"start": [{"rank": 0, "is_shown": True}], "common": {"directory": str(tmp_path)}})
    with open(os.devnull, "w") as output:
        for _ in range(2):
            send_handle(ours, output.fileno(), pid)
    said = ours.recv()["error"]
    ours.close()
    assert said.startswith("this machine starts no further process for a rank (Resource temporarily unavailable): ")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_a_rank_that_was_just_forked(tmp_path: Path, signum: int) -> None:
    """Before it has the handlers of a rank. The server itself ignores these signals."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(5)")
    command = [sys.executable, "-c", SIGNALED_EARLY, str(int(signum)), str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (ended.stdout, ended.stderr) == (f"{-signum}\n", "")
