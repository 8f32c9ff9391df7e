"""A script that starts a program, as `os.system("program &")` does: `inherited.py D FIFO`. Then rank 3 dies.

The program inherits gloo's connections of all ranks, and ends with the last writer of FIFO.
"""

import os
import signal
import sys

import torch

import samestep


def start_program(fifo: str) -> None:
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]
    os.posix_spawn("/bin/cat", ["cat", fifo], os.environ, file_actions=null)


def main() -> None:
    run = samestep.Run(sys.argv[1], batch_size=4, micro_batch_size=1, bucket_cap_mb=4)
    # The backward waits for gloo: the buckets are too large for messages to all ranks, and more than one.
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    for step in run.steps(torch.ones(16, 1024), 6):
        if step.number == 1:
            start_program(sys.argv[2])
        for x in step:
            if step.number == 3 and os.environ["RANK"] == "3":
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(model(x).mean())
        optimizer.step()


if __name__ == "__main__":
    main()
