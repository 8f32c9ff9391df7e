"""The most common mistake: the optimizer's step is indented by one level too many."""

import torch
import torch.nn.functional as F

import samestep

run = samestep.Run("runs/dedent", batch_size=12, micro_batch_size=4)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.prepare(model=model, optimizer=optimizer)
for epoch in run.epochs(torch.utils.data.TensorDataset(torch.randn(16, 2), torch.randn(16, 1)), 1):
    for step in epoch:
        for x, y in step:
            step.backward(F.mse_loss(model(x), y))
            optimizer.step()
