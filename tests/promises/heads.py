"""A script with a call of the run at the head of each epoch, whose rank 1 dies in step 1: `heads.py D [lives]`."""

import os
import signal
import sys

import torch

import samestep
from samestep.waiting import wait_until

JOIN_S = 60.0  # for another rank to be ready


def main() -> None:
    run = samestep.Run(sys.argv[1], batch_size=4, micro_batch_size=1, device="cpu")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    num_ranks = int(os.environ["WORLD_SIZE"])
    for epoch in run.epochs(torch.randn(16, 2), 3):
        factor = run.once(lambda: 1.0 + epoch.number)  # noqa: B023
        for step in epoch:
            for x in step:
                if step.number == 1 and os.environ["RANK"] == "1" and not sys.argv[2:]:
                    os.kill(os.getpid(), signal.SIGKILL)
                step.backward(factor * model(x).square().mean())
            if run.world_size < num_ranks:
                wait_until(lambda: run._context.group.is_asked, JOIN_S)
            optimizer.step()


if __name__ == "__main__":
    main()
