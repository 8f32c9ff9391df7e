"""An MLP with dropout, augmentations by all global generators, an evaluation after each epoch, and a best result."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

run = samestep.Run("runs/mlp", batch_size=48, micro_batch_size=8, log_every=1)
generator = torch.Generator().manual_seed(1)
x = torch.randn(230, 6, generator=generator)  # 5 steps, the last of which has fewer samples
y = (x @ torch.randn(6, 1, generator=generator)).tanh()
train, test = TensorDataset(x[:220], y[:220]), TensorDataset(x[200:], y[200:])
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
run.prepare(model=model, optimizer=optimizer)


def score(batch):
    inputs, targets = batch
    return {"error": F.mse_loss(model(inputs), targets)}


for epoch in run.epochs(train, 3, num_workers=0):
    shift = random.random()
    for step in epoch:
        print("step", step.number)
        for inputs, targets in step:
            noise = shift + random.random() + float(np.random.rand())
            step.backward(F.mse_loss(model(inputs * (1 + 0.01 * noise)), targets))
        optimizer.step()
    result = run.evaluate(score, test, micro_batch_size=4, num_workers=0)
    run.log({"test/error": result["error"], "draw": random.random()})
    run.state["sum"] = run.state.get("sum", 0.0) + result["error"]
    if result["error"] < run.state.get("best", 9.0):
        run.state["best"] = result["error"]
        run.snapshot("best")
