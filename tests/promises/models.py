"""Small models and data sets of many kinds, for the training functions of these tests."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

MICRO_BATCH_SIZE = 3
BATCH_SIZE = 12 * MICRO_BATCH_SIZE
NUM_SAMPLES = 2 * BATCH_SIZE + 2 * MICRO_BATCH_SIZE + 2  # the third step has micro-batches of 3, 3 and 2

# --- data ---------------------------------------------------------------------------------------------------------


def build_pairs(num_samples: int = NUM_SAMPLES, num_features: int = 6, seed: int = 0) -> TensorDataset:
    """Features (num_samples, num_features) and one of four classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, num_features, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0.3).long())


def build_texts(num_samples: int = NUM_SAMPLES, seed: int = 0) -> Tensor:
    """Texts (num_samples, 10) of 17 tokens."""
    return torch.randint(17, (num_samples, 10), generator=torch.Generator().manual_seed(seed))


# --- models -------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """Embeddings tied with the output, a dropout in each block, a block that is checkpointed."""

    def __init__(self, num_tokens: int = 17, dim: int = 16, length: int = 9) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(num_tokens, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 2, 4 * dim, 0.1, F.gelu, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(dim, num_tokens, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        return self.head(self.blocks[1](x))


class Branches(nn.Module):
    """Weights that all steps, some steps, or some micro-batches leave unused."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.never, self.even, self.rare = nn.Linear(3, 3), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.is_even = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        if self.is_even:
            hidden = hidden + self.even(hidden)
        if bool((x[:, 0] > 1.3).any()):
            hidden = hidden + self.rare(hidden)
        return self.head(hidden)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 2, bias=False)
        self.moving = nn.BatchNorm2d(4)
        self.cumulative = nn.BatchNorm2d(4, momentum=None, affine=False)
        self.untracked = nn.BatchNorm1d(8, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(8)
        self.twice = nn.BatchNorm1d(8, momentum=0.3)
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 1, 2, 3).to(memory_format=torch.channels_last)
        hidden = self.cumulative(self.moving(self.convolution(image))).flatten(1)
        hidden = self.twice(torch.tanh(self.frozen(self.untracked(hidden))))
        return self.head(self.twice(self.hidden(hidden)))


class Kinds(nn.Module):
    """Weights of four dtypes in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.brain = nn.Linear(6, 7), nn.Linear(7, 5).bfloat16()
        self.wide = nn.Linear(5, 5).double()
        self.waves = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.brain(torch.tanh(self.single(x)).bfloat16())
        hidden = torch.tanh(self.wide(hidden.double())).float()
        return self.head(torch.fft.ifft(torch.fft.fft(hidden) * self.waves).real)
