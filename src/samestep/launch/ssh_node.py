"""The process that `samestep launch --hosts` starts on each host over ssh. It runs a launcher there.

Its stdin carries JSON messages: the directory and environment, then the launcher's arguments, then signals. Empty lines
in between show that the connection is alive. Answers go to stdout, among the output of the ranks, in lines that begin
with `MARK` and a random number of the launch, which the ranks do not know.
"""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from samestep.launch.lines import READ_BYTES, MessageReader
from samestep.world.environment import child_variables, read_ssh_address
from samestep.world.host import die_with_parent

MARK = "\x1esamestep "
BEAT_S = 5.0  # interval of the empty lines
SILENT_S = 60.0  # without a line, after which the connection counts as lost
LOST_S = 20.0  # for a run to save after the connection was lost


def answer(nonce: str, **fields: Any) -> None:
    """Send an answer. `nonce` is the random number of the launch."""
    with suppress(OSError):
        os.write(1, f"{MARK}{nonce} {json.dumps(fields)}\n".encode())


def main() -> None:
    """Run a launcher, and exit with its code."""
    reader = MessageReader(0)
    order = reader.read_one() or sys.exit(1)  # the connection has closed, and nothing was started
    directory, nonce = order["directory"], order["nonce"]
    try:
        os.chdir(directory)
    except OSError as error:
        problem = f"the directory {directory} cannot be used there ({error.strerror}): it must be the same on all hosts"
        answer(nonce, problem=problem)
        sys.exit(1)
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    answer(nonce, address=read_ssh_address(), port=port)
    arguments = (reader.read_one() or sys.exit(1))["arguments"]
    watched, waker = socket.socketpair()
    for end in (watched, waker):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    launcher = subprocess.Popen(
        [sys.executable, "-P", "-m", "samestep", *arguments],
        env=child_variables() | order["variables"],
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    _forward_signals(launcher, reader, watched)
    code = launcher.returncode if launcher.returncode >= 0 else 128 - launcher.returncode
    answer(nonce, code=code, killed_by=-min(launcher.returncode, 0))
    sys.exit(code)


def _forward_signals(launcher: "subprocess.Popen[bytes]", reader: MessageReader, watched: socket.socket) -> None:
    """Forward signals until the launcher ends. If the connection is lost, stop the launcher."""
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(watched, selectors.EVENT_READ)
    limit_s = time.monotonic() + SILENT_S
    messages: list[dict[str, Any]] | None = reader.take_pending()
    is_lost = False
    while launcher.poll() is None:
        for message in messages or []:
            launcher.send_signal(message["signal"])
        messages = []
        ready = [key.fileobj for key, _ in selector.select(max(limit_s - time.monotonic(), 0.0))]
        if watched in ready:
            watched.recv(READ_BYTES)
        if 0 in ready:
            messages = reader.read()
            limit_s = time.monotonic() + SILENT_S
            if messages is None:
                selector.unregister(0)
                limit_s = 0.0
        if time.monotonic() < limit_s:
            continue
        if is_lost:
            launcher.kill()  # its ranks end with it
            launcher.wait()
        elif launcher.poll() is None:
            is_lost = True
            limit_s = time.monotonic() + LOST_S
            launcher.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
