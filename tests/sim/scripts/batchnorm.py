"""BatchNorm, a total over the batch, clipping, steps without an update, a scheduler, and an average of the weights."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

run = samestep.Run("runs/batchnorm", batch_size=24, micro_batch_size=4, log_every=1)
x = torch.randn(110, 5, generator=torch.Generator().manual_seed(2))
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)]
model = nn.Sequential(*layers)
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
run.prepare(model=model, average=average, optimizer=optimizer, scheduler=scheduler)
for epoch in run.epochs(data, 3, num_workers=0):
    for step in epoch:
        print("step", step.number)
        positive = step.total(lambda batch: (batch[1] > 0).sum()) / step.num_samples
        for inputs, targets in step:
            if step.number != 2:
                loss = F.mse_loss(model(inputs), targets) / positive
                step.backward(loss, weight=0 if step.number == 6 else len(inputs))
        run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
    norm = sum(p.norm().item() for p in average.parameters())
    run.log({"epoch/loss": epoch.metrics["loss"], "norm": norm, "rate": scheduler.get_last_lr()[0]})
