"""A ResNet on images in train/ and val/, with a folder for each class. Without --data: handwritten digits as PNG files.

samestep train images --nproc-per-node 2
samestep train images --data photos --model resnet18 --image-size 224 --num-workers 4 --precision bf16
"""

import io
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

import samestep
from samestep.cli import PATH
from samestep.console import format_count
from samestep.errors import needing
from samestep.files import move_directory
from samestep.recipes import AMOUNT, COUNT, SHARE, Recipe, build_schedule, keep_best, quarter
from samestep.recipes.models.resnet import ARCHITECTURES, ResidualBlock, build_resnet

with needing("the recipe images needs Pillow", "'samestep[recipes]'"):
    from PIL import Image, ImageOps

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # Pillow starts other programs to read some others
Entry = tuple[Path, int]  # file and class


def find_images(folder: Path) -> tuple[list[str], list[Entry]]:
    """Return the classes, which are the names of the subfolders, and all images in the order of their paths."""
    if not folder.is_dir():
        raise samestep.InvalidValue(
            f"{folder} is not a folder: name one that holds a folder of images for each class", code="SS701"
        )
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    entries = []
    for number, name in enumerate(classes):
        files = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        if not files:
            raise samestep.InvalidValue(
                f"{folder / name} holds no image ({', '.join(SUFFIXES)}): fill it or remove it", code="SS701"
            )
        entries += [(path, number) for path in files]
    if len(classes) < 2:
        raise samestep.InvalidValue(
            f"{folder} has {format_count(len(classes), 'folder')}: it needs a folder of images for each of 2 classes",
            code="SS701",
        )
    return classes, entries


def split_data(folder: Path) -> tuple[list[str], list[Entry], list[Entry]]:
    """Return the classes, the images to train on, in `train/`, and those to validate on, in `val/`."""
    classes, train = find_images(folder / "train")
    other_classes, val = find_images(folder / "val")
    if classes != other_classes:
        odd = ", ".join(sorted({*classes} ^ {*other_classes}))
        raise samestep.InvalidValue(
            f"{folder}/train and {folder}/val have different classes ({odd}): make them the same", code="SS701"
        )
    return classes, train, val


def write_digits(folder: Path) -> None:
    """Write scikit-learn's 1,797 digits as PNG files, a fifth of them in val/, unless the folder exists."""
    if folder.is_dir():
        return
    with needing("the digits need scikit-learn", "'samestep[recipes]'"):
        from sklearn.datasets import load_digits
    data = load_digits()
    hidden = folder.with_name(f".{folder.name}.{os.getpid()}")
    for number, (pixels, digit) in enumerate(zip(data.images, data.target, strict=True)):
        path = hidden / ("train" if number % 5 else "val") / str(digit) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.minimum(pixels * 16, 255).astype(np.uint8)).save(path)
    move_directory(hidden, folder)


def decode(path: Path) -> Image.Image:
    """Read an image as RGB, upright according to its EXIF orientation. Raises InvalidValue if its content is none."""
    content = path.read_bytes()
    try:
        return ImageOps.exif_transpose(Image.open(io.BytesIO(content), formats=FORMATS)).convert("RGB")
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, struct.error and others
        why = f"{type(error).__name__}: {error}".partition(" <")[0]  # without the address of the BytesIO
        raise samestep.InvalidValue(
            f"{path} cannot be decoded ({why}): convert, repair or remove it", code="SS701"
        ) from error


