"""A script in which a rank dies at a moment that faulty.py does not have: `moments.py D MOMENT`.

"moved": rank 0 dies after the script has changed the directory.
"stop": after `run.stop()`.
"start": rank 0 dies before its first step.
"stuck": rank 2 dies, and rank 0 stops in the new group, before its first heartbeat there.
"before once", "in once", "after once": rank 0 dies around a call that it makes alone. Any other MOMENT: none dies.
"""

import os
import signal
import sys

import torch

import samestep
from samestep.train.guards.watchdog import Watchdog

DIES_AT = 2
NUM_STEPS = 6


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    directory, moment = sys.argv[1:]
    if moment == "moved":
        directory = os.path.relpath(directory)
    run = samestep.Run(directory, batch_size=6, micro_batch_size=1, device="cpu", snapshot_every=2)
    number = run.rank
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    if moment == "stuck" and number == 0:
        Watchdog.change_group = lambda watchdog: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign]
    data = torch.arange(24.0).view(12, 2) / 12
    steps = run.steps(data, 2 * NUM_STEPS if moment == "stop" else NUM_STEPS)
    if moment == "start" and number == 0 and not os.path.exists(f"{directory}-started"):
        with open(f"{directory}-started", "w"):
            die()
    if moment == "moved":
        os.makedirs(f"{directory}-other", exist_ok=True)
        os.chdir(f"{directory}-other")
    number_of_step = 0

    def reach(where: str, rank: int = 0) -> None:
        if (where, rank, number_of_step) == (moment, number, DIES_AT):
            die()

    def draw() -> list[float]:
        drawn = torch.rand(2).tolist()
        reach("in once")
        return drawn

    for step in steps:
        number_of_step = step.number
        for x in step:
            step.backward(model(x).square().mean())
            if step.number >= DIES_AT:
                step.log(loss2=2.0 * x.sum())
            reach("moved")
            reach("stuck", rank=2)
        optimizer.step()
        reach("before once")
        run.log(drawn=run.once(draw)[1], next=torch.rand(()).item())
        reach("after once")
        run.log(run.evaluate(lambda batch: {"score": model(batch).mean(), "sum": batch.sum()}, data))
        if moment == "stop" and step.number == NUM_STEPS - 1:
            run.stop("enough")
            if number == 1:
                die()


if __name__ == "__main__":
    main()
