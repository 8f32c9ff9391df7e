"""`samestep launch --hosts`: a launcher on each of a few machines, started over ssh, and ended with this command.

Nothing of the command but the interpreter's path stands on ssh's command line: what is to run travels by its stdin
(`launch.remote` is the other side), so that no shell takes part in quoting.
"""

import ipaddress
import json
import os
import re
import secrets
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.console import escape, say
from samestep.errors import Error
from samestep.launch.handshake import make_secret
from samestep.launch.launcher import Stopping
from samestep.launch.output_recorder import write_all
from samestep.launch.rendezvous_client import parse_endpoint
from samestep.launch.ssh_node import BEAT_S, MARK
from samestep.world.environment import SECRET, read_passed

SSH = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "ClearAllForwardings=yes", "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=3",
)  # fmt: skip
ANSWER_S = 60.0
FOLLOW_S = 15.0  # for the others, when the launcher of one host has failed
KILL_S = 10.0  # for launchers that were sent a second signal
TICK_S = 0.1
READ_BYTES = 1 << 16
UNREACHED = 255  # ssh's exit code
NOT_FOUND = (126, 127)  # a shell's
OF_SSH = ("Connection ", "Timeout, ", "client_loop: ", "ssh: ", "ssh_", "kex_", "Received disconnect", "Read from ")

# user@, then an address in brackets or a name, then the number of ranks. Nothing that ssh takes for an option.
_HOST = re.compile(r"(?!-)([^\s@:\[\]]+@|)(?:\[([^\s@\[\]]+)\]|([^\s@:\[\]-][^\s@:\[\]]*))(?::(\d+))?")


@dataclass(frozen=True)
class Host:
    """A machine as ssh knows it.

    Attributes:
        num_ranks: as `--nproc-per-node`; None: as for all.
    """

    name: str
    num_ranks: str | None = None


def parse_hosts(text: str) -> list[Host]:
    """Such as "a,user@b,c:4,[fd00::1]:2". Raises Error where it makes no sense."""
    hosts = []
    for part in text.split(","):
        match = _HOST.fullmatch(part)
        if match is None:
            raise Error(f"--hosts takes names such as a,b,c:4 or [fd00::1]:4, not {text!r}")
        user, bracketed, plain, num_ranks = match.groups()
        if num_ranks is not None and int(num_ranks) < 1:
            raise Error(f"--hosts {text}: a host has at least 1 rank, not {num_ranks}")
        hosts.append(Host(user + (bracketed or plain), num_ranks))
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Error(f"--hosts names {twice} twice: name it once, with the number of its ranks, {twice}:2")
    return hosts


@dataclass
class Agent:
    """What runs on one host, and ssh that leads there.

    Attributes:
        place: the address by which ssh has reached it, and a port that is free there, once it has answered.
        problem: what it says cannot be.
        last: the last line of its stderr.
        code: of its launcher, once that has ended; `has_ended`: ssh has, too.
    """

    host: Host
    ssh: "subprocess.Popen[bytes]"
    place: tuple[str, int] | None = None
    problem: str = ""
    last: str = ""
    is_started: bool = False
    code: int | None = None
    killed_by: int = 0
    has_ended: bool = False
    held: dict[int, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, message: dict[str, Any] | None) -> None:
        """Sends it a message; None: only that somebody is still here."""
        assert self.ssh.stdin is not None
        with self.lock, suppress(OSError, ValueError):  # it is gone, as its ssh will show
            write_all(self.ssh.stdin.fileno(), (json.dumps(message) if message else "").encode() + b"\n")


