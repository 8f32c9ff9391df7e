"""A script in which a rank dies after it has sent a part of a message: `partial.py D MOMENT`.

MOMENT is "exchange", "once" or "never". The rank stops the others when they wait for its
message, sends what the connection's buffers hold, and dies.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import samestep
from samestep.engine import buckets
from samestep.torch_internals import list_gloo_sockets
from samestep.waiting import wait_until

DOOMED = 3
BUFFER_BYTES = 1 << 16  # of a connection, on each side
LEAST_BYTES = 1 << 14  # unsent, of the message that is cut
DEADLINE_S = 30.0


def count_unsent() -> int:
    """The largest number of bytes that one of gloo's connections has in its buffer."""
    counts = [0]
    for fd in list_gloo_sockets():
        with suppress(OSError):
            counts.append(int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder))
    return max(counts)


def limit_buffers() -> None:
    for fd in list_gloo_sockets():
        with socket.socket(fileno=os.dup(fd)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)


def stop(pids: list[int]) -> None:
    """Stop processes until this one has died."""
    shell = f"read line; kill -CONT {' '.join(map(str, pids))}"
    subprocess.Popen(["sh", "-c", shell], stdin=subprocess.PIPE, start_new_session=True)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    # Until its last thread has stopped, gloo's thread receives.
    wait_for(lambda: all(map(is_stopped, pids)))


def is_stopped(pid: int) -> bool:
    states = [path.read_text().rpartition(") ")[2][0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def wait_for(condition: Callable[[], bool]) -> None:
    if not wait_until(condition, DEADLINE_S, every_s=0.001):
        print("no part of a message was sent", condition.__qualname__, count_unsent(), flush=True)


def main() -> None:
    moment = sys.argv[2]
    buckets.MAX_BYTES = 1 << 20
    run = samestep.Run(sys.argv[1], batch_size=4, micro_batch_size=1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))  # with a bucket each
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    send, receive = dist.isend, dist.irecv
    doomed = {"exchange": 1, "once": 0}.get(moment)  # rank 0 sends what `once` broadcasts
    reached = ""
    rank, pids = run.rank, [0] * run.world_size  # at the start
    dist.all_gather_object(pids, os.getpid())
    limit_buffers()  # before they grow

    def is_cut(tensor: torch.Tensor) -> bool:
        return reached == moment and tensor.nbytes >= 4 * BUFFER_BYTES

    def send_a_part(tensor: torch.Tensor, peer: int, **options: Any) -> Any:
        if not is_cut(tensor) or rank != doomed:
            return send(tensor, peer, **options)
        wait_for(awaited(peer).exists)  # Before that gloo sends nothing.
        stop([pid for pid in pids if pid != os.getpid()])
        work = send(tensor, peer, **options)
        wait_for(lambda: count_unsent() >= LEAST_BYTES)
        os.kill(os.getpid(), signal.SIGKILL)
        return work

    def note_and_receive(tensor: torch.Tensor, peer: int, **options: Any) -> Any:
        work = receive(tensor, peer, **options)
        if is_cut(tensor) and peer == doomed:
            awaited(rank).touch()
        return work

    def awaited(rank: int) -> Path:
        return Path(f"{sys.argv[1]}.awaited-by-{rank}")

    dist.irecv = note_and_receive
    dist.isend = send_a_part
    for step in run.steps(torch.randn(16, 512), 5):
        if step.number == DOOMED:
            reached = "once"
            assert len(run.once(bytes, 1 << 20)) == 1 << 20
            reached = "exchange"
        for x in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        reached = ""


if __name__ == "__main__":
    main()
