"""Several loops, whose samples follow from losses and drawn numbers, and calls before, between and after them."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

run = samestep.Run("runs/phases", batch_size=24, micro_batch_size=4, log_every=1)
x = torch.randn(60, 5, generator=torch.Generator().manual_seed(4))
first = TensorDataset(x, x.sum(1, keepdim=True).sin())
second = TensorDataset(x[:44], x[:44].prod(1, keepdim=True))
model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
model[0].requires_grad_(False)
optimizer = torch.optim.Adam(model[3].parameters(), lr=1e-2)
run.prepare(model=model, optimizer=optimizer)


def sample(epoch):
    assert run.state.get("steps", 0) == run.steps_done, "the sampler is called when the epoch begins"
    return torch.randperm(60).roll(run.state.get("level", 0)).tolist()


def train(steps):
    for step in steps:
        print("step", step.number)
        if step.number == 4:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": [*model[0].parameters()]})
        for inputs, targets in step:
            step.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()
        drawn = {"drawn by rank 0": run.once(random.random), "drawn": random.random()}
        level = int(1000 * (step.metrics["loss"] + drawn["drawn"])) % 11
        run.state |= {"steps": step.number + 1, "level": level}
        run.log(drawn)
        if step.number == 5:
            run.stop("after two of three epochs")


def score(batch):
    return {"error": F.mse_loss(model(batch[0]), batch[1]), "noise": torch.rand(())}


run.log({"untrained": 1.0})
for epoch in run.epochs(first, 3, num_workers=0, sampler=sample):
    run.log({"head": epoch.number})
    train(epoch)
run.log(run.evaluate(score, second, num_workers=0))
optimizer.param_groups[0]["lr"] = 1e-3
run.state["phases"] = run.state.get("phases", 0) + 1
for epoch in run.epochs(second, 1, num_workers=0):
    train(epoch)
train(run.steps(first, 2, num_workers=0))
assert run.state["phases"] == 1, "the lines between two loops run once"
run.log({"end": random.random()} | run.evaluate(score, second, num_workers=0))
