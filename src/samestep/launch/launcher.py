"""What `samestep launch` and `train` do: start ranks, pass signals on to them, say which failed and why."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from samestep.config import Overrides
from samestep.console import escape, say
from samestep.errors import Error
from samestep.launch.forkserver import ForkServer, is_preloaded
from samestep.launch.local_ranks import MOST_LOCAL_RANKS, Failure, Ranks, Target, parse_shown
from samestep.world.environment import (
    FINISHED,
    START_AGAIN,
    STOPPED,
    child_variables,
    stop_code,
)

if TYPE_CHECKING:
    from samestep.launch.rendezvous_client import Nodes

MOST_RANKS = 1 << 16  # where it is not known yet how many there are


class Stopping:
    """The signals that this process is sent while it is entered. Ranks are told of the first, killed at the second."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Stopping":
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            before = signal.getsignal(signum)
            if before is not signal.SIG_IGN:  # as nohup and & of a shell have it
                self._before[signum] = before
                signal.signal(signum, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # see cli.main
        return self

    def __exit__(self, *_: object) -> None:
        for signum, before in self._before.items():
            signal.signal(signum, before)  # type: ignore[arg-type]

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)


def check_target(target: Target) -> None:
    """Raises Error where there is no such script or module, before anything is started."""
    if target.kind == "script":
        path = Path(target.name)
        if path.is_dir():
            raise Error(f"{target.name} is a directory, not a script")
        if not path.is_file():
            raise Error(f"there is no script {target.name} (in {Path.cwd()})")
        if not os.access(path, os.R_OK):
            raise Error(f"{target.name} cannot be read (Permission denied): let this user read it, or name another")
    elif target.kind == "module":
        from importlib.machinery import PathFinder

        package = target.name.partition(".")[0]
        found = PathFinder.find_spec(package, [os.getcwd(), *sys.path])
        if found is None and package not in sys.stdlib_module_names:
            raise Error(f"there is no module {package} here or among the installed ones")


def parse_num_ranks(text: str) -> int | None:
    """A number of ranks as given; None for those that only torch can count ("gpu", "auto"). Raises Error otherwise."""
    if text in ("gpu", "auto"):
        return None
    if text == "cpu":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        num_ranks = int(text)
    except ValueError:
        raise Error(f"--nproc-per-node takes a number, gpu, cpu or auto, not {text!r}") from None
    if num_ranks < 1:
        raise Error(f"--nproc-per-node must be at least 1, not {num_ranks}")
    if num_ranks > MOST_LOCAL_RANKS:
        raise Error(f"--nproc-per-node must be at most {MOST_LOCAL_RANKS}, not {num_ranks}")
    return num_ranks


@contextmanager
def say_when_slow(text: str, after_s: float = 2.0) -> Iterator[None]:
    """Prints `text` on a terminal at stderr if the block takes longer than `after_s`.

    It uses a signal, since no thread may run when the server is forked.
    """
    if not os.isatty(2):
        yield
        return

    def say(*_: object) -> None:
        with suppress(OSError):
            os.write(2, f"samestep: {text}\n".encode())

    before = signal.signal(signal.SIGALRM, say)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _open_server(overrides: Overrides, num_ranks: str) -> ForkServer:
    """Imports torch once, for this process and the ranks; what only ranks need is imported by the server meanwhile."""
    is_program = "torch" not in sys.modules or is_preloaded()
    if not is_program or threading.active_count() > 1:
        return ForkServer()  # This is not the program `samestep`: no forks from what it has done so far.
    gc.disable()  # Imports are a quarter faster without.
    # Before numpy is imported and starts threads, which do not survive a fork.
    os.environ.update({"OMP_NUM_THREADS": str(overrides.get("num_threads", 1)), **child_variables()})
    ranks = "1 rank" if num_ranks == "1" else f"{num_ranks} ranks" if num_ranks.isdecimal() else "ranks"
    with say_when_slow(f"starting {ranks}"):
        import torch  # noqa: F401

    server = ForkServer(fork=True)
    gc.freeze()
    gc.enable()
    return server


def _count_ranks(text: str, device: str | None) -> int:
    import torch

    num_gpus = torch.cuda.device_count()
    if text == "gpu" and num_gpus == 0:
        raise Error("--nproc-per-node gpu: torch sees no GPU here; give a number of ranks, or cpu for one per core")
    return 1 if text == "auto" and device == "cpu" else max(num_gpus, 1)


