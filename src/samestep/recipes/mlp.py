"""The toy regression of PyTorch's tutorials: a two-layer perceptron on random pairs, without validation.

samestep train mlp 50 10 --nproc-per-node 2 --show-all
python -m samestep.recipes.mlp 50 10 --batch-size 32
"""

from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

import samestep
from samestep.recipes import COUNT, Recipe, quarter


class CustomDataset(Dataset[tuple[Tensor, Tensor]]):
    """Random pairs from a separate generator: the same on every rank, independent of other random numbers."""

    def __init__(self, size: int) -> None:
        self.size = size
        generator = torch.Generator().manual_seed(0)
        self.data = [(torch.rand(20, generator=generator), torch.rand(1, generator=generator)) for _ in range(size)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index]


class Trainer:
    """The tutorials' Trainer, without gpu_id, .to(), zero_grad and checkpointing; with run, prepare and one `for`."""

    def __init__(
        self, run: samestep.Run, model: torch.nn.Module, train_data: CustomDataset, optimizer: torch.optim.Optimizer
    ) -> None:
        self.run = run
        self.model = model
        self.train_data = train_data
        self.optimizer = optimizer
        run.prepare(model=model, optimizer=optimizer)

    def train(self, max_epochs: int) -> None:
        for epoch in self.run.epochs(self.train_data, max_epochs):
            print(
                f"[rank {self.run.rank}] Epoch {epoch.number} | Batchsize: {self.run.batch_size} "
                f"| Steps: {epoch.num_steps}",
                flush=True,
            )
            for step in epoch:
                for source, targets in step:
                    step.backward(F.mse_loss(self.model(source), targets))
                self.optimizer.step()


@click.command("mlp", cls=Recipe, help=__doc__)
@click.argument("total_epochs", type=COUNT, default=50)
@click.argument("save_every", type=COUNT, default=10)
@click.option(
    "--batch-size",
    type=COUNT,
    default=32,
    help="samples per step, over all ranks. In the tutorials the size is per device: 32 on each of 4 GPUs is 128 here",
)
@click.option("--run-dir", default="runs/mlp", help="directory of the run")
def main(total_epochs: int, save_every: int, batch_size: int, run_dir: str) -> None:
    config: dict[str, Any] = {"total_epochs": total_epochs, "save_every": save_every, "batch_size": batch_size}
    run = samestep.Run(
        run_dir,
        batch_size=batch_size,
        micro_batch_size=quarter(batch_size),
        snapshot_every=f"{save_every}epochs",
        config=config,
    )
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    Trainer(run, model, CustomDataset(2048), optimizer).train(total_epochs)


if __name__ == "__main__":
    main()
