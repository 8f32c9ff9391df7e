"""Further passes over a step, with what an earlier one has kept by position, changed in place, or gathered."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

run = samestep.Run("runs/passes", batch_size=24, micro_batch_size=4, log_every=1)
x = torch.randn(110, 5, generator=torch.Generator().manual_seed(5))
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run.prepare(model=model, optimizer=optimizer)
for epoch in run.epochs(data, 3, num_workers=0):
    for step in epoch:
        print("step", step.number)
        kind = ("noise", "scaled", "gathered", "no backward", "scaled twice")[step.number % 5]
        kept, values = [], {}
        for inputs, targets in step:
            if kind.startswith("scaled"):
                inputs.mul_(0.5)
            kept.append(torch.randn(len(inputs), 1) if kind == "noise" else model(inputs).detach())
            loss = F.mse_loss(model(inputs) + kept[-1], targets)
            values[step.micro_batch] = loss.item()
            if kind != "no backward":
                step.backward(loss)
        if kind == "gathered":
            run.log({"sum": sum(step.gather(values))})
        elif kind != "scaled":
            for k, (inputs, _) in enumerate(step):
                weights = 1.0 if kind == "scaled twice" else kept[k]
                step.backward((model(inputs.mul_(0.5)) * weights).mean())
        optimizer.step()
