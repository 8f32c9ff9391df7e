"""The tutorials' script for torchrun: a snapshot of the weights and the epoch after each epoch."""

import os

import torch
import torch.nn.functional as F
from task import DIRECTORY, LR, NUM_EPOCHS, PER_PROCESS, RANK, Numbers, build_model, finish_run, finish_step, leave
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model: torch.nn.Module, train_data: DataLoader, snapshot_path: str) -> None:
        self.model = model
        self.train_data = train_data
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            self._load_snapshot(snapshot_path)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LR)
        self.model = DDP(self.model)

    def _load_snapshot(self, snapshot_path: str) -> None:
        snapshot = torch.load(snapshot_path)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def _save_snapshot(self, epoch: int) -> None:
        snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch}
        torch.save(snapshot, self.snapshot_path)

    def _run_epoch(self, epoch: int) -> None:
        self.train_data.sampler.set_epoch(epoch)
        for i, (source, targets, indices) in enumerate(self.train_data):
            self.optimizer.zero_grad()
            F.mse_loss(self.model(source), targets).backward()
            self.optimizer.step()
            finish_step(epoch * len(self.train_data) + i + 1, indices, self.model.module)

    def train(self, max_epochs: int) -> None:
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if RANK == 0:
                self._save_snapshot(epoch)


init_process_group("gloo")
torch.manual_seed(0)
data = Numbers()
loader = DataLoader(data, batch_size=PER_PROCESS, shuffle=False, sampler=DistributedSampler(data))
trainer = Trainer(build_model(), loader, str(DIRECTORY / "snapshot.pt"))
trainer.train(NUM_EPOCHS)
finish_run(trainer.model.module)
leave()
