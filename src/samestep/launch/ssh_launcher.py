"""`samestep launch --hosts`: starts a launcher on each of several hosts over ssh, and ends them with this command.

The command line of ssh holds only the interpreter's path. Everything else travels over ssh's stdin (`ssh_node` is the
other side), so that no shell has to quote it.
"""

import os
import re
import secrets
import selectors
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.console import escape, say
from samestep.decoding import decode
from samestep.errors import Error
from samestep.launch.handshake import make_secret
from samestep.launch.launcher import LauncherSignals
from samestep.launch.messages import READ_BYTES, LineSplitter, encode_message
from samestep.launch.output_recorder import write_all
from samestep.launch.rendezvous_client import parse_endpoint
from samestep.launch.ssh_node import BEAT_S, MARK
from samestep.processes import ChildProcess
from samestep.world.environment import SECRET, read_passed
from samestep.world.host import is_loopback

SSH = (
    "ssh",
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ClearAllForwardings=yes",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
)
ANSWER_S = 60.0
FOLLOW_S = 15.0  # for the other launchers to end after one has failed
KILL_S = 10.0  # for launchers to end after a second signal
LAST_CALL_S = 300  # with --heal: for all hosts to join
TICK_S = 0.1
UNREACHED = 255  # exit code of ssh
NOT_FOUND = (126, 127)  # exit codes of a shell
# How ssh's own messages begin.
OF_SSH = ("Connection ", "Timeout, ", "client_loop: ", "ssh: ", "ssh_", "kex_", "Received disconnect", "Read from ")

# [user@] (address in brackets or name) [:number of ranks], and nothing that ssh would take for an option.
_HOST = re.compile(r"(?!-)([^\s@:\[\]]+@|)(?:\[([^\s@\[\]]+)\]|([^\s@:\[\]-][^\s@:\[\]]*))(?::(\d+))?")


@dataclass(frozen=True)
class Host:
    """The name of a host for ssh, and its `--nproc-per-node`; None: that of the command."""

    name: str
    num_ranks: str | None = None


def parse_hosts(text: str) -> list[Host]:
    """Parse `--hosts`, such as "a,user@b,c:4,[fd00::1]:2". Raises Error if it is invalid."""
    hosts = []
    for part in text.split(","):
        match = _HOST.fullmatch(part)
        if match is None:
            raise Error(f"--hosts takes names such as a,b,c:4 or [fd00::1]:4, not {text!r}", code="SS101")
        user, bracketed, plain, num_ranks = match.groups()
        if num_ranks is not None and int(num_ranks) < 1:
            raise Error(f"--hosts {text}: a host has at least 1 rank, not {num_ranks}", code="SS101")
        hosts.append(Host(user + (bracketed or plain), num_ranks))
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Error(f"--hosts names {twice} twice: name it once, with the number of its ranks, {twice}:2", code="SS101")
    return hosts


@dataclass
class Session:
    """The ssh process of one host, and the launcher that it runs there.

    Attributes:
        place: the address at which ssh has reached the host and a free port there, once it has answered.
        problem: why the host cannot run a launcher.
        last: the last line of its stderr.
        is_started: the launcher was started.
        code: exit code of the launcher, once it has ended.
        killed_by: the signal that killed the launcher, or 0.
        has_ended: ssh has ended.
    """

    host: Host
    ssh: ChildProcess
    place: tuple[str, int] | None = None
    problem: str = ""
    last: str = ""
    is_started: bool = False
    code: int | None = None
    killed_by: int = 0
    has_ended: bool = False
    streams: dict[int, LineSplitter] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, **message: Any) -> None:
        """Send a message. An empty one shows that the connection is alive."""
        with self.lock, suppress(OSError, ValueError):  # `poll` reports that ssh has ended
            write_all(self.ssh.pipes[0].fileno(), encode_message(message))


