"""The process that forks ranks."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import wait_until

from samestep.launch import forkserver


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


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_a_rank_that_was_just_forked(tmp_path: Path, signum: int) -> None:
    """Before it has the handlers of a rank. The server itself ignores these signals."""

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    with start_rank(tmp_path, lambda: setattr(forkserver, "die_with_parent", stop)) as server:
        [pid] = server.recv()["started"].values()
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it is stopped")
        for each in (signum, signal.SIGCONT):
            server.send({"signal": int(each), "spared": []})
        assert server.recv()["code"] == -signum
