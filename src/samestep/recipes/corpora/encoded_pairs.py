"""Sentence pairs as token ids, padded to batches of similar lengths."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

import samestep
from samestep.files import replace_file
from samestep.recipes.corpora.sentence_pairs import Pair, read_pairs, refuse
from samestep.recipes.corpora.text_tokenizer import train_byte_level
from samestep.recipes.models.seq2seq import END, PAD, START

SPECIAL = ("[PAD]", "[START]", "[END]")  # ids 0, 1 and 2
LEAST_SIZE = 256 + len(SPECIAL)  # a token for each byte


class Sentences:
    """The concatenated token ids of all sentences of a language."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths = torch.tensor([len(row) for row in rows])
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int32)

    def pad(self, indices: Tensor) -> Tensor:
        """Return the token ids of some sentences, padded with PAD."""
        lengths = self.lengths[indices, None]
        starts = self.starts[indices, None]
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
        source = self.source.pad(indices)
        target = self.target.pad(indices)
        labels = target[:, 1:].contiguous()
        num_tokens = int((labels != PAD).sum())  # a number, so that the weight is not copied from a GPU
        return {"source": source, "target": target[:, :-1], "labels": labels, "num_tokens": num_tokens}


class Bucketed:
    """Orders the pairs of an epoch so that the pairs of a batch have similar lengths, with the batches in random order.

    The order depends only on the epoch and the seed, not on the number of ranks.
    """

    def __init__(self, pairs: Pairs, batch_size: int, seed: int) -> None:
        self.lengths = (pairs.target.lengths.numpy(), pairs.source.lengths.numpy())
        self.batch_size = batch_size
        self.seed = seed

    def __call__(self, epoch: int) -> NDArray[np.int64]:
        generator = np.random.default_rng((self.seed, epoch))
        order = generator.permutation(len(self.lengths[0]))
        num_short = len(order) % self.batch_size
        # the last batch is short: of random lengths
        short = order[:num_short]
        order = order[num_short:]
        order = order[np.lexsort([lengths[order] for lengths in self.lengths])]  # by source, then target; stable
        batches = generator.permutation(order.reshape(-1, self.batch_size))
        return np.concatenate([batches.ravel(), short])


@dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
        tokenizers: tokenizers of the source and the target, as JSON.
        references: source and target of each pair in `held_out`.
        left_out: reason for leaving pairs out -> number of pairs.
    """

    train: Pairs
    held_out: Pairs
    references: list[tuple[str, str]]
    tokenizers: tuple[str, str]
    left_out: Counter[str]


def load_data(
    data: str,
    source_language: str,
    target_language: str,
    directory: Path,
    *,
    held_out: int | None,
    vocab_size: int,
    max_length: int,
) -> Data:
    """Read the pairs, divide them, train the tokenizers, write them into `directory`, and encode the pairs.

    The pairs of each part are in the order of their length.

    Args:
        data, source_language, target_language: as for `read_pairs`. Messages of catalogues that are too long are left
            out; a line that is too long is an error.
        held_out: as for `divide`.
        vocab_size: largest number of tokens of each language.
        max_length: largest number of tokens of a sentence, as for `Seq2Seq`.

    Raises:
        InvalidValue: there are no such data, or a pair cannot be used.
    """
    corpus = read_pairs(data, source_language, target_language)
    train, scored = divide(corpus.pairs, held_out)
    texts = [pair.source for pair in train], [pair.target for pair in train]
    source, target = (train_byte_level(each, vocab_size, SPECIAL, adds_space=True) for each in texts)
    directory.mkdir(exist_ok=True)
    for name, tokenizer in (("source", source), ("target", target)):
        replace_file(directory / f"{name}.json", tokenizer.to_str().encode())

    def encode(pairs: Sequence[Pair]) -> tuple[list[Pair], Pairs]:
        sources = encode_all(source, [p.source for p in pairs])
        targets = encode_all(target, [p.target for p in pairs])
        kept = []
        for number, pair in enumerate(pairs):
            num_tokens = max(len(sources[number]), len(targets[number])) + 1
            if num_tokens <= max_length:
                kept.append(number)
            elif corpus.is_found:
                corpus.left_out[f"pairs of more than {max_length} tokens"] += 1
            else:
                why = f"has {num_tokens} tokens, and the model takes {max_length} (--max-length)"
                raise refuse(pair.file, pair.number, why)
        if not kept:
            raise samestep.InvalidValue(
                f"no pair has at most {max_length} tokens: give a larger --max-length", code="SS303"
            )
        kept.sort(key=lambda number: len(sources[number]))
        return [pairs[k] for k in kept], Pairs([sources[k] for k in kept], [targets[k] for k in kept])

    kept, encoded_train = encode(train)
    kept, encoded_scored = (kept, encoded_train) if scored is train else encode(scored)
    references = [(pair.source, pair.target) for pair in kept]
    return Data(encoded_train, encoded_scored, references, (source.to_str(), target.to_str()), corpus.left_out)


def encode_all(tokenizer: Any, sentences: Sequence[str]) -> list[list[int]]:
    """Return the token ids of sentences. One that contains "[END]" does not end there."""
    tokenizer.encode_special_tokens = True
    return [encoding.ids for encoding in tokenizer.encode_batch(sentences)]


def divide(pairs: list[Pair], num_held_out: int | None) -> tuple[list[Pair], list[Pair]]:
    """Divide pairs into those for training and those with held-out sources, in the same way in every run.

    Args:
        num_held_out: number of sources to hold out; 0: validate on the training pairs; None: a tenth, at most 500.
    """
    sources = sorted({pair.source.casefold() for pair in pairs})
    num = min(500, max(1, len(sources) // 10)) if num_held_out is None else num_held_out
    if num == 0:
        return pairs, pairs
    if num >= len(sources):
        raise samestep.InvalidValue(
            f"{num} held-out sources of {len(sources)} leave no pair to train on: add pairs, or give a smaller "
            "--held-out, such as 0",
            code="SS303",
        )
    chosen = np.random.default_rng(0).permutation(len(sources))[:num]
    held_out = {sources[number] for number in chosen}
    parts: tuple[list[Pair], list[Pair]] = ([], [])
    for pair in pairs:
        parts[pair.source.casefold() in held_out].append(pair)
    return parts
