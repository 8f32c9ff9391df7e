"""The process that forks ranks."""

import os
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
