"""A small CNN on scikit-learn's handwritten digits: 99 % on the held-out fifth, in seconds.

samestep train digits --nproc-per-node 2
python -m samestep.recipes.digits --epochs 5
"""

import math
from types import SimpleNamespace
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import samestep
from samestep.errors import needing
from samestep.recipes import AMOUNT, COUNT, Recipe, build_schedule, keep_best, quarter


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images (1, 8, 8) in 0..1 and their digits. Each read shifts the image by up to `shift` random pixels."""

    def __init__(self, images: Tensor, digits: Tensor, shift: int = 0) -> None:
        self.images = F.pad(images, [shift] * 4)
        self.digits = digits
        self.shift = shift

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # samestep has seeded torch, numpy and random for this micro-batch, and the values depend on nothing else.
        x, y = torch.randint(2 * self.shift + 1, (2,)).tolist()
        return self.images[index, :, y : y + 8, x : x + 8], self.digits[index]


def load_data() -> tuple[Digits, Digits]:
    """Load scikit-learn's 1,797 handwritten digits: four fifths for training, with shifts, and a held-out fifth."""
    with needing("the recipe digits needs scikit-learn", "'samestep[recipes]'"):
        from sklearn.datasets import load_digits
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    digits = torch.tensor(data.target)
    shuffled = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))  # the same split in every run
    held_out = shuffled[: len(digits) // 5]
    train = shuffled[len(digits) // 5 :]
    return Digits(images[train], digits[train], shift=1), Digits(images[held_out], digits[held_out])


# --- the model --------------------------------------------------------------------------------------------------------


class CNN(nn.Module):
    """8x8 grey images (N, 1, 8, 8) -> scores of the ten digits (N, 10)."""

    def __init__(self, width: int = 32, dropout: float = 0.3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            self.block(1, width),
            self.block(width, 2 * width, stride=2),
            self.block(2 * width, 4 * width, stride=2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(4 * width * 2 * 2, 10))

    @staticmethod
    def block(num_inputs: int, num_outputs: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(num_inputs, num_outputs, kernel_size=3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(num_outputs),
            nn.ReLU(),
        )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(images))
        return scores


# --- the recipe -------------------------------------------------------------------------------------------------------


@click.command("digits", cls=Recipe, help=__doc__)
@click.option("--epochs", type=COUNT, default=20, help="passes over the training set")
@click.option("--batch-size", type=COUNT, default=96, help="samples per step, over all ranks")
@click.option("--micro-batch-size", type=COUNT, help="samples per forward and backward pass; default: a quarter")
@click.option("--lr", type=AMOUNT, default=3e-3, help="the highest learning rate")
@click.option("--patience", type=COUNT, help="end after this many epochs without a better accuracy; default: never")
@click.option("--seed", default=0, help="seed of everything random except the split")
@click.option("--num-workers", default=0, help="DataLoader workers per rank")
@click.option("--run-dir", default="runs/digits", help="directory of the run")
def main(**options: Any) -> None:
    args = SimpleNamespace(**options)
    train, held_out = load_data()
    run = samestep.Run(
        args.run_dir,
        batch_size=args.batch_size,
        micro_batch_size=args.micro_batch_size or quarter(args.batch_size),
        seed=args.seed,
        config=options,
    )
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    steps_per_epoch = math.ceil(len(train) / run.batch_size)
    scheduler = build_schedule(optimizer, args.epochs * steps_per_epoch, steps_per_epoch)
    run.prepare(model=model, optimizer=optimizer, scheduler=scheduler)

    def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, digits = batch
        with run.autocast():
            scores = model(images)
            loss = F.cross_entropy(scores, digits)
        return {"loss": loss, "accuracy": (scores.argmax(1) == digits).float().mean()}

    for epoch in run.epochs(train, args.epochs, num_workers=args.num_workers):
        for step in epoch:
            for batch in step:
                scores = score(batch)
                step.backward(scores.pop("loss"))
                step.log(scores)
            run.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

        validation = run.evaluate(score, held_out)
        run.log({f"validation/{name}": value for name, value in validation.items()})
        keep_best(run, validation["accuracy"], args.patience)
        run.summary["validation accuracy"] = f"{validation['accuracy']:.2%} (best {run.state['best']:.2%})"


if __name__ == "__main__":
    main()
