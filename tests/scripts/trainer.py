"""The Trainer of many tutorials, for any number of ranks."""

import argparse

import torch
import torch.nn.functional as F
from data import CustomDataset

import samestep


class Trainer:
    def __init__(self, run, model, train_data, optimizer):
        self.run, self.model, self.train_data, self.optimizer = run, model, train_data, optimizer
        run.prepare(model=model, optimizer=optimizer)

    def _run_step(self, step):
        for source, targets in step:
            step.backward(F.mse_loss(self.model(source), targets))
        self.optimizer.step()

    def train(self, max_epochs):
        for epoch in self.run.epochs(self.train_data, max_epochs):
            print(
                f"[rank {self.run.rank}] Epoch {epoch.number} | Batchsize: {self.run.batch_size} "
                f"| Steps: {epoch.num_steps}"
            )
            for step in epoch:
                self._run_step(step)


parser = argparse.ArgumentParser()
parser.add_argument("total_epochs", type=int)
parser.add_argument("save_every", type=int)
parser.add_argument("--batch_size", type=int, default=32)
args = parser.parse_args()
run = samestep.Run(
    "runs/trainer",
    batch_size=args.batch_size,
    micro_batch_size=args.batch_size // 4,
    snapshot_every=f"{args.save_every}epochs",
    config=vars(args),
)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
Trainer(run, model, CustomDataset(100), optimizer).train(args.total_epochs)
