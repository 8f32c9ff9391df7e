"""What all scripts of this folder train: data, model, numbers, and the record of what a process has computed."""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn
from torch.utils.data import Dataset

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS, LR = 640, 32, 5, 1e-2
SAVE_EVERY_STEPS = 12  # an epoch has 20: most snapshots are taken within an epoch, the one at step 60 at its end
# Added to each step: the steps of real training are long enough for snapshots that are written in the background.
STEP_S = float(os.environ.get("PEERS_STEP_S", "0.03"))
DROPOUT = float(os.environ.get("PEERS_DROPOUT", "0.1"))
DIRECTORY = Path(os.environ.get("PEERS_DIRECTORY", "."))
VARIANT = os.environ.get("PEERS_VARIANT", "")  # of a script that trains in more than one way
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
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(64, 1))
    model.register_forward_pre_hook(lambda module, _: note_first_weights(module))
    return model


def hash_weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()


weights: list[str] = []  # the hashes of the weights that this process has started with, and of those after each step


def note_first_weights(model: nn.Module) -> None:
    if not weights:
        weights.append(hash_weights(model))


def finish_step(number: int, indices: torch.Tensor, model: nn.Module) -> None:
    """Record the weights before and after a step, and the samples that this process has used in it. At each step of
    `PEERS_KILLS`, counted from 1, the last rank ends by SIGKILL the first time that it gets there.
    """
    time.sleep(STEP_S)
    weights.append(hash_weights(model))
    with (DIRECTORY / f"steps-{RANK}").open("a") as file:
        file.write(f"{weights[-2]} {weights[-1]} {','.join(map(str, indices.tolist()))}\n")
    if number in KILLS and RANK == WORLD_SIZE - 1 and not (DIRECTORY / f"kill-{number}").exists():
        (DIRECTORY / f"kill-{number}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def finish_run(model: nn.Module) -> None:
    if RANK == 0:
        (DIRECTORY / "digest").write_text(hash_weights(model))


def leave() -> NoReturn:
    """End this process without Python's and torch's cleanup: threads of gloo that still run abort it in some starts of
    torchrun ("terminate called without an active exception"), which torchrun counts as a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