class Images(Dataset[tuple[Tensor, int]]):
    """Images (3, size, size) as bytes, and their classes. Training takes random crops, mirrored if `has_flips`."""

    def __init__(self, entries: list[Entry], size: int, *, is_training: bool, has_flips: bool = False) -> None:
        self.entries = entries
        self.size = size
        self.is_training = is_training
        self.has_flips = has_flips

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.entries[index]
        image = decode(path)
        size = self.size
        scale = math.ceil(size * 9 / 8) / min(image.size)  # the shorter side is an eighth longer than the crop
        width, height = (max(size, round(side * scale)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        left = (width - size) // 2
        top = (height - size) // 2
        if self.is_training:
            # samestep has seeded torch for this micro-batch, and the values depend on nothing else.
            left = int(torch.randint(width - size + 1, ()))
            top = int(torch.randint(height - size + 1, ()))
        image = image.crop((left, top, left + size, top + size))
        if self.is_training and self.has_flips and torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), label


@click.command("images", cls=Recipe, help=__doc__)
@click.option("--data", type=PATH, help="folder with train/ and val/, which have a folder per class; default: digits")
@click.option("--model", type=click.Choice([*ARCHITECTURES]), default="tiny", help="the network")
@click.option("--image-size", type=COUNT, help="height and width of the crops in pixels; default: 64; digits: 8")
@click.option("--no-flip", is_flag=True, help="do not mirror images at random (digits are never mirrored)")
@click.option("--epochs", type=COUNT, default=15, help="passes over the training set")
@click.option("--batch-size", type=COUNT, default=64, help="samples per step, over all ranks")
@click.option("--micro-batch-size", type=COUNT, help="samples per forward and backward pass; default: a quarter")
@click.option("--lr", type=AMOUNT, default=0.1, help="the highest learning rate")
@click.option("--weight-decay", type=AMOUNT, default=1e-4, help="weight decay of convolutions and the last layer")
@click.option("--label-smoothing", type=SHARE, default=0.0, help="as in torch")
@click.option("--patience", type=COUNT, help="end after this many epochs without a better accuracy; default: never")
@click.option("--precision", default="fp32", help="fp32, tf32, bf16 or fp16")
@click.option("--seed", default=0, help="seed of everything random")
@click.option("--num-workers", default=0, help="loader workers per rank")
@click.option("--run-dir", default="runs/images", help="directory of the run")
def main(**options: Any) -> None:
    args = SimpleNamespace(**options)
    micro_batch_size = args.micro_batch_size or quarter(args.batch_size)
    run = samestep.Run(
        args.run_dir,
        batch_size=args.batch_size,
        micro_batch_size=micro_batch_size,
        seed=args.seed,
        precision=args.precision,
        config=options,
    )
    folder = args.data or (run.dir or Path(args.run_dir)).parent / "digits-png"
    if args.data is None:
        run.once(write_digits, folder)
    size = args.image_size or (8 if args.data is None else 64)
    classes, train_entries, val_entries = split_data(folder)

    with run.sharded_init():
        model = build_resnet(args.model, len(classes))
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]  # biases and BatchNorm
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True)
    steps_per_epoch = math.ceil(len(train_entries) / run.batch_size)
    scheduler = build_schedule(optimizer, args.epochs * steps_per_epoch, steps_per_epoch)
    run.prepare(model=model, optimizer=optimizer, scheduler=scheduler, shard_blocks=[ResidualBlock])
    has_flips = args.data is not None and not args.no_flip
    train = Images(train_entries, size, is_training=True, has_flips=has_flips)
    val = Images(val_entries, size, is_training=False)

    def measure(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hits = scores.topk(min(5, len(classes))).indices == labels.unsqueeze(1)
        return {"top1": hits[:, 0].float().mean(), "top5": hits.any(1).float().mean()}

    def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        with run.autocast():
            scores = model(batch[0])
        return {"loss": F.cross_entropy(scores.float(), batch[1]), **measure(scores, batch[1])}

    for epoch in run.epochs(train, args.epochs, num_workers=args.num_workers):
        for step in epoch:
            for images, labels in step:
                with run.autocast():
                    scores = model(images)
                    loss = F.cross_entropy(scores, labels, label_smoothing=args.label_smoothing)
                step.backward(loss)
                step.log(measure(scores, labels))
            optimizer.step()
            scheduler.step()

        result = run.evaluate(score, val, num_workers=args.num_workers, micro_batch_size=micro_batch_size)
        run.log({f"validation/{name}": value for name, value in result.items()})
        keep_best(run, result["top1"], args.patience)
        run.summary["validation top-1"] = f"{result['top1']:.2%} (best {run.state['best']:.2%})"


if __name__ == "__main__":
    main()
