"""A script with calls of the run at each place where a rank can join: `heads.py D HOW WHEN`.

HOW it loops is "epochs", "steps" with a sampler, or "loops", two of them. Or the file is "edited" before another rank
starts. Rank 1 dies WHEN this number of steps is done, or in the call at the "head" of epoch 1, or never. Then each step
waits until another rank is ready to join, or has been refused.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import samestep
from samestep.waiting import wait_until

JOIN_S = 60.0  # for another rank to be ready


def main() -> None:
    directory, how, when = sys.argv[1:]
    refused = Path(f"{directory}-refused")
    try:
        run = samestep.Run(directory, batch_size=4, micro_batch_size=1, device="cpu", snapshot_every=2)
    except samestep.Error:
        refused.touch()
        raise
    run.log(started=1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    run.log(prepared=1)
    num_ranks = int(os.environ["WORLD_SIZE"])
    data = torch.randn(16, 2)

    def reach(moment: str) -> None:
        if moment == when and os.environ["RANK"] == "1" and "SAMESTEP_JOIN" not in os.environ:
            if how == "edited":
                with open(__file__, "a") as file:
                    file.write("# edited")
            os.kill(os.getpid(), signal.SIGKILL)

    def train(step: Any, factor: float) -> None:
        for x in step:
            reach(str(run.steps_done))
            step.backward(factor * model(x).square().mean())
        if run.world_size < num_ranks:
            wait_until(lambda: run._context.group.is_asked or refused.exists(), JOIN_S)
        optimizer.step()

    if how == "steps":
        steps = run.steps(data, 12, sampler=lambda epoch: [(5 * i + epoch) % 16 for i in range(16)])
        factor = run.once(lambda: 2.0)
        for step in steps:
            train(step, factor)
        return
    if how == "loops":
        for num_steps in (4, 8):
            factor = run.once(lambda: 1.0 + num_steps)  # noqa: B023
            for step in run.steps(data, num_steps):
                train(step, factor)
        return
    epochs = run.epochs(data, 3)
    offset = run.once(lambda: 1.0)
    for epoch in epochs:
        if epoch.number == 1:
            reach("head")
        factor = run.once(lambda: offset + epoch.number)  # noqa: B023
        for step in epoch:
            train(step, factor)
        run.log(run.evaluate(lambda x: {"mean": model(x).mean()}, data[:5]))


if __name__ == "__main__":
    main()
