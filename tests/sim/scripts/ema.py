"""An average of the weights, a scheduler, and a loss with a total over the batch."""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

run = samestep.Run("runs/ema", batch_size=24, micro_batch_size=4, log_every=1)
generator = torch.Generator().manual_seed(3)
x = torch.randn(110, 5, generator=generator)
data = TensorDataset(x, x.prod(1, keepdim=True))
model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1))
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
run.prepare(model=model, average=average, optimizer=optimizer, scheduler=scheduler)
for epoch in run.epochs(data, 3, num_workers=0):
    for step in epoch:
        print("step", step.number)
        time.sleep(float(os.environ["PACE_S"]))
        positive = step.total(lambda batch: (batch[1] > 0).sum()) / step.num_samples
        for inputs, targets in step:
            step.backward(F.mse_loss(model(inputs), targets) / positive)
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
    run.log({"norm": sum(p.norm().item() for p in average.parameters()), "rate": scheduler.get_last_lr()[0]})
