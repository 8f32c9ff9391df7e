"""Sentence pairs as token ids, padded to batches of similar lengths."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from samestep.recipes.models.seq2seq import END, PAD, START


class Sentences:
    """The token ids of all sentences of a language, one after the other."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths = torch.tensor([len(row) for row in rows])
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int32)

    def pad(self, indices: Tensor) -> Tensor:
        """Return the token ids of some sentences, with PAD at the end of shorter ones."""
        lengths, starts = self.lengths[indices, None], self.starts[indices, None]
        columns = torch.arange(int(lengths.max()))
        tokens = self.tokens[(starts + columns).clamp(max=len(self.tokens) - 1)].long()
        return tokens.masked_fill(columns >= lengths, PAD)


class Pairs(Dataset[int]):
    """Sentence pairs as token ids: `collate` makes a batch of the indices of its samples."""

    def __init__(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> None:
        self.source = Sentences([[*row, END] for row in sources])
        self.target = Sentences([[START, *row, END] for row in targets])

    def __len__(self) -> int:
        return len(self.source.lengths)

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices

    def collate(self, samples: list[int]) -> dict[str, Any]:
        indices = torch.tensor(samples)
        source, target = self.source.pad(indices), self.target.pad(indices)
        labels = target[:, 1:].contiguous()
        num_tokens = int((labels != PAD).sum())  # a number, so that the weight is not read back from a GPU
        return {"source": source, "target": target[:, :-1], "labels": labels, "num_tokens": num_tokens}


class Bucketed:
    """Orders the pairs of an epoch so that those of a batch have similar lengths, and the batches are in random order.

    Depends on the epoch and the seed only, and not on the number of ranks.
    """

    def __init__(self, pairs: Pairs, batch_size: int, seed: int) -> None:
        self.lengths = (pairs.target.lengths.numpy(), pairs.source.lengths.numpy())
        self.batch_size, self.seed = batch_size, seed

    def __call__(self, epoch: int) -> NDArray[np.int64]:
        generator = np.random.default_rng((self.seed, epoch))
        order = generator.permutation(len(self.lengths[0]))
        num_short = len(order) % self.batch_size
        short, order = order[:num_short], order[num_short:]  # the last batch is short: of random lengths
        order = order[np.lexsort([lengths[order] for lengths in self.lengths])]  # by source, then target; stable
        batches = generator.permutation(order.reshape(-1, self.batch_size))
        return np.concatenate([batches.ravel(), short])
