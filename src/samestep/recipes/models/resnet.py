"""Residual networks for images (He et al., 2015, https://arxiv.org/abs/1512.03385). Imports torch only: copy it.

The parameters have the names of torchvision's models, so that weights of its resnet18 and resnet34 load.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
        self.downsample = build_shortcut(num_inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


def build_shortcut(num_inputs: int, num_outputs: int, stride: int) -> nn.Sequential:
    """Build the shortcut of a block: a 1x1 convolution if the shape changes, else nothing."""
    if stride == 1 and num_inputs == num_outputs:
        return nn.Sequential()
    return nn.Sequential(Convolution(num_inputs, num_outputs, 1, stride, bias=False), nn.BatchNorm2d(num_outputs))


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


def build_resnet(name: str, num_classes: int) -> ResNet:
    """Build a network of `ARCHITECTURES`."""
    return ResNet(ARCHITECTURES[name], num_classes)
