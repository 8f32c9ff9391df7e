"""The process that `samestep launch --hosts` starts on each host over ssh. It runs a launcher there.

Its stdin carries JSON messages: the directory and environment, then the launcher's arguments, then signals. Empty ones
in between show that the connection is alive. Answers go to stdout, among the output of the ranks, in lines that begin
with `MARK` and a random number of the launch, which the ranks do not have.
"""

import json
import math
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

from samestep.launch.messages import MessageReader
from samestep.processes import ChildProcess
from samestep.world.environment import child_variables, read_ssh_address

MARK = "\x1esamestep "
BEAT_S = 5.0  # interval of the empty messages
SILENT_S = 60.0  # without a message, after which the connection counts as lost
LOST_S = 20.0  # for a run to save after the connection was lost


def answer(nonce: str, **fields: Any) -> None:
    """Send an answer. `nonce` is the random number of the launch."""
    with suppress(OSError):
        os.write(1, f"{MARK}{nonce} {json.dumps(fields)}\n".encode())


def main() -> None:
    """Run a launcher, and exit with its code."""
    reader = MessageReader(0)
    order = _wait_for(reader, "directory")
    directory = order["directory"]
    nonce = order["nonce"]
    try:
        os.chdir(directory)
    except OSError as error:
        problem = f"the directory {directory} cannot be used there ({error.strerror}): it must be the same on all hosts"
        answer(nonce, problem=problem)
        sys.exit(1)
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    answer(nonce, address=read_ssh_address(), port=port)
    arguments = _wait_for(reader, "arguments")["arguments"]
    launcher = ChildProcess(
        [sys.executable, "-P", "-m", "samestep", *arguments],
        variables=child_variables() | order["variables"],
        dies_with_parent=True,
    )
    threading.Thread(target=_forward_signals, args=(launcher, reader), daemon=True).start()
    code = launcher.wait()
    answer(nonce, code=code if code >= 0 else 128 - code, killed_by=-min(code, 0))
    sys.exit(code if code >= 0 else 128 - code)


def _wait_for(reader: MessageReader, name: str) -> dict[str, Any]:
    """Return the next message with the field `name`. Ends this process if the connection has closed."""
    try:
        while name not in (message := reader.receive(math.inf) or {}):
            pass
    except OSError:
        sys.exit(1)
    return message


def _forward_signals(launcher: ChildProcess, reader: MessageReader) -> None:
    """Forward signals to the launcher, and stop it when the connection is lost."""
    with suppress(OSError):
        while (message := reader.receive(SILENT_S)) is not None:
            if "signal" in message:
                launcher.send_signal(message["signal"])
    launcher.send_signal(signal.SIGTERM)
    launcher.end(LOST_S)  # its ranks end with it


if __name__ == "__main__":
    main()
