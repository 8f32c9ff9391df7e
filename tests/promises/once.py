"""A script that draws numbers on rank 0 only: `once.py D WHEN`, where rank 0 dies `WHEN` step 3 calls `run.once`."""

import os
import signal
import sys

import torch

import samestep

DOOMED = 3


def main() -> None:
    run = samestep.Run(sys.argv[1], batch_size=4, micro_batch_size=1, log_every=1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    for step in run.steps(torch.ones(16, 2), 6):
        for x in step:
            step.backward(model(x).mean())
        optimizer.step()

        def die(when: str, number: int = step.number) -> None:
            if sys.argv[2] == when and os.environ["RANK"] == "0" and number == DOOMED:
                os.kill(os.getpid(), signal.SIGKILL)

        def draw() -> list[float]:
            drawn = torch.rand(2).tolist()
            die("in")
            return drawn

        die("before")
        drawn = run.once(draw)
        die("after")
        run.log(drawn=drawn[1], next=torch.rand(()).item())


if __name__ == "__main__":
    main()