class Agents:
    """Those of all hosts. A `with` block ends them all."""

    def __init__(self, hosts: Sequence[Host], directory: Path, variables: dict[str, str]) -> None:
        self._selector = selectors.DefaultSelector()
        nonce = secrets.token_hex(16)  # what the ranks print is no answer, whatever it begins with
        self._mark = f"{MARK}{nonce} ".encode()
        self._is_closed = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="samestep beats", daemon=True)
        python_path = {name: value for name, value in variables.items() if name == "PYTHONPATH"}
        words = [*(f"{name}={value}" for name, value in python_path.items()), sys.executable]
        command = f"exec env {shlex.join([*words, '-P', '-m', 'samestep.launch.ssh_node'])}"
        self.all: list[Agent] = []
        for host in hosts:
            pipe = subprocess.PIPE
            ssh = subprocess.Popen(
                [*SSH, "--", host.name, command], bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe,
                start_new_session=True,  # Ctrl-C is for this command alone
            )  # fmt: skip
            agent = Agent(host, ssh)
            self.all.append(agent)
            for number, stream in ((1, ssh.stdout), (2, ssh.stderr)):
                assert stream is not None
                agent.held[number] = b""
                self._selector.register(stream, selectors.EVENT_READ, (agent, number))
            agent.tell({"directory": str(directory), "variables": variables, "nonce": nonce})
        self._beats.start()

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *_: object) -> None:
        """Hangs up: what still runs there ends by itself."""
        self._is_closed.set()
        self._beats.join()
        for agent in self.all:
            for stream in (agent.ssh.stdin, agent.ssh.stdout, agent.ssh.stderr):
                assert stream is not None
                stream.close()
        for agent in self.all:
            with suppress(subprocess.TimeoutExpired):
                agent.ssh.wait(KILL_S)
            agent.ssh.kill()
            agent.ssh.wait()
        self._selector.close()

    def _beat(self) -> None:
        while not self._is_closed.wait(BEAT_S):
            for agent in self.all:
                agent.tell(None)

    def poll(self) -> None:
        """Shows what has been said, and notes what has happened."""
        for key, _ in self._selector.select(TICK_S):
            agent, number = key.data
            data = os.read(key.fd, READ_BYTES)
            *lines, agent.held[number] = (agent.held[number] + data).split(b"\n")
            if not data:
                self._selector.unregister(key.fileobj)
                lines = [agent.held.pop(number)]
            for line in lines if data or lines != [b""] else []:
                self._hear(agent, number, line)
            if not agent.held:
                agent.ssh.wait()
                agent.has_ended = True

    def _hear(self, agent: Agent, number: int, line: bytes) -> None:
        line, mark, told = line.partition(self._mark) if number == 1 else (line, b"", b"")
        if mark:
            self._take(agent, json.loads(told))
        if number == 2 and line.strip():
            agent.last = line.decode(errors="replace").strip()
        if agent.is_started and (line or not mark):
            shown = line.rstrip(b"\r").rpartition(b"\r")[2]  # of what was drawn over and over, the end
            text = escape(shown.decode(errors="backslashreplace"))
            with suppress(OSError):  # nobody reads any more: no reason to lose the run
                write_all(number, f"[{agent.host.name}] {text}\n".encode())

    def _take(self, agent: Agent, told: dict[str, Any]) -> None:
        if "address" in told:
            agent.place = (told["address"], told["port"])
        agent.problem = told.get("problem", "")
        if "code" in told:
            agent.code, agent.killed_by = told["code"], told["killed_by"]

    def send(self, signum: int) -> None:
        """Sends a signal to the launchers that run."""
        for agent in self.all:
            if agent.is_started and not agent.has_ended:
                agent.tell({"signal": signum})


