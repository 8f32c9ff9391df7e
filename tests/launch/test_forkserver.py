"""The process that forks ranks."""

import os
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path

from samestep.launch.forkserver import serve


def test_a_client_that_has_ended(tmp_path: Path) -> None:
    """The client was killed while the server imported torch: no rank starts, and its directory is removed."""
    (tmp_path / "directory").mkdir()
    ours, theirs = Pipe()
    with theirs, open(tmp_path / "output", "w") as output:
        common = {"directory": str(tmp_path / "directory")}
        ours.send({"start": [{"rank": 0, "is_shown": True}], "common": common})
        for _ in range(2):
            send_handle(ours, output.fileno(), os.getpid())
        ours.close()
        if (pid := os.fork()) == 0:
            try:
                os.register_at_fork(before=(tmp_path / "forked").touch)
                serve(theirs)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["output"], "nothing was forked"


def test_a_server_that_ends_with_warnings_as_errors() -> None:
    """Python reports each socket that is collected open, in the output of the launch."""
    lines = [
        "from multiprocessing import Pipe",
        "from samestep.launch import forkserver",
        "forkserver.PRELOAD = ()",
        "ours, theirs = Pipe()",
        "ours.close()",
        "forkserver.serve(theirs)",
    ]
    ended = subprocess.run([sys.executable, "-W", "error", "-c", "\n".join(lines)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
