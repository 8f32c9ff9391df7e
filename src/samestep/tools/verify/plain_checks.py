"""What `plain_recorder` records about a script's ranks, and the usual mistakes of distributed training in it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from samestep.console import format_count
from samestep.files import read_bytes

OK = "ok"
MISTAKE = "MISTAKE"
UNSEEN = "not observed"
GRADIENT_TOLERANCE = 5e-3  # of the norm; gradients that are compressed to bfloat16 for the network are accurate to 2e-3
TOLERANCE = 1e-6  # of the norm, between copies of float32
FEWEST = 8  # samples whose order is compared


class Pass(msgspec.Struct):
    """One pass of a rank over a loader.

    Attributes:
        dataset: the number of the data set, in the order in which this rank uses them.
        length, num_batches: of the data set and of the loader; None: they have none.
        drop_last: whether the loader or its sampler has this option.
        is_subset: the loader's data set is a Subset.
        ids: the samples of each batch: their indices, or hashes of their contents.
        is_grad: a batch was taken while gradients were enabled.
        is_ended: the loop has requested a batch after the last one.
        is_trimmed: Accelerate has removed the padding from results.
        num_backwards: backward passes while it was open, if `is_grad`.
    """

    dataset: int
    length: int | None
    num_batches: int | None
    drop_last: bool = False
    is_subset: bool = False
    ids: list[list[int | str]] = []
    is_grad: bool = False
    is_ended: bool = False
    is_trimmed: bool = False
    num_backwards: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether the pass reached the end of the loader. Lightning requests none after the last batch."""
        return self.is_ended or len(self.ids) == self.num_batches

    @property
    def samples(self) -> list[int | str]:
        """The ids of all batches."""
        return [each for batch in self.ids for each in batch]

    @property
    def num_samples(self) -> int | None:
        """The number of samples in its data set; None if it is not known."""
        return len({*self.samples}) if self.length is None and self.is_complete else self.length


class Update(msgspec.Struct):
    """A step of an optimizer. Tensors are projected, see `plain_recorder`.

    Attributes:
        optimizer: its number.
        num_elements: of its parameters, on this rank.
        num_samples: of the backward passes since the last update; nan if it is not known.
        computed: the gradient of this rank; None if it was not seen.
        used: the gradient in `.grad`.
        after: the weights.
    """

    optimizer: int
    num_elements: int
    num_samples: float
    computed: list[float] | None
    used: list[float]
    after: list[float]


class PlainRank(msgspec.Struct):
    """The record of one rank.

    Attributes:
        passes: in the order in which they began.
        updates: of all optimizers.
        is_cut: the recorder has ended the script after the steps of the trial.
    """

    rank: int = -1
    passes: list[Pass] = []
    updates: list[Update] = []
    is_cut: bool = False

    @property
    def num_steps(self) -> int:
        """The largest number of updates of an optimizer."""
        return max(Counter(update.optimizer for update in self.updates).values(), default=0)

    def list_passes(self, *, is_training: bool) -> list[Pass]:
        """Return its passes in order: those with backward passes, or the others."""
        return [each for each in self.passes if each.ids and (each.num_backwards > 0) == is_training]


def read_ranks(directory: Path) -> list[PlainRank]:
    """Read the records of the processes that made an update, in the order of their ranks."""
    ranks = [msgspec.msgpack.decode(read_bytes(path), type=PlainRank) for path in directory.glob("*.record")]
    return sorted((each for each in ranks if each.updates), key=lambda each: each.rank)


Runs = Mapping[int, Sequence[PlainRank]]  # number of ranks -> records of each
Finding = tuple[str, str]  # OK, MISTAKE or UNSEEN, and a sentence
Vectors = NDArray[np.float64]  # a projection per rank


# --- samples ------------------------------------------------------------------------------------------------------


def check_epochs(runs: Runs, *, is_training: bool) -> Iterator[Finding]:
    """Check that the ranks together train on each sample once per epoch, or that an evaluation counts each once."""
    alone = [passes[0] for passes in _group_passes(runs.get(1, []), is_training)]
    if is_training and any(len({*each.samples}) < len(each.samples) for each in alone):
        return  # it draws samples several times per epoch
    for size, ranks in runs.items():
        for number, passes in enumerate(_group_passes(ranks, is_training)):
            length = (alone[number] if number < len(alone) else passes[0]).num_samples
            for verdict, sentence in _judge_epoch(passes, length, is_training):
                yield verdict, f"on {format_count(size, 'rank')}, {sentence}"


