"""What all scripts of this folder train: data, model, numbers, and the record of what a process has computed."""

import hashlib
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS, LR = 640, 32, 5, 1e-2
SAVE_EVERY_STEPS = 10
NUM_STEPS = NUM_SAMPLES // BATCH_SIZE * NUM_EPOCHS
DIRECTORY = Path(os.environ.get("PEERS_DIRECTORY", "."))
KILLS = [int(step) for step in os.environ.get("PEERS_KILLS", "").split(",") if step]
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
PER_PROCESS = BATCH_SIZE // WORLD_SIZE  # so that a step has the same number of samples at any number of processes


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Samples with their indices."""

    def __init__(self) -> None:
        self.x = torch.randn(NUM_SAMPLES, 20, generator=torch.Generator().manual_seed(0))
        self.y = self.x[:, :4].sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))


def finish_step(number: int, indices: torch.Tensor) -> None:
    """Record the samples that this process has used in a step, from 1. At each step of `PEERS_KILLS`, the last rank
    ends by SIGKILL the first time that it gets there.
    """
    line = f"{number} {','.join(map(str, indices.tolist()))}\n"
    with (DIRECTORY / f"steps-{RANK}").open("a") as file:
        file.write(line)
    if number in KILLS and RANK == WORLD_SIZE - 1 and not (DIRECTORY / f"kill-{number}").exists():
        (DIRECTORY / f"kill-{number}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def finish_run(model: nn.Module) -> None:
    """Write the digest of the weights."""
    if RANK == 0:
        digest = hashlib.sha256()
        for weight in model.state_dict().values():
            digest.update(weight.numpy().tobytes())
        (DIRECTORY / "digest").write_text(digest.hexdigest())
