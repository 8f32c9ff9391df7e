"""A script in which a rank dies after it has sent a part of a message: `partial.py D MOMENT`.

MOMENT is "exchange", "once", "evaluate", "restore" or "never".
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
    moment = sys.argv[2]
    run = samestep.Run(sys.argv[1], batch_size=4, micro_batch_size=1, bucket_cap_mb=32)
    model = torch.nn.Sequential(*(torch.nn.Linear(3072, 3072) for _ in range(3)))  # with a bucket each
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    send = dist.isend
    # Rank 0 sends what `once` and `restore` broadcast.
    doomed = {"exchange": 1, "evaluate": 1, "once": 0, "restore": 0}.get(moment)
    reached = ""

    def send_a_part(*arguments: Any, **options: Any) -> Any:
        work = send(*arguments, **options)
        if reached == moment and os.environ["RANK"] == str(doomed):
            deadline_s = time.monotonic() + 30
            while count_unsent() < LEAST_BYTES and time.monotonic() < deadline_s:
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return work

    dist.isend = send_a_part
    for step in run.steps(torch.randn(16, 3072), 5):
        if step.number == DOOMED:
            reached = "once"
            assert len(run.once(bytes, 32 << 20)) == 32 << 20
            reached = "evaluate"
            texts = run.evaluate(lambda batch: {"text": ["x" * (2 << 20)] * len(batch)}, range(8))["text"]
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
