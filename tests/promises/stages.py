"""Two stages: `stages.py D`. On 6 ranks, rank 1 dies in a backward pass, and rank 4 in an evaluation."""

import os
import signal
import sys

import torch
from torch import Tensor, nn

import samestep


def die(where: str) -> None:
    if (os.environ["WORLD_SIZE"], os.environ["RANK"], where) in {("6", "1", "backward 2"), ("6", "4", "score 4")}:
        os.kill(os.getpid(), signal.SIGKILL)


run = samestep.Run(sys.argv[1], batch_size=24, micro_batch_size=2, pipeline=2, snapshot_every=2, log_every=1)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4), nn.Linear(4, 8))
model[4].weight = model[0].weight
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.prepare(model=model, optimizer=optimizer, stages=["3"])


def compute_loss(x: Tensor) -> Tensor:
    y: Tensor = model(x)
    y.register_hook(lambda _: die(f"backward {step.number}"))
    return y.square().mean()


def score(x: Tensor) -> dict[str, Tensor]:
    die(f"score {step.number}")
    return {"mean": model(x).mean()}


for step in run.steps(torch.randn(96, 4), 8):
    step.run(compute_loss)
    run.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if step.number % 2 == 0:
        run.log({"mean": run.evaluate(score, torch.ones(12, 4), micro_batch_size=2)["mean"]})
