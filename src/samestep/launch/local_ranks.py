"""The processes of the ranks on this machine: starts and signals them, and reads why one has failed."""

import errno
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from samestep.config import PREFIX, Overrides, to_variables
from samestep.console import print_error
from samestep.errors import Error, Stuck, add_code
from samestep.files import open_regular, read_tail, read_text, replace_file
from samestep.launch.failure import RankFailure, describe_death, read_failure, write_failure
from samestep.launch.forkserver import ForkServer
from samestep.launch.node_messages import Ended, Report, Start
from samestep.launch.target import Target
from samestep.processes import kill_group
from samestep.world.environment import (
    FAILURE,
    HEAL,
    OUTCOME,
    SECRET,
    Outcome,
    child_variables,
)
from samestep.world.workdir import create_workdir, make_private

HOST = "127.0.0.1"
LOOPBACK = "lo" if sys.platform == "linux" else ""  # else gloo resolves the host's name
POLL_S = 0.1
TAIL_LINES = 20
DEAD_SERVER = (
    "the process that starts the ranks has died or was killed (out of memory?), and the ranks with it: look into the "
    "system's log, and start again"
)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL)


def build_variables(
    num_ranks: int, start: Start, overrides: Overrides, secret: str, *, host: str = HOST, interface: str = LOOPBACK
) -> list[dict[str, str]]:
    """Build the environment of each of the `num_ranks` ranks on this machine.

    Args:
        secret: shared by all ranks of all nodes.
        host: where the ranks' store is.
        interface: the network interface to the other ranks; "" if unknown.
    """
    backends = ("GLOO", "NCCL") if start.num_nodes > 1 else ("GLOO",)
    common = {
        "OMP_NUM_THREADS": str(overrides.get("num_threads") or 1),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for determinism; read when CUDA starts
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0" if start.heals else "1",  # 1 ends a rank if another one has died
        **({f"{backend}_SOCKET_IFNAME": interface for backend in backends} if interface else {}),
        **child_variables(),
        **to_variables(overrides),
        **(start.restart.to_variables() if start.restart is not None else {}),
        SECRET: secret,
        **({HEAL: "1"} if start.heals else {}),
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": str(start.node),
        "GROUP_WORLD_SIZE": str(start.num_nodes),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(start.port),
        # Makes init_process_group connect to the existing store instead of opening one in rank 0.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(start.num_restarts),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": str(start.port),
    }
    return [{**common, "RANK": str(start.first_rank + i), "LOCAL_RANK": str(i)} for i in range(num_ranks)]