def _group_passes(ranks: Sequence[PlainRank], is_training: bool) -> list[list[Pass]]:
    """Return the n-th passes over each data set, of the ranks that made them."""
    groups: dict[tuple[int, int], list[Pass]] = {}
    for rank in ranks:
        counts: Counter[int] = Counter()
        for each in rank.list_passes(is_training=is_training):
            groups.setdefault((each.dataset, counts[each.dataset]), []).append(each)
            counts[each.dataset] += 1
    return [groups[key] for key in sorted(groups)]


def _judge_epoch(passes: Sequence[Pass], length: int | None, is_training: bool) -> Iterator[Finding]:
    """Judge the n-th passes of all ranks over a data set. `length`: number of samples of the data set on 1 rank."""
    is_complete = all(each.is_complete for each in passes)
    if not is_complete and not is_training:
        return
    drawn: list[list[Any]] = [each.samples for each in passes]
    if len(passes) > 1 and length == sum(each.length or 0 for each in passes) and not passes[0].is_subset:
        # Each rank has a data set of its share, so that equal indices are other samples.
        drawn = [[(rank, each) for each in samples] for rank, samples in enumerate(drawn)]
    counts = Counter(each for samples in drawn for each in samples)
    num = len(counts)
    repeated = {each for each, count in counts.items() if count > 1}
    last = {each for one, samples in zip(passes, drawn, strict=True) for each in samples[-len(one.ids[-1]) :]}
    padding = ", as padding" if is_complete and repeated <= last else ""
    num_missing = max((length or 0) - num, 0) if is_complete else 0
    is_dropped = is_training and passes[0].drop_last and num_missing < sum(len(each.ids[0]) for each in passes)
    num_batches = sorted({len(each.ids) for each in passes})

    if len(drawn) > 1 and all({*samples} == counts.keys() for samples in drawn):
        if is_training:
            yield MISTAKE, f"every rank trains on the same {num} samples: use a DistributedSampler"
        else:
            yield OK, f"each rank evaluates all {num} samples: correct, but no faster than one"
    elif repeated and is_training:
        yield OK if padding else MISTAKE, f"{len(repeated)} of {num} samples are repeated in an epoch{padding}"
    elif repeated and not all(each.is_trimmed for each in passes):
        found = f"{len(repeated)} of {num} samples count more than once{padding}"
        yield MISTAKE, f"{found}: give each rank its share without padding, and add up sums and counts"
    if is_training and is_complete and len(num_batches) > 1:
        yield MISTAKE, f"ranks have {num_batches[0]} to {num_batches[-1]} batches in an epoch"
    if num_missing:
        how = "left out by drop_last" if is_dropped else "skipped"
        yield OK if is_dropped else MISTAKE, f"{num_missing} of {length} samples are {how} in an epoch"
    elif not is_complete:
        yield OK, "an epoch is longer than the trial: only repeats were looked for"
    elif not repeated:
        yield OK, f"an epoch has each of {num} samples"


def check_order(runs: Runs) -> Iterator[Finding]:
    """Check that shuffled samples have another order in each epoch."""
    for size, ranks in runs.items():
        for one, other in pairwise(ranks[0].list_passes(is_training=True)):
            num = min(len(one.samples), len(other.samples))
            if one.dataset != other.dataset or num < FEWEST or isinstance(one.samples[0], str):
                continue
            if one.samples[: num - 1] == sorted(one.samples[: num - 1]):  # the last one may be padding
                yield OK, "the samples are not shuffled"
            elif one.samples[:num] == other.samples[:num]:
                found = f"on {format_count(size, 'rank')}, epochs have the same shuffled order"
                yield MISTAKE, f"{found}: call sampler.set_epoch(epoch)"
            else:
                yield OK, "a different one in each epoch"


# --- gradients and weights ----------------------------------------------------------------------------------------


def check_gradient(runs: Runs) -> Iterator[Finding]:
    """Check that updates use the mean of the gradients over all samples of all ranks."""
    for size, steps in _list_steps(runs):
        num_right = 0
        num_same = 0
        for step, updates in enumerate(steps):
            computed = np.array([update.computed for update in updates if update.computed])
            if len(computed) < size or not computed.any():
                continue
            if fault := _judge_gradient(computed, updates):
                yield MISTAKE, f"on {size} ranks, in step {step}, {fault}"
                break
            num_right += 1
            num_same += find_distance(computed) <= TOLERANCE
        if num_right:
            yield OK, f"the mean over the ranks in {num_right} steps"
        if num_right and num_same == num_right:
            yield MISTAKE, f"on {size} ranks, all ranks compute the same gradient: give each other samples"


