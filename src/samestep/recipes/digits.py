"""A small CNN on scikit-learn's handwritten digits: 99 % on the held-out fifth, in seconds.

samestep train digits --nproc-per-node 2
python -m samestep.recipes.digits --epochs 5
"""

import argparse
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

import samestep
from samestep.recipes import build_schedule, check_numbers, run_main
from samestep.recipes.models.cnn import CNN


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
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise samestep.MissingPackage("the recipe digits needs scikit-learn: pip install 'samestep[recipes]'") from None
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    digits = torch.tensor(data.target)
    shuffled = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))  # the same split in every run
    held_out = shuffled[: len(digits) // 5]
    train = shuffled[len(digits) // 5 :]
    return Digits(images[train], digits[train], shift=1), Digits(images[held_out], digits[held_out])


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="digits", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training set (default: 20)")
    parser.add_argument(
        "--batch-size", "--batch_size", type=int, default=96, help="samples per step, over all ranks (default: 96)"
    )
    parser.add_argument(
        "--micro-batch-size",
        "--micro_batch_size",
        type=int,
        help="samples per forward and backward pass (default: a quarter of the batch, for up to 4 ranks)",
    )
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate (default: 0.003)")
    parser.add_argument(
        "--patience", type=int, help="stop after this many epochs without a better accuracy (default: never)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random except the split (default: 0)")
    parser.add_argument(
        "--num-workers", "--num_workers", type=int, default=0, help="DataLoader workers per rank (default: 0)"
    )
    parser.add_argument("--run-dir", "--run_dir", default="runs/digits", help="default: runs/digits")
    args = parser.parse_args(argv)
    check_numbers(parser, args, "epochs batch_size micro_batch_size patience", least=1)
    check_numbers(parser, args, "lr num_workers", least=0)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.micro_batch_size is None:
        args.micro_batch_size = args.batch_size // math.gcd(args.batch_size, 4)
    train, held_out = load_data()

    run = samestep.Run(
        args.run_dir,
        batch_size=args.batch_size,
        micro_batch_size=args.micro_batch_size,
        seed=args.seed,
        config=vars(args),
    )
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    steps_per_epoch = math.ceil(len(train) / run.batch_size)
    scheduler = build_schedule(optimizer, args.epochs * steps_per_epoch, steps_per_epoch)
    run.prepare(model=model, optimizer=optimizer, scheduler=scheduler)
    if "best" in run.state:  # the run was resumed
        run.summary["validation accuracy"] = f"best {run.state['best']:.2%}"

    def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, digits = batch
        scores = model(images)
        return {
            "loss": F.cross_entropy(scores, digits),
            "accuracy": (scores.argmax(1) == digits).float().mean(),
        }

    for epoch in run.epochs(train, args.epochs, num_workers=args.num_workers):
        for step in epoch:
            for images, digits in step:
                with run.autocast():
                    scores = model(images)
                    loss = F.cross_entropy(scores, digits)
                step.backward(loss)
                step.log(accuracy=(scores.argmax(1) == digits).float().mean())
            run.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

        validation = run.evaluate(score, held_out)
        run.log({f"validation/{name}": value for name, value in validation.items()})
        accuracy = validation["accuracy"]
        if accuracy > run.state.get("best", -1.0):
            run.state |= {"best": accuracy, "best_epoch": epoch.number}
            run.snapshot("best")
        elif args.patience is not None and epoch.number - run.state["best_epoch"] >= args.patience:
            run.stop(f"no better accuracy for {args.patience} epochs")
        run.summary["validation accuracy"] = f"{accuracy:.2%} (best {run.state['best']:.2%})"


if __name__ == "__main__":
    run_main(main)
