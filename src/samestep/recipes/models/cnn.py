"""The model of the recipe `digits`. It needs torch only: copy this file to use exported weights without samestep."""

from torch import Tensor, nn


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
        convolution = nn.Conv2d(num_inputs, num_outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(num_outputs), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(images))
        return scores