class Sessions:
    """The sessions of all hosts. Leaving the `with` block ends them."""

    def __init__(self, hosts: Sequence[Host], directory: Path, variables: dict[str, str]) -> None:
        self._selector = selectors.DefaultSelector()
        nonce = secrets.token_hex(16)  # distinguishes answers from the output of the ranks
        self._mark = f"{MARK}{nonce} ".encode()
        self._is_closed = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="samestep beats", daemon=True)
        python_path = {name: value for name, value in variables.items() if name == "PYTHONPATH"}
        words = [*(f"{name}={value}" for name, value in python_path.items()), sys.executable]
        command = f"exec env {shlex.join([*words, '-P', '-m', 'samestep.launch.ssh_node'])}"
        self.all: list[Session] = []
        for host in hosts:
            session = Session(host, ChildProcess([*SSH, "--", host.name, command], has_pipes=True))
            self.all.append(session)
            for number, stream in enumerate(session.ssh.pipes[1:], start=1):
                session.streams[number] = LineSplitter(cuts=True)
                self._selector.register(stream, selectors.EVENT_READ, (session, number))
            session.send(directory=str(directory), variables=variables, nonce=nonce)
        self._beats.start()

    def __enter__(self) -> "Sessions":
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections. The launchers that still run then stop."""
        self._is_closed.set()
        self._beats.join()
        for session in self.all:
            session.ssh.close_pipes()
        for session in self.all:
            session.ssh.end(KILL_S)
        self._selector.close()

    def _beat(self) -> None:
        while not self._is_closed.wait(BEAT_S):
            for session in self.all:
                session.send()

    def poll(self) -> None:
        """Show new output, and process answers and ends."""
        for key, _ in self._selector.select(TICK_S):
            session, number = key.data
            data = os.read(key.fd, READ_BYTES)
            lines = session.streams[number].feed(data)
            if not data:
                self._selector.unregister(key.fileobj)
                lines = [rest] if (rest := session.streams.pop(number).flush()) else []
            for line in lines:
                self._receive(session, number, line)
            if not session.streams:
                session.ssh.wait()
                session.has_ended = True

    def _receive(self, session: Session, number: int, line: bytes) -> None:
        line, mark, answer = line.partition(self._mark) if number == 1 else (line, b"", b"")
        if mark:
            message = decode(answer, dict[str, Any])
            if "address" in message:
                session.place = (message["address"], message["port"])
            session.problem = message.get("problem", "")
            if "code" in message:
                session.code = message["code"]
                session.killed_by = message["killed_by"]
        if number == 2 and line.strip():
            session.last = line.decode(errors="replace").strip()
        if session.is_started and (line or not mark):
            shown = line.rstrip(b"\r").rpartition(b"\r")[2]  # the final state of a line that was drawn repeatedly
            text = escape(shown.decode(errors="backslashreplace"))
            with suppress(OSError):  # the terminal has closed: continue the run
                write_all(number, f"[{session.host.name}] {text}\n".encode())

    def signal(self, signum: int) -> None:
        """Send a signal to the launchers that run."""
        for session in self.all:
            if session.is_started and not session.has_ended:
                session.send(signal=signum)


def run_hosts(
    hosts: Sequence[Host], command: str, flags: Sequence[str], program: Sequence[str], endpoint: str | None
) -> int:
    """Run `samestep COMMAND FLAGS PROGRAM` on all hosts, as the nodes of one launch, to their end.

    Args:
        endpoint: the rendezvous endpoint; None: a free port on the first host.

    Returns:
        The exit code of the launcher that failed first; 0 if none has failed.

    Raises:
        Error: a host cannot be reached, or lacks samestep or the directory.
    """
    if endpoint is not None:
        parse_endpoint(endpoint)
    if shutil.which(SSH[0]) is None:
        raise Error("--hosts needs ssh, and there is none here: install the OpenSSH client", code="SS107")
    variables = read_passed() | {SECRET: make_secret()}  # sent over stdin, so no process list shows the secret
    heals = "--heal" in flags
    has_last_call = any(flag.startswith("--rdzv-last-call") for flag in flags)
    least = "1:" if heals and len(hosts) > 1 else ""  # after a loss, the others do not wait for the host to come back
    with LauncherSignals() as signals, Sessions(hosts, Path.cwd(), variables) as sessions:
        if not _wait_for_answers(sessions, signals.received):
            return 128 + signals.received[0]
        endpoint = endpoint or _choose_endpoint(sessions.all)
        for rank, session in enumerate(sessions.all):
            own = [] if session.host.num_ranks is None else ["--nproc-per-node", session.host.num_ranks]
            nodes = ["--nnodes", f"{least}{len(hosts)}", "--node-rank", str(rank), "--rdzv-endpoint", endpoint]
            nodes += ["--rdzv-last-call", str(LAST_CALL_S)] if least and not has_last_call else []
            arguments = [command, *flags, *own, *(nodes if len(hosts) > 1 else []), *program]
            session.is_started = True
            session.send(arguments=arguments)
        return _wait_for_ends(sessions, signals.received, heals=heals)


def _wait_for_answers(sessions: Sessions, received: Sequence[int]) -> bool:
    """Wait until all hosts are ready. Returns False if a signal comes first."""
    deadline_s = time.monotonic() + ANSWER_S
    while any(session.place is None for session in sessions.all):
        sessions.poll()
        if received:
            return False
        for session in sessions.all:
            if session.problem or (session.has_ended and session.place is None):
                raise Error(_explain(session), code="SS511")
            if session.place is None and time.monotonic() > deadline_s:
                raise Error(
                    f"host {session.host.name} has not answered within {ANSWER_S:.0f} s: check its load", code="SS511"
                )
    return True


def _explain(session: Session) -> str:
    """Return why a host cannot run a launcher."""
    name = session.host.name
    code = session.ssh.poll()
    if session.problem:
        return f"host {name}: {session.problem}"
    if code == UNREACHED:
        return f"host {name} cannot be reached ({session.last}): make `ssh {name}` work without a password"
    if code in NOT_FOUND:
        return (
            f"host {name} has no {sys.executable} ({session.last}): install the same environment there, at the same "
            "path"
        )
    reason = session.last or f"exit code {code}"
    return f"host {name} cannot start samestep ({reason}): install the same packages there as here"


def _choose_endpoint(sessions: Sequence[Session]) -> str:
    """Choose the first host, at the address by which ssh has reached it."""
    places = [session.place for session in sessions if session.place is not None]
    address, port = places[0]
    if not all(each for each, _ in places):
        raise Error("ssh does not report the addresses of the hosts: give --rdzv-endpoint HOST:PORT", code="SS511")
    is_local = [is_loopback(each) for each, _ in places]
    if is_local[0] and not all(is_local):
        raise Error(
            f"all hosts connect to the first, and {sessions[0].host.name} is a name of this machine that the others "
            "cannot resolve: give the name that they use, or --rdzv-endpoint HOST:PORT",
            code="SS511",
        )
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _describe_loss(session: Session) -> str:
    """Say in a clause how a host was lost; "" if its launcher has ended by itself."""
    if session.code is None:
        reason = f" ({session.last})" if session.last.startswith(OF_SSH) else ""
        return f"the connection to host {session.host.name} was lost{reason}"
    if session.killed_by:
        return f"the launcher on host {session.host.name} was killed by {signal.Signals(session.killed_by).name}"
    return ""


def _wait_for_ends(sessions: Sessions, received: Sequence[int], *, heals: bool) -> int:
    """Wait until all launchers have ended. Returns the exit code.

    Args:
        heals: whether the launchers of the other hosts decide what follows if one is lost.
    """
    num_sent = 0
    code = 0
    lost = ""
    limit_s: float | None = None
    ended: list[Session] = []
    num_lost = 0
    while len(ended) < len(sessions.all):
        sessions.poll()
        for session in [session for session in sessions.all if session.has_ended and session not in ended]:
            ended.append(session)
            loss = _describe_loss(session)
            num_lost += bool(loss)
            if heals and loss and num_lost < len(sessions.all) and not received:
                say(f"{loss}; the others decide whether they continue")
                continue
            lost = lost or loss
            code = code or (1 if session.code is None else session.code)
            if code and limit_s is None:
                limit_s = time.monotonic() + FOLLOW_S
        while num_sent < len(received):
            sessions.signal(received[num_sent])
            num_sent += 1
            if num_sent > 1:
                limit_s = time.monotonic() + KILL_S
        if limit_s is not None and time.monotonic() > limit_s:
            break
    if lost and not received:
        say(f"{lost}; the others were stopped")
    return code or (128 + received[-1] if len(ended) < len(sessions.all) else 0)
