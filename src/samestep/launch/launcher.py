"""`samestep launch` and `train`: starts ranks, forwards signals, and reports which rank failed and why."""

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.console import print_error
from samestep.errors import Error, add_code
from samestep.launch.forkserver import ForkServer
from samestep.launch.local_ranks import Ranks
from samestep.launch.rank_process import FORWARDED_SIGNALS
from samestep.launch.target import Target
from samestep.world.environment import set_hook

if TYPE_CHECKING:
    from samestep.launch.nodes import Nodes


def record_signals() -> list[int]:
    """Record the signals to stop that this process receives from now on.

    The first is forwarded to the ranks; the second kills them.
    """
    received: list[int] = []
    for signum in FORWARDED_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, and & in a shell, ignore some
            signal.signal(signum, lambda number, _: received.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # see cli.main
    return received


def check_target(target: Target) -> None:
    """Raise Error, before anything is started, if there is no such script."""
    path = Path(target.name)
    if target.kind == "script" and not (path.is_file() and os.access(path, os.R_OK)):
        raise Error(f"there is no script {target.name} that can be read (in {Path.cwd()})", code="SS110")


def _count_ranks(device: str | None) -> int:
    import torch

    return 1 if device == "cpu" else max(torch.cuda.device_count(), 1)


def run_launch(target: Target, values: dict[str, Any], nodes: "Nodes | None") -> int:
    """Run ranks to their end and report the failure, if any.

    Args:
        values: options of `samestep launch`, and those of `Run`, which replace the script's.
        nodes: the nodes of the launch; None: only this machine.

    Returns:
        0, or the exit code of the rank that failed first (128 + signal if a signal killed it). After Ctrl-C 130. After
        SIGTERM or SIGUSR1 75 if every rank has saved and ended (the same command continues the run), else 128 +
        signal; but 0 if the run has reached its end.

    Raises:
        Error: there is no such script, an argument is invalid, or the nodes do not join.
    """
    check_target(target)
    num_ranks = values.pop("nproc_per_node", None)  # default: one per GPU, else 1
    shows_all = values.pop("show_all", False)
    max_restarts = values.pop("max_restarts", 0)
    heals = values.pop("heal", False)
    if values.pop("tf_config", False):
        set_hook("samestep.launch.tf_config")
    received = record_signals()
    # Before numpy is imported and starts threads, which a fork does not copy.
    os.environ.setdefault("OMP_NUM_THREADS", str(values.get("num_threads") or 1))  # noqa: TID251
    with closing(ForkServer(fork=True)) as server:
        from samestep.launch.agent import Launch, run_agent

        count = num_ranks or _count_ranks(values.get("device"))
        with closing(Ranks(server, shows_all=shows_all)) as ranks:
            end = run_agent(ranks, Launch(target, count, values, received, max_restarts, heals), nodes)
            if end.message:
                print_error(f"samestep: error: {add_code(end.message, end.error_code)}")
            return end.code