def run_hosts(
    hosts: Sequence[Host], command: str, flags: Sequence[str], program: Sequence[str], endpoint: str | None
) -> int:
    """Runs `samestep COMMAND FLAGS PROGRAM` on all hosts, as the nodes of one launch, to their end.

    Args:
        endpoint: where they meet; None: on the first host, at a port that is free there.

    Returns:
        The exit code of the launcher that failed first, which is that of a launch of its own; 0 where none has.

    Raises:
        Error: a host cannot be reached, or has not what is needed there.
    """
    if endpoint is not None:
        parse_endpoint(endpoint)
    if shutil.which(SSH[0]) is None:
        raise Error("--hosts needs ssh, and there is none here: install the OpenSSH client")
    variables = read_passed() | {SECRET: make_secret()}  # by ssh's stdin: no process list shows it
    with Stopping() as stopping, Agents(hosts, Path.cwd(), variables) as agents:
        if not _wait_for_answers(agents, stopping.received):
            return 128 + stopping.received[0]
        endpoint = endpoint or _choose_endpoint(agents.all)
        for rank, agent in enumerate(agents.all):
            own = [] if agent.host.num_ranks is None else ["--nproc-per-node", agent.host.num_ranks]
            nodes = ["--nnodes", str(len(hosts)), "--node-rank", str(rank), "--rdzv-endpoint", endpoint]
            arguments = [command, *flags, *own, *(nodes if len(hosts) > 1 else []), *program]
            agent.is_started = True
            agent.tell({"arguments": arguments})
        return _wait_for_ends(agents, stopping.received)


def _wait_for_answers(agents: Agents, received: Sequence[int]) -> bool:
    """Until all hosts have said that they are ready; False when a signal comes first."""
    deadline_s = time.monotonic() + ANSWER_S
    while any(agent.place is None for agent in agents.all):
        agents.poll()
        if received:
            return False
        for agent in agents.all:
            if agent.problem or (agent.has_ended and agent.place is None):
                raise Error(_explain(agent))
            if agent.place is None and time.monotonic() > deadline_s:
                raise Error(f"host {agent.host.name} has not answered within {ANSWER_S:.0f} s: look what it is at")
    return True


def _explain(agent: Agent) -> str:
    """Why nothing can be started on a host."""
    name, code = agent.host.name, agent.ssh.returncode
    if agent.problem:
        return f"host {name}: {agent.problem}"
    if code == UNREACHED:
        return f"host {name} cannot be reached ({agent.last}): make `ssh {name}` work without a password"
    if code in NOT_FOUND:
        return (
            f"host {name} has no {sys.executable} ({agent.last}): install the same environment there, at the same path"
        )
    return f"host {name} cannot start samestep ({agent.last or f'exit code {code}'}): install what is installed here"


def _choose_endpoint(agents: Sequence[Agent]) -> str:
    """On the first host, by the address that ssh has reached it by: one of its own, and no name."""
    places = [agent.place for agent in agents if agent.place is not None]
    address, port = places[0]
    if not all(each for each, _ in places):
        raise Error("ssh does not say by which addresses it has reached the hosts: give --rdzv-endpoint HOST:PORT")
    is_local = [ipaddress.ip_address(each.partition("%")[0]).is_loopback for each, _ in places]
    if is_local[0] and not all(is_local):
        raise Error(
            f"all hosts meet on the first, and {agents[0].host.name} is this machine under a name that others do not "
            "know it by: name it as they do, or give --rdzv-endpoint HOST:PORT"
        )
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _wait_for_ends(agents: Agents, received: Sequence[int]) -> int:
    """Until nothing runs any more. Returns the exit code."""
    num_sent, code, lost = 0, 0, ""
    limit_s: float | None = None
    ended: list[Agent] = []
    while len(ended) < len(agents.all):
        agents.poll()
        for agent in [agent for agent in agents.all if agent.has_ended and agent not in ended]:
            ended.append(agent)
            if agent.code is None:
                why = f" ({agent.last})" if agent.last.startswith(OF_SSH) else ""
                lost = lost or f"the connection to host {agent.host.name} was lost{why}"
            elif agent.killed_by:
                name = signal.Signals(agent.killed_by).name
                lost = lost or f"the launcher on host {agent.host.name} was killed by {name}"
            code = code or (1 if agent.code is None else agent.code)
            if code and limit_s is None:
                limit_s = time.monotonic() + FOLLOW_S
        while num_sent < len(received):
            agents.send(received[num_sent])
            num_sent += 1
            if num_sent > 1:
                limit_s = time.monotonic() + KILL_S
        if limit_s is not None and time.monotonic() > limit_s:
            break
    if lost and not received:
        say(f"{lost}; the others were stopped")
    return code or (128 + received[-1] if len(ended) < len(agents.all) else 0)
