"""The toy regression of PyTorch's tutorials: a two-layer perceptron on random pairs, without validation.

samestep train mlp --total-epochs 50 --save-every 10 --batch-size 32
samestep train mlp 50 10 --nproc-per-node 2 --show-ranks all
python -m samestep.recipes.mlp 50 10 --batch_size 32
"""

import argparse
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

import samestep
from samestep.recipes import check_numbers


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


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mlp", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("counts", type=int, nargs="*", metavar="N", help="TOTAL_EPOCHS SAVE_EVERY, in this order")
    parser.add_argument("--total-epochs", "--total_epochs", type=int, help="epochs to train the model (default: 50)")
    parser.add_argument("--save-every", "--save_every", type=int, help="epochs between snapshots (default: 10)")
    parser.add_argument(
        "--batch-size",
        "--batch_size",
        type=int,
        default=32,
        help="samples per step, over all ranks (default: 32). In the tutorials the size is per device: 32 on "
        "each of 4 GPUs is 128 here, on any number of ranks",
    )
    parser.add_argument("--run-dir", "--run_dir", default="runs/mlp", help="default: runs/mlp")
    args = parser.parse_args(argv)
    if len(args.counts) > 2:
        parser.error(f"TOTAL_EPOCHS and SAVE_EVERY are two numbers, not {len(args.counts)}")
    for name, count in zip(("total_epochs", "save_every"), args.counts, strict=False):
        if getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')} was given twice: as an option and as a positional argument")
        setattr(args, name, count)
    del args.counts
    args.total_epochs = 50 if args.total_epochs is None else args.total_epochs
    args.save_every = 10 if args.save_every is None else args.save_every
    check_numbers(parser, args, "total_epochs save_every batch_size", least=1)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    run = samestep.Run(
        args.run_dir,
        batch_size=args.batch_size,
        micro_batch_size=args.batch_size // math.gcd(args.batch_size, 4),  # so that up to 4 ranks can share a step
        snapshot_every=f"{args.save_every}epochs",
        config=vars(args),
    )
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    Trainer(run, model, CustomDataset(2048), optimizer).train(args.total_epochs)


if __name__ == "__main__":
    main()