def _list_steps(runs: Runs) -> Iterator[tuple[int, list[tuple[Update, ...]]]]:
    """Yield each number of ranks but 1, and the updates of all ranks in each step."""
    for size, ranks in runs.items():
        if size > 1 and len(ranks) == size:
            yield size, [*zip(*(rank.updates for rank in ranks), strict=False)]


def _judge_gradient(computed: Vectors, updates: Sequence[Update]) -> str | None:
    """Judge the gradients of one update of all ranks, clipped or not. Returns None if they are the mean."""
    size = len(updates)
    used = np.array([update.used for update in updates])
    weights = np.array([update.num_samples for update in updates])
    if not (weights > 0).all():  # they are not known
        weights = np.ones(size)
    mean = computed.mean(0)
    off = _find_deviation(used, mean)
    if _find_deviation(used, np.average(computed, 0, weights)) > GRADIENT_TOLERANCE:
        if off <= GRADIENT_TOLERANCE:
            return (
                f"ranks with {weights.min():g} and {weights.max():g} samples have the same weight in the gradient, so "
                "that it is not the mean over the samples"
            )
        if _find_deviation(used, computed) <= GRADIENT_TOLERANCE:
            return "each rank updates with its own gradient: wrap the model in DistributedDataParallel"
        return f"the gradient is not the mean over the ranks: it is off by {off:.1e} of its norm"
    factor = used[0] @ mean / (mean @ mean)
    if abs(factor - size) <= GRADIENT_TOLERANCE * size:
        return f"the gradient is the sum over the ranks, {factor:.3g} times the mean: divide by the world size"
    return None


def _find_deviation(vectors: Vectors, others: Vectors) -> float:
    """Return the largest distance of a vector from the nearest multiple of the other one, relative to its length."""
    squares = (others**2).sum(-1, keepdims=True)
    factors = (vectors * others).sum(-1, keepdims=True) / np.where(squares, squares, 1)
    lengths = np.linalg.norm(vectors, axis=1)
    distances = np.linalg.norm(vectors - factors * others, axis=1)
    return float((distances / np.where(lengths, lengths, 1)).max())


def find_distance(vectors: Vectors) -> float:
    """Return the largest distance from the first vector, relative to the longest one."""
    longest = np.linalg.norm(vectors, axis=1).max()
    return float(np.linalg.norm(vectors - vectors[0], axis=1).max() / longest) if longest else 0.0


def check_replicas(runs: Runs) -> Iterator[Finding]:
    """Check that all ranks have the same weights after each update."""
    num_elements = max(rank.updates[0].num_elements for ranks in runs.values() for rank in ranks)
    for size, steps in _list_steps(runs):
        if any(update.num_elements != num_elements for update in steps[0]):
            continue  # a rank has a shard of the weights
        errors = [find_distance(np.array([update.after for update in updates])) for updates in steps]
        step = next((step for step, error in enumerate(errors) if error > TOLERANCE), None)
        if step is None:
            yield OK, f"the same weights on {size} ranks after each of {len(steps)} steps"
        else:
            by = f"{errors[step]:.1e} of their norm"
            yield MISTAKE, f"on {size} ranks, ranks have different weights after step {step} (by {by})"


# Check -> what it does, and why it may have nothing to judge.
CHECKS: dict[str, tuple[Callable[[Runs], Iterator[Finding]], str]] = {
    "samples": (
        partial(check_epochs, is_training=True),
        "no DataLoader was iterated before a backward pass, or samples are drawn again",
    ),
    "order": (check_order, "fewer than two epochs over a data set with indices began"),
    "gradient": (check_gradient, "no gradient of several ranks was seen before it was averaged"),
    "replicas": (check_replicas, "no weights that each rank has a copy of were updated on several ranks"),
    "evaluation": (
        partial(check_epochs, is_training=False),
        "no complete pass over a DataLoader without a backward pass",
    ),
}


def check_all(runs: Runs) -> dict[str, Finding]:
    """Return the result of each check, with all sentences of its verdict."""
    results = {}
    for name, (check, unseen) in CHECKS.items():
        found = [*check(runs)] or [(UNSEEN, unseen)]
        verdict = MISTAKE if any(each == MISTAKE for each, _ in found) else found[0][0]
        sentences = dict.fromkeys(sentence for each, sentence in found if each == verdict)
        results[name] = verdict, "; ".join(sentences)
    return results
