"""Sentence pairs as token ids, padded to batches of similar lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import samestep
from samestep.recipes.corpora.sentence_pairs import Pair, read_pairs
from samestep.recipes.corpora.text_tokenizer import train_bpe
from samestep.recipes.models.seq2seq import END, PAD, START

SPECIAL = ("[PAD]", "[START]", "[END]")  # ids 0, 1 and 2
LEAST_SIZE = 256 + len(SPECIAL)  # a token for each byte

Row = tuple[list[int], list[int]]  # token ids of a source and a target


class Pairs(Dataset[Row]):
    """Sentence pairs as token ids: the source with END, the target with START and END."""

    def __init__(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> None:
        pairs = zip(sources, targets, strict=True)
        self.rows: list[Row] = [([*source, END], [START, *target, END]) for source, target in pairs]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


def collate(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a batch of padded pairs, and its number of target tokens."""
    source = _pad([row[0] for row in rows])
    target = _pad([row[1] for row in rows])
    num_tokens = sum(len(row[1]) - 1 for row in rows)  # a number, so that the weight is not copied from a GPU
    return {"source": source, "target": target[:, :-1], "labels": target[:, 1:].contiguous(), "num_tokens": num_tokens}


def _pad(rows: Sequence[Sequence[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


class Bucketed:
    """Orders the pairs of an epoch so that the pairs of a batch have similar lengths, with the batches in random order.

    The order depends only on the epoch and the seed, not on the number of ranks.
    """

    def __init__(self, pairs: Pairs, batch_size: int, seed: int) -> None:
        self.lengths = np.array([(len(target), len(source)) for source, target in pairs.rows]).T
        self.batch_size = batch_size
        self.seed = seed

    def __call__(self, epoch: int) -> NDArray[np.int64]:
        generator = np.random.default_rng((self.seed, epoch))
        order = generator.permutation(len(self.lengths[0]))
        num_short = len(order) % self.batch_size
        # the last batch is short: of random lengths
        short = order[:num_short]
        order = order[num_short:]
        order = order[np.lexsort(self.lengths[:, order])]  # by source, then target; stable
        batches = generator.permutation(order.reshape(-1, self.batch_size))
        return np.concatenate([batches.ravel(), short])


@dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
        tokenizers: tokenizers of the source and the target, as JSON.
        references: source and target of each pair in `held_out`.
        num_left_out: pairs that are longer than the model takes.
    """

    train: Pairs
    held_out: Pairs
    references: list[Pair]
    tokenizers: tuple[str, str]
    num_left_out: int


def load_data(
    data: str,
    source: str,
    target: str,
    directory: Path,
    *,
    num_held_out: int | None,
    vocab_size: int,
    max_length: int,
) -> Data:
    """Read the pairs, divide them, train the tokenizers, write them into `directory`, and encode the pairs.

    Pairs of more than `max_length` tokens are left out. The held-out pairs are in the order of their length.

    Args:
        data, source, target: as for `read_pairs`.
        num_held_out: as for `divide`.
        vocab_size: largest number of tokens of each language.

    Raises:
        InvalidValue: there are no such data, or a pair cannot be used.
    """
    pairs = read_pairs(data, source, target)
    train, scored = divide(pairs, num_held_out)
    directory.mkdir(exist_ok=True)
    tokenizers = []
    for name, texts in zip(("source", "target"), zip(*train, strict=True), strict=True):
        tokenizers.append(train_bpe(texts, vocab_size, SPECIAL, adds_space=True, min_frequency=0))
        (directory / f"{name}.json").write_text(tokenizers[-1].to_str(), "utf-8")
    encoded_train, kept_train = _encode(train, tokenizers, max_length)
    encoded_scored, kept_scored = _encode(scored, tokenizers, max_length)
    if not kept_train or not kept_scored:
        raise samestep.InvalidValue(
            f"too few pairs have at most {max_length} tokens: give a larger --max-length", code="SS303"
        )
    num_left_out = len(train) - len(kept_train)
    texts = (tokenizers[0].to_str(), tokenizers[1].to_str())
    return Data(encoded_train, encoded_scored, kept_scored, texts, num_left_out)


def _encode(pairs: Sequence[Pair], tokenizers: Sequence[Any], max_length: int) -> tuple[Pairs, list[Pair]]:
    """Return the pairs of at most `max_length` tokens, encoded and as text, in the order of their length."""
    sources, targets = (
        encode_all(tokenizer, [pair[side] for pair in pairs]) for side, tokenizer in enumerate(tokenizers)
    )
    kept = [k for k in range(len(pairs)) if max(len(sources[k]), len(targets[k])) < max_length]
    kept.sort(key=lambda k: len(sources[k]))
    return Pairs([sources[k] for k in kept], [targets[k] for k in kept]), [pairs[k] for k in kept]


def encode_all(tokenizer: Any, sentences: Sequence[str]) -> list[list[int]]:
    """Return the token ids of sentences. One that contains "[END]" does not end there."""
    tokenizer.encode_special_tokens = True
    return [encoding.ids for encoding in tokenizer.encode_batch(sentences)]


def divide(pairs: list[Pair], num_held_out: int | None) -> tuple[list[Pair], list[Pair]]:
    """Divide pairs into those for training and those with held-out sources, in the same way in every run.

    Args:
        num_held_out: number of sources to hold out; 0: validate on the training pairs; None: a tenth, at most 500.
    """
    sources = sorted({source.casefold() for source, _ in pairs})
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
        parts[pair[0].casefold() in held_out].append(pair)
    return parts
