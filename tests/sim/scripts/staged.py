"""Two stages of a pipeline, with BatchNorm, dropout, a weight that both use, clipping, and an evaluation per epoch."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.inner = inner

    def forward(self, x):
        return x + F.dropout(torch.tanh(self.inner(self.norm(x))), 0.2, self.training)


run = samestep.Run("runs/staged", batch_size=48, micro_batch_size=8, log_every=1, pipeline=2)
generator = torch.Generator().manual_seed(1)
x = torch.randn(230, 6, generator=generator)  # 5 steps, the last of which has fewer samples
y = (x @ torch.randn(6, 1, generator=generator)).tanh()
train, test = TensorDataset(x[:220], y[:220]), TensorDataset(x[200:], y[200:])
shared = nn.Linear(6, 6)
model = nn.Sequential(Block(shared), Block(nn.Linear(6, 6)), nn.Linear(6, 1))
model[1].inner.weight = shared.weight
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
run.prepare(model=model, optimizer=optimizer, stages=["1"])


def compute_loss(batch):
    inputs, targets = batch
    loss = F.mse_loss(model(inputs), targets)
    step.log(drawn=torch.rand(()))
    return loss


def score(batch):
    inputs, targets = batch
    return {"error": F.mse_loss(model(inputs), targets)}


for epoch in run.epochs(train, 3, num_workers=0):
    for step in epoch:
        print("step", step.number)
        step.run(compute_loss)
        step.log(norm=run.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    result = run.evaluate(score, test, micro_batch_size=4, num_workers=0)
    run.log({"test/error": result["error"], "draw": random.random()})
    if result["error"] < run.state.get("best", 9.0):
        run.state["best"] = result["error"]
        run.snapshot("best")
