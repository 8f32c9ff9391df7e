"""A script with two runs, one after the other: `folds.py D N`. Rank 1 dies in run N of the first start."""

import os
import signal
import sys

import torch

import samestep


def train(run_dir: str, *, is_fatal: bool) -> None:
    run = samestep.Run(run_dir, batch_size=4, micro_batch_size=1, log_every=1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    for step in run.steps(torch.ones(16, 2), 6):
        for x in step:
            if is_fatal and step.number == 3 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(model(x).mean())
        optimizer.step()
    run.print(run.evaluate(lambda batch: {"mean": model(batch).mean()}, torch.ones(5, 2)))


is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for fold in range(2):
    train(f"{sys.argv[1]}/{fold}", is_fatal=is_first_start and str(fold) == sys.argv[2])