def run_launch(
    target: Target,
    *,
    num_ranks: str,
    show_ranks: str,
    overrides: Overrides,
    max_restarts: int = 0,
    nodes: "Nodes | None" = None,
) -> int:
    """Runs ranks to their end and reports what failed.

    Args:
        target: what each rank runs.
        num_ranks: a number, "gpu", "cpu" (one per core), or "auto": one per GPU, else 1.
        show_ranks: whose output goes to the terminal: "all", or ranks such as "0,2".
        overrides: options of `Run` that replace those of the script.
        max_restarts: how often all ranks are started again when one has failed, other than by an Error.
        nodes: the others; None: there are none.

    Returns:
        0; the exit code of the rank that failed first (128 + signal where one killed it). After Ctrl-C 130. After
        SIGTERM or SIGUSR1 75 when every rank ended well (the same command goes on), else 128 + signal; but 0 when
        the run was at its end.

    Raises:
        Error: no such script, no such ranks, or nodes that do not come together.
    """
    check_target(target)
    if max_restarts < 0:
        raise Error(f"--max-restarts must be at least 0, not {max_restarts}")
    known = parse_num_ranks(num_ranks)
    if known is not None and nodes is None:
        parse_shown(show_ranks, known)
    with Stopping() as stopping:
        server = _open_server(overrides, num_ranks)
        try:
            from samestep.launch.supervisor import Launch, run_agent, run_node_agent

            count = known or _count_ranks(num_ranks, overrides.get("device"))
            ranks = Ranks(server, parse_shown(show_ranks, count if nodes is None else MOST_RANKS))

            def report(failure: Failure, then: str) -> None:
                _report(failure, ranks, then)

            launch = Launch(target, count, overrides, stopping.received, max_restarts, report)
            try:
                if nodes is None:
                    run_agent(ranks, launch)
                    code = _conclude(ranks, stopping.received)
                else:
                    end = run_node_agent(ranks, launch, nodes)
                    code = _conclude_on_nodes(ranks, stopping.received, end)
            finally:
                ranks.close()
        finally:
            server.close()
    return code


def _conclude(ranks: Ranks, received: list[int]) -> int:
    """Reports the failure, if any, and finds the exit code."""
    if any(code < 0 for code in ranks.codes.values()) and sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # A progress bar may have hidden the cursor.
    failure = ranks.first_failure()
    was_told = ranks.told_to_stop or not ranks.num_ranks  # or there were none yet: the other nodes had not come
    if received and was_told and (failure is None or failure.secondary or -failure.code in received):
        if len(received) == 1 and ranks.done and not any(ranks.codes.values()):
            if (ranks.directory / FINISHED).exists() and not (ranks.directory / STOPPED).exists():
                return 0  # it was at its end
            return stop_code(received[0])
        return 128 + received[-1]
    if failure is None:  # a rank that was told by someone else has had all ranks stop and save
        if any(ranks.codes.values()) or not ranks.done:  # they were stopped, and nobody has said why
            return 1
        return START_AGAIN if (ranks.directory / STOPPED).exists() else 0
    _report(failure, ranks)
    return failure.exit_code


def _conclude_on_nodes(ranks: Ranks, received: list[int], end: dict[str, Any]) -> int:
    """As `_conclude`; what went wrong elsewhere is told in a line."""
    failure = ranks.first_failure()
    said = end.get("message") or end.get("failure")
    if not said or received or (failure is not None and not failure.secondary):
        code = _conclude(ranks, received)
        # A node that has just joined has no ranks that say how the run has ended.
        return START_AGAIN if code == 0 and not received and not end.get("is_whole") else code
    if end["message"]:
        print(f"samestep: error: {escape(said)}", file=sys.stderr)
    else:
        say(f"{said}; the others were stopped")
    return int(end["code"])


def _report(failure: Failure, ranks: Ranks, then: str = "") -> None:
    """Says what failed; last, and once, the reason.

    Args:
        then: what follows from it, where that is not the end.
    """
    lines: list[str] = []
    if failure.kind == "error":
        lines.append(f"samestep: error: {failure.message}")
    elif failure.kind != "exit" or failure.rank not in ranks.shown:  # who exits, and is shown, has said why
        if failure.log and not failure.traceback:
            where = ranks.find_log(failure.rank)
            lines += [f"samestep: the end of rank {failure.rank}'s output{where and f' ({where})'}:", failure.log]
        own = [other for other in ranks.failures if other.rank != failure.rank and not other.secondary]
        too = [other.rank for other in own if other.message == failure.message]
        lines += [f"samestep: {other.reason}" for other in own if other.rank not in too]
        others = ""
        if ranks.world_size > 1:
            others = f"; so did {', '.join(map(str, sorted(too)))}" if too else "; the others were stopped"
        if failure.traceback:
            lines += [f"samestep: rank {failure.rank} of {ranks.world_size} failed{others}"] if others else []
            lines.append(failure.traceback.rstrip("\n"))
        elif not then:
            lines.append(f"samestep: {failure}{others}")
    if then:
        lines.append(f"samestep: {failure.reason}{then}")
    for line in lines:
        print(escape(line), file=sys.stderr)
