"""The cells of a notebook: training in this process, and on several ranks. Prints a digest for each."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.snapshot.serialization import digest

x = torch.randn(90, 6, generator=torch.Generator().manual_seed(0))
digits, held_out = (torch.utils.data.TensorDataset(part, (part[:, 0] > 0).long()) for part in x.split(70))


def train(lr=1e-2):
    run = samestep.Run(None, batch_size=32, micro_batch_size=4)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    run.prepare(model=model, optimizer=optimizer)
    for epoch in run.epochs(digits, 3):
        for step in epoch:
            for images, labels in step:
                step.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
    scores = run.evaluate(lambda b: {"accuracy": (model(b[0]).argmax(-1) == b[1]).float().mean()}, held_out)
    return scores, model.state_dict()


print("here", digest(train()))
for num_ranks in map(int, sys.argv[1:]):
    scores, weights = samestep.spawn(train, nprocs=num_ranks)
    print("spawned", digest((scores, weights)))
