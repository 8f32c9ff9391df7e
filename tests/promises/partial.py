"""A script whose rank 1 dies in step 3 after it has sent a part of a message: `partial.py D`.

With a word after D, it does not die.
"""

import fcntl
import os
import signal
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
LEAST_BYTES = 1 << 16  # more than all other messages have


def count_unsent() -> int:
    """The largest number of bytes that one of gloo's connections has in its buffer."""
    counts = [0]
    for fd in list_gloo_sockets():
        with suppress(OSError):
            counts.append(int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder))
    return max(counts)


def main() -> None:
    run = samestep.Run(sys.argv[1], batch_size=4, micro_batch_size=1, bucket_cap_mb=32)
    model = torch.nn.Sequential(*(torch.nn.Linear(3072, 3072) for _ in range(3)))  # with a bucket each
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    send = dist.isend
    step_number = -1

    def send_a_part(*arguments: Any, **options: Any) -> Any:
        work = send(*arguments, **options)
        if step_number == DOOMED and os.environ["RANK"] == "1" and not sys.argv[2:]:
            deadline_s = time.monotonic() + 30
            while count_unsent() < LEAST_BYTES and time.monotonic() < deadline_s:
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return work

    dist.isend = send_a_part
    for step in run.steps(torch.randn(16, 3072), 5):
        step_number = step.number
        for x in step:
            step.backward(model(x).square().mean())
        optimizer.step()


if __name__ == "__main__":
    main()
