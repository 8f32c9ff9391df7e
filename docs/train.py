# train.py
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import samestep

run = samestep.Run("runs/ladder", batch_size=32, micro_batch_size=8)  # up to 32 / 8 = 4 ranks
data = TensorDataset(torch.rand(2048, 20), torch.rand(2048, 1))
loader = DataLoader(data, batch_size=32, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
run.prepare(model=model, optimizer=optimizer)  # in place; restores the newest snapshot
for epoch in run.epochs(loader, 5):
    for step in epoch:
        for x, y in step:  # this rank's micro-batches
            step.backward(F.mse_loss(model(x), y))
        optimizer.step()
