"""BatchNorm, gradient clipping, and steps that make no update."""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

run = samestep.Run("runs/batchnorm", batch_size=24, micro_batch_size=4, log_every=1)
generator = torch.Generator().manual_seed(2)
x = torch.randn(110, 5, generator=generator)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.prepare(model=model, optimizer=optimizer)
for epoch in run.epochs(data, 3, num_workers=0):
    for step in epoch:
        print("step", step.number)
        time.sleep(float(os.environ["PACE_S"]))
        for inputs, targets in step:
            if step.number != 2:
                step.backward(F.mse_loss(model(inputs), targets), weight=0 if step.number == 6 else len(inputs))
        run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    run.log({"epoch/loss": epoch.metrics["loss"]})
