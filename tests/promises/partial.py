"""A script in which a rank dies after it has sent a part of a message: `partial.py D MOMENT`.

MOMENT is "exchange", "once", "evaluate", "restore" or "never". The rank stops the others while it sends, so that the
message fills the buffers of the connection, and dies in that state.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

import samestep
from samestep.torch_internals import list_gloo_sockets

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


def main() -> None:
    moment = sys.argv[2]
    run = samestep.Run(sys.argv[1], batch_size=4, micro_batch_size=1, bucket_cap_mb=1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))  # with a bucket each
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    send = dist.isend
    # Rank 0 sends what `once` and `restore` broadcast.
    doomed = {"exchange": 1, "evaluate": 1, "once": 0, "restore": 0}.get(moment)
    reached = ""
    pids: list[int] = [0] * run.world_size
    dist.all_gather_object(pids, os.getpid())

    def send_a_part(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if reached != moment or os.environ["RANK"] != str(doomed) or tensor.nbytes < 4 * BUFFER_BYTES:
            return send(tensor, *arguments, **options)
        stop([pid for pid in pids if pid != os.getpid()])
        work = send(tensor, *arguments, **options)
        deadline_s = time.monotonic() + DEADLINE_S
        while count_unsent() < LEAST_BYTES:
            if time.monotonic() > deadline_s:
                print("the whole message was sent", flush=True)
                break
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
        return work

    dist.isend = send_a_part
    for step in run.steps(torch.randn(16, 512), 5):
        if step.number == DOOMED:
            limit_buffers()
            reached = "once"
            assert len(run.once(bytes, 1 << 20)) == 1 << 20
            reached = "evaluate"
            texts = run.evaluate(lambda batch: {"text": ["x" * (1 << 18)] * len(batch)}, range(8))["text"]
            assert len(texts) == 8
            reached = "exchange"
        for x in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        reached = ""
    reached = "restore"
    run.restore("latest")
    reached = ""


if __name__ == "__main__":
    main()
