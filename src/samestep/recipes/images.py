"""A ResNet on images in train/ and val/, with a folder for each class. Without --data: handwritten digits as PNG files.

samestep train images --nproc-per-node 2
samestep train images --data photos --model resnet18 --image-size 224 --num-workers 4 --precision bf16
"""

import io
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import samestep
from samestep.cli import PATH
from samestep.console import format_count
from samestep.errors import needing
from samestep.files import move_directory
from samestep.recipes import AMOUNT, COUNT, Recipe, build_schedule, group_by_decay, keep_best, quarter

with needing("the recipe images needs Pillow", "'samestep[recipes]'"):
    from PIL import Image, ImageOps

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # Pillow starts other programs to read some others
Entry = tuple[Path, int]  # file and class


def find_images(folder: Path) -> tuple[list[str], list[Entry]]:
    """Return the classes, which are the names of the subfolders, and all images in the order of their paths."""
    files = sorted(path for path in folder.glob("[!.]*/**/*") if path.suffix.lower() in SUFFIXES)
    names = [path.relative_to(folder).parts[0] for path in files]
    classes = {name: number for number, name in enumerate(sorted({*names}))}
    if len(classes) < 2:
        raise samestep.InvalidValue(
            f"{folder} has images ({', '.join(SUFFIXES)}) in {format_count(len(classes), 'folder')}: it needs a folder "
            "of images for each of 2 classes",
            code="SS701",
        )
    return [*classes], [(path, classes[name]) for path, name in zip(files, names, strict=True)]


def split_data(folder: Path) -> tuple[list[str], list[Entry], list[Entry]]:
    """Return the classes, the images to train on, in `train/`, and those to validate on, in `val/`."""
    classes, train = find_images(folder / "train")
    other_classes, val = find_images(folder / "val")
    if classes != other_classes:
        odd = ", ".join(sorted({*classes} ^ {*other_classes}))
        raise samestep.InvalidValue(
            f"{folder}/train and {folder}/val have images of different classes ({odd}): make them the same",
            code="SS701",
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


@dataclass(frozen=True)
class Images(Dataset[tuple[Tensor, int]]):
    """Images (3, size, size) as bytes, and their classes. Training takes random crops, mirrored if `has_flips`."""

    entries: list[Entry]
    size: int
    is_training: bool
    has_flips: bool = False

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


# --- the model --------------------------------------------------------------------------------------------------------


# of ImageNet's channels, in 0..1
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Architecture:
    """A residual network.

    Attributes:
        depths: blocks of each stage. Each stage after the first halves the height and width of the image.
        width: channels of the first stage; each stage doubles them.
        has_stem: a 7x7 convolution and a pooling first divide height and width by 4, for images of about 224 pixels.
    """

    depths: tuple[int, ...]
    width: int = 64
    has_stem: bool = True


ARCHITECTURES = {
    "tiny": Architecture((1, 1, 1), width=8, has_stem=False),
    "resnet20": Architecture((3, 3, 3), width=16, has_stem=False),  # for images of about 32 pixels, as CIFAR-10
    "resnet18": Architecture((2, 2, 2, 2)),
    "resnet34": Architecture((3, 4, 6, 3)),
}


class Convolution(nn.Conv2d):
    """A convolution without bias, with the initial values of torchvision's."""

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class LastNorm(nn.BatchNorm2d):
    """The last normalization of a block, initially 0, so that the block begins as its shortcut (Goyal et al., 2017,
    https://arxiv.org/abs/1706.02677)."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.weight)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Convolution(num_inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = Convolution(width, width, 3, padding=1, bias=False)
        self.bn2 = LastNorm(width)
        if stride == 1 and num_inputs == width:
            self.downsample = nn.Sequential()
        else:  # the shape changes
            self.downsample = nn.Sequential(
                Convolution(num_inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet(nn.Module):
    """Images (N, 3, H, W) -> scores of the classes (N, num_classes).

    Images are bytes in 0..255 (uint8), which the model normalizes, or floats that are normalized by `MEAN` and `STD`.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, architecture: Architecture, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1) * 255, persistent=False)
        num_channels = architecture.width
        size, stride = (7, 2) if architecture.has_stem else (3, 1)
        self.conv1 = Convolution(3, num_channels, size, stride, padding=size // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(num_channels)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if architecture.has_stem else nn.Identity()
        self.stages = [f"layer{number}" for number in range(1, len(architecture.depths) + 1)]
        for number, (name, depth) in enumerate(zip(self.stages, architecture.depths, strict=True)):
            width = architecture.width * 2**number
            blocks = []
            for block in range(depth):
                blocks.append(ResidualBlock(num_channels, width, stride=2 if number and not block else 1))
                num_channels = width
            self.add_module(name, nn.Sequential(*blocks))
        self.fc = nn.Linear(num_channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = (images - self.mean) / self.std if images.dtype == torch.uint8 else images
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


# --- the recipe -------------------------------------------------------------------------------------------------------


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
        model = ResNet(ARCHITECTURES[args.model], len(classes))
    optimizer = torch.optim.SGD(group_by_decay(model, args.weight_decay), lr=args.lr, momentum=0.9, nesterov=True)
    steps_per_epoch = math.ceil(len(train_entries) / run.batch_size)
    scheduler = build_schedule(optimizer, args.epochs * steps_per_epoch, steps_per_epoch)
    run.prepare(model=model, optimizer=optimizer, scheduler=scheduler, shard_blocks=[ResidualBlock])
    has_flips = args.data is not None and not args.no_flip
    train = Images(train_entries, size, is_training=True, has_flips=has_flips)
    val = Images(val_entries, size, is_training=False)

    def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        with run.autocast():
            scores = model(images)
            loss = F.cross_entropy(scores, labels)
        hits = scores.topk(min(5, len(classes))).indices == labels.unsqueeze(1)
        return {"loss": loss, "top1": hits[:, 0].float().mean(), "top5": hits.any(1).float().mean()}

    for epoch in run.epochs(train, args.epochs, num_workers=args.num_workers):
        for step in epoch:
            for batch in step:
                scores = score(batch)
                step.backward(scores.pop("loss"))
                step.log(scores)
            optimizer.step()
            scheduler.step()

        result = run.evaluate(score, val, num_workers=args.num_workers, micro_batch_size=micro_batch_size)
        run.log({f"validation/{name}": value for name, value in result.items()})
        keep_best(run, result["top1"], args.patience)
        run.summary["validation top-1"] = f"{result['top1']:.2%} (best {run.state['best']:.2%})"


if __name__ == "__main__":
    main()
