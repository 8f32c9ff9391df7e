"""What `samestep launch --hosts` starts on each host, over ssh: it starts a launcher there, and ends it when told to.

Its stdin brings a line of JSON (where, and with which variables), then one with the launcher's arguments, then signals,
and in between empty lines, so that a connection that is lost without a word is found out. Answers go to stdout, beside
what the ranks print, in lines that begin with `MARK` and the launch's own random number, which ranks do not know.
"""

import ctypes
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

from samestep.world.environment import child_variables, read_ssh_address

MARK = "\x1esamestep "
BEAT_S = 5.0
SILENT_S = 60.0  # without a line, after which nobody is there any more
LOST_S = 20.0  # for a run to save when nobody is there any more
READ_BYTES = 1 << 16

PR_SET_PDEATHSIG = 1


def answer(nonce: str, **fields: Any) -> None:
    """Tells whoever has started this. `nonce` is theirs: no other line of the output has it."""
    with suppress(OSError):
        os.write(1, f"{MARK}{nonce} {json.dumps(fields)}\n".encode())


def main() -> None:
    """Exits with the launcher's code."""
    order = _read_line()
    where, nonce = order["directory"], order["nonce"]
    try:
        os.chdir(where)
    except OSError as error:
        problem = f"the directory {where} cannot be used there ({error.strerror}): it must be the same on all hosts"
        answer(nonce, problem=problem)
        sys.exit(1)
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    answer(nonce, address=read_ssh_address(), port=port)
    arguments = _read_line()["arguments"]
    watched, waker = socket.socketpair()
    for end in (watched, waker):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    launcher = subprocess.Popen(
        [sys.executable, "-P", "-m", "samestep", *arguments],
        env=child_variables() | order["variables"],
        stdin=subprocess.DEVNULL,
        preexec_fn=_die_with_parent,
    )
    _obey(launcher, watched)
    code = launcher.returncode if launcher.returncode >= 0 else 128 - launcher.returncode
    answer(nonce, code=code, killed_by=-min(launcher.returncode, 0))
    sys.exit(code)


def _die_with_parent() -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux alone has it.
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _obey(launcher: "subprocess.Popen[bytes]", watched: socket.socket) -> None:
    """Passes signals on until the launcher has ended; has it end when nobody is there any more."""
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(watched, selectors.EVENT_READ)
    limit_s = time.monotonic() + SILENT_S
    received, is_lost = b"", False
    while launcher.poll() is None:
        ready = [key.fileobj for key, _ in selector.select(max(limit_s - time.monotonic(), 0.0))]
        if watched in ready:
            watched.recv(READ_BYTES)
        if 0 in ready:
            data = os.read(0, READ_BYTES)
            *lines, received = (received + data).split(b"\n")
            for line in filter(None, lines):
                launcher.send_signal(json.loads(line)["signal"])
            if data:
                limit_s = time.monotonic() + SILENT_S
            else:
                selector.unregister(0)
                limit_s = 0.0
        if time.monotonic() < limit_s:
            continue
        if is_lost:
            launcher.kill()  # its ranks go with it
            launcher.wait()
        elif launcher.poll() is None:
            is_lost = True
            limit_s = time.monotonic() + LOST_S
            launcher.send_signal(signal.SIGTERM)


def _read_line() -> dict[str, Any]:
    """The next line, and not a byte of what follows it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(1)  # nobody is there any more, and nothing has been started
        line = line + byte if line or byte != b"\n" else b""
    order: dict[str, Any] = json.loads(line)
    return order


if __name__ == "__main__":
    main()
