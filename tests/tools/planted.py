"""Scripts with faults that `samestep verify` must find: one correct script, and faults as text."""

SOUND = """
import random
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import samestep
{top}

class Data:
    def __init__(self, num_samples=26):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num_samples, 6, generator=generator)
        self.y = torch.arange(num_samples) % 3
        {in_data}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index] + 0.1 * torch.randn(6)
        {in_item}
        return x, self.y[index]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        {in_model}

    def forward(self, x):
        {in_forward}
        return self.layers(x)

def main():
    run = samestep.Run("runs/planted", batch_size=8, micro_batch_size=2, device="cpu"{arguments})
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run.prepare(model=model, optimizer=optimizer, scheduler=scheduler)
    data = Data()
    {before}
    for epoch in run.epochs(data, 9):
        for step in epoch:
            for x, y in step:
                {in_micro_batch}
                loss = F.cross_entropy(model(x), y)
                step.backward(loss)
                {after_micro_batch}
            optimizer.step()
            scheduler.step()
            {in_step}
        {in_epoch}
    {at_end}

main()
"""

PLACES = (
    "in_data", "in_item", "in_model", "in_forward", "before", "in_micro_batch", "after_micro_batch", "in_step",
    "in_epoch", "at_end",
)  # fmt: skip


def plant(swap: str = "", **faults: str) -> str:
    """Return the script with `faults` at their places. `swap` replaces expressions: `OLD` -> `NEW`."""
    places = {"top": "", "arguments": "", **dict.fromkeys(PLACES, "pass")}
    assert faults.keys() <= places.keys()
    script = SOUND.format(**places | faults)
    old, _, new = swap.partition(" -> ")
    assert old in script, old
    return script.replace(old, new)
