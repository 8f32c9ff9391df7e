"""A stream that is read in lanes, whose samples hold random numbers and whose position is part of the snapshots."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

import samestep


class Numbers(IterableDataset):
    def __init__(self):
        self.position = 0

    def __iter__(self):
        lane = get_worker_info()
        numbers = range(lane.id, 1000, lane.num_workers)
        while self.position < len(numbers):
            self.position += 1
            yield torch.full((4,), numbers[self.position - 1] / 1000) + 0.1 * torch.rand(4)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


run = samestep.Run("runs/stream", batch_size=24, micro_batch_size=4, log_every=1)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
run.prepare(model=model, optimizer=optimizer)
for step in run.steps(Numbers(), 15, num_workers=0):
    print("step", step.number)
    for inputs in step:
        step.backward(F.mse_loss(model(inputs), inputs.sum(1, keepdim=True)))
    optimizer.step()