def open_store(address: str = HOST, port: int = 0) -> Any:  # TCPStore
    """Open a rendezvous store at an address of this machine ("": all IPv4 ones). Port 0 is a free one.

    Raises Error if the port cannot be opened.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        raise Error(f"port {port} {reason} here: choose another one, on all nodes", code="SS509") from None
    host = address or "localhost"
    port = listener.getsockname()[1]
    limit = timedelta(seconds=300)
    return TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())


class Ranks:
    """The ranks on this machine, forked by one server. When all have ended, `start` can start them again.

    Attributes:
        directory: temporary; the ranks write reports into it. `close` removes it.
        shows_all: whether the output of all ranks goes to the terminal, not only that of rank 0.
        pids: of the ranks that run.
    """

    def __init__(self, server: ForkServer, *, shows_all: bool = False) -> None:
        self.directory = create_workdir()
        self.shows_all = shows_all
        self.pids: dict[int, int] = {}
        self._server = server

    def start(self, target: Target, variables: list[dict[str, str]]) -> None:
        """Request one rank per element of `variables`, its whole environment. Returns before the processes exist."""
        try:
            make_private(self.directory)
        except PermissionError as error:
            raise Error(str(error), code="SS513") from None
        for path in self.directory.iterdir():
            if path.name == OUTCOME or path.suffix in (".json", ".log"):
                path.unlink()
        numbers = [int(own["RANK"]) for own in variables]
        marks = {PREFIX + "LAUNCHER": target.kind, PREFIX + "ERROR_DIR": str(self.directory)}
        self._server.start(
            [
                {"rank": rank, "variables": {**own, **marks}, "is_shown": self.is_shown(rank)}
                for rank, own in zip(numbers, variables, strict=True)
            ],
            target=asdict(target),
            cwd=os.getcwd(),
            directory=str(self.directory),
        )

    def is_shown(self, rank: int) -> bool:
        """Return whether the output of a rank goes to the terminal."""
        return self.shows_all or rank == 0

    def poll(self) -> list[Ended]:
        """Return which ranks have ended since the last call, waiting up to `POLL_S` for it.

        Raises Error if the server has ended, and the ranks with it.
        """
        try:
            event = self._server.receive(POLL_S)
        except (EOFError, OSError):
            event = {"error": DEAD_SERVER}
        if event is None:
            return []
        if "error" in event:
            for pid in self.pids.values():
                kill_group(pid)
            self.pids = {}
            raise Error(event["error"], code="SS513")
        if "started" in event:
            self.pids = event["started"]
            return []
        return [self._end(event["rank"], event["code"], event["time_s"], event["signals"])]

    def signal(self, signum: int, *, spares: bool = False) -> None:
        """Send a signal to the ranks; SIGKILL goes to their children, too.

        A run completes its step, saves and ends after SIGTERM; other programs are killed by it.

        Args:
            spares: leave out ranks that have reported an error. They complete a snapshot that they are writing, and end
                within `processes.LEAVE_S`.
        """
        spared = [rank for rank in self.pids if spares and read_failure(rank, self.directory) is not None]
        self._server.signal(signum, spared)

    def end_stuck(self, rank: int, reason: str) -> None:
        """Kill a rank that does not respond. `reason`: a sentence, for the failure."""
        if pid := self.pids.get(rank):
            write_failure(rank, str(self.directory), Stuck(reason), 1)
            kill_group(pid)

    def report(self, report: Report) -> None:
        """Print the failure of a rank, whose output is complete; the reason comes last, and once."""
        failure = self.complete(report.failure)
        log = self.find_log(failure.rank)
        if log and not failure.secondary:
            content = json.dumps({"rank": failure.rank, "reason": failure.reason})
            with suppress(OSError):
                replace_file(Path(log).with_name(FAILURE), content.encode())
        others = "; the others were stopped" if report.world_size > 1 else ""
        is_said = failure.kind == "exit" and self.is_shown(failure.rank)  # it has printed its reason
        if failure.kind == "error":
            print_error(f"samestep: error: {add_code(failure.message, failure.error_code)}")
        elif failure.traceback:
            if others:
                print_error(f"samestep: rank {failure.rank} of {report.world_size} failed{others}")
            print_error(failure.traceback.rstrip("\n"))
        elif failure.log:
            print_error(f"samestep: the end of rank {failure.rank}'s output{log and f' ({log})'}:\n{failure.log}")
        if report.then:
            print_error(f"samestep: {failure.reason}{report.then}")
        elif not (failure.kind == "error" or failure.traceback or is_said):
            print_error(f"samestep: {failure}{others}")

    def complete(self, failure: RankFailure) -> RankFailure:
        """Add what the rank's output says."""
        try:
            text = read_tail(Path(self.find_log(failure.rank) or self.directory / f"rank{failure.rank}.log"))
        except OSError:
            text = ""
        log = "\n".join(text.splitlines()[-TAIL_LINES:])
        return failure if self.is_shown(failure.rank) else replace(failure, log=log)

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def find_log(self, rank: int) -> str:
        """Return the path of a rank's log in the run's directory; "" if the run has not started or has no directory."""
        try:
            return os.readlink(self.directory / f"rank{rank}.log")
        except OSError:
            return ""

    def _end(self, rank: int, code: int, time_s: float, signals: Sequence[int]) -> Ended:
        """Note the end of a rank. `signals`: which it was sent."""
        self.pids.pop(rank)
        # A rank that ends by the signal that it was sent has not failed.
        is_obedient = -code in (signals if code == -signal.SIGKILL else STOP_SIGNALS) and bool(signals)
        failure = read_failure(rank, self.directory) if code else None
        if code and not is_obedient and failure is None:
            failure = RankFailure(rank, time_s, code, False, "died", describe_death(code))
        if failure is not None:
            log = self.find_log(rank)
            if log and failure.traceback and not failure.secondary:  # not printed by the rank
                with suppress(OSError), open(log, "a", opener=open_regular) as file:
                    file.write(failure.traceback)
        outcome = Outcome.UNKNOWN
        with suppress(OSError, ValueError):  # no run has noted how it has ended
            outcome = Outcome(read_text(self.directory / OUTCOME))
        return Ended(rank, code, time_s, failure, outcome)
