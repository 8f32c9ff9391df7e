"""Compares the records of a script's ranks, and reports the usual mistakes of distributed training."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from samestep.tools.traced_script import read_lines
from samestep.units import format_ranks

OK = "ok"
MISTAKE = "MISTAKE"
UNSEEN = "not observed"
GRADIENT_TOLERANCE = 5e-3  # of the norm; gradients that are compressed to bfloat16 for the network are accurate to 2e-3
TOLERANCE = 1e-6  # of the norm, between copies of float32
FEWEST = 8  # samples whose order is compared

Runs = Mapping[int, Sequence["Rank"]]  # number of ranks -> records of each
Finding = tuple[str, str]  # OK or MISTAKE, and a sentence
Vector = Sequence[float]  # a projection


@dataclass(frozen=True)
class CheckResult:
    """The result of one check: OK, MISTAKE or UNSEEN, and sentences."""

    check: str
    verdict: str
    text: str


@dataclass
class Pass:
    """One pass of a rank over a loader.

    Attributes:
        dataset: the number of the data set, in the order in which this rank uses them.
        length, num_batches: of the data set and of the loader; None: they have none.
        drop_last: whether the loader or its sampler has this option.
        is_subset: the loader's data set is a Subset.
        is_shuffled: the order of the samples can be another one in each pass.
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
    is_shuffled: bool = True
    ids: list[list[Any]] = field(default_factory=list)
    is_grad: bool = False
    is_ended: bool = False
    is_trimmed: bool = False
    num_backwards: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether the pass reached the end of the loader. Lightning requests none after the last batch."""
        return self.is_ended or len(self.ids) == self.num_batches

    @property
    def samples(self) -> list[Any]:
        """The ids of all batches."""
        return [each for batch in self.ids for each in batch]

    @property
    def num_samples(self) -> int | None:
        """The number of samples in its data set; None if it is not known."""
        return len({*self.samples}) if self.length is None and self.is_complete else self.length


@dataclass
class Rank:
    """The record of one rank.

    Attributes:
        updates: of all optimizers: the fields of the event "update", and "num_backwards" until its end.
        is_cut: the recorder has ended the script after the steps of the trial.
    """

    rank: int = -1
    passes: list[Pass] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False

    @property
    def num_steps(self) -> int:
        """The largest number of updates of an optimizer."""
        return max(Counter(update["optimizer"] for update in self.updates).values(), default=0)

    def list_passes(self, *, is_training: bool) -> list[Pass]:
        """Return its passes in order: those with backward passes, or the others."""
        return [each for each in self.passes if each.ids and (each.num_backwards > 0) == is_training]

    def count_samples(self) -> list[int]:
        """Return the number of samples of each backward pass; [] if it is not known."""
        passes = self.list_passes(is_training=True)
        if any(each.num_backwards > len(each.ids) for each in passes) or self.num_steps < len(self.updates):
            return []
        return [len(batch) for each in passes for batch in each.ids[: each.num_backwards]]  # others are fetched ahead


def read_ranks(directory: Path) -> list[Rank]:
    """Read the records of the processes that made an update, in the order of their ranks."""
    ranks = [_read_rank(read_lines(path)) for path in directory.glob("rank-*.jsonl")]
    return sorted((each for each in ranks if each.updates), key=lambda each: each.rank)


def _read_rank(lines: Iterable[dict[str, Any]]) -> Rank:
    """Read the events that `plain_recorder` describes."""
    record = Rank()
    num_backwards = 0
    newest: dict[int, Pass] = {}  # data set -> its newest pass
    latest: Pass | None = None  # the pass of the last batch
    for line in lines:
        match line.pop("event"):
            case "begin_pass":
                newest[line["dataset"]] = Pass(**line)
                record.passes.append(newest[line["dataset"]])
            case "batch":
                latest = record.passes[line["pass_number"]]
                latest.ids.append(line["ids"])
                latest.is_grad |= line["is_grad"]
            case "end_pass":
                record.passes[line["pass_number"]].is_ended = True
            case "backward":
                num_backwards += 1
                for each in newest.values():  # several, if a loop takes batches from several loaders
                    each.num_backwards += each.is_grad and (each is latest or not each.is_ended)
            case "trim" if latest is not None:
                latest.is_trimmed = True
            case "update":
                record.rank = line["rank"]
                record.updates.append({**line, "num_backwards": num_backwards})
            case "cut":
                record.is_cut = True
    return record


# --- samples ------------------------------------------------------------------------------------------------------


def check_samples(runs: Runs) -> Iterator[Finding]:
    """Check that the ranks together train on each sample once per epoch."""
    return _check_epochs(runs, is_training=True)


def check_evaluation(runs: Runs) -> Iterator[Finding]:
    """Check that an evaluation counts each sample once."""
    return _check_epochs(runs, is_training=False)


def _check_epochs(runs: Runs, *, is_training: bool) -> Iterator[Finding]:
    alone = [passes[0] for passes in _group_passes(runs.get(1, []), is_training)]
    if is_training and any(len({*each.samples}) < len(each.samples) for each in alone):
        return  # it draws samples several times per epoch
    for size, ranks in runs.items():
        for number, passes in enumerate(_group_passes(ranks, is_training)):
            length = (alone[number] if number < len(alone) else passes[0]).num_samples
            for verdict, sentence in _judge_epoch(passes, length, is_training):
                yield verdict, f"on {format_ranks(size)}, {sentence}"


def _group_passes(ranks: Sequence[Rank], is_training: bool) -> list[list[Pass]]:
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
    drawn = [each.samples for each in passes]
    if len(passes) > 1 and length == sum(each.length or 0 for each in passes) and not passes[0].is_subset:
        # Each rank has a data set of its own part, so that equal indices are other samples.
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
        advice = "give each rank its share without padding, and add up sums and counts"
        yield MISTAKE, f"{len(repeated)} of {num} samples count more than once{padding}: {advice}"
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
            if not one.is_shuffled or all(a < b for a, b in pairwise(one.samples)):
                yield OK, "the samples are not shuffled"
            elif one.samples[:num] == other.samples[:num]:
                where = f"on {format_ranks(size)}"
                yield MISTAKE, f"{where}, epochs have the same shuffled order: call sampler.set_epoch(epoch)"
            else:
                yield OK, "a different one in each epoch"


# --- gradients and weights ----------------------------------------------------------------------------------------


def compare(one: Vector, other: Vector) -> float:
    """Return the distance of two projections, relative to the larger one."""
    larger = max(math.hypot(*one), math.hypot(*other))
    return math.dist(one, other) / larger if larger else 0.0


def _fit(one: Vector, other: Vector) -> tuple[float, float]:
    """Return the factor c for which `one` is nearest to c * other, and the distance from it."""
    square = _dot(other, other)
    factor = _dot(one, other) / square if square else 0.0
    return factor, compare(one, [factor * each for each in other])


def _average(vectors: Sequence[Vector], weights: Vector) -> list[float]:
    return [_dot(weights, column) / sum(weights) for column in zip(*vectors, strict=True)]


def _dot(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def check_gradient(runs: Runs) -> Iterator[Finding]:
    """Check that updates use the mean of the gradients over all samples of all ranks."""
    for size, ranks in runs.items():
        if size == 1 or len(ranks) != size:
            continue
        num_right = 0
        num_same = 0
        counts = [rank.count_samples() for rank in ranks]
        begins = [0] * size
        for step, updates in enumerate(zip(*(rank.updates for rank in ranks), strict=False)):
            ends = [update["num_backwards"] for update in updates]
            weights = [sum(of_rank[a:b]) for of_rank, a, b in zip(counts, begins, ends, strict=True)]
            begins = ends
            computed = [update["computed"] for update in updates]
            if not all(computed) or not any(math.hypot(*each) for each in computed):
                continue
            used = [update["used"] for update in updates]
            if fault := _judge_gradient(computed, used, weights if all(weights) else [1] * size):
                yield MISTAKE, f"on {size} ranks, in step {step}, {fault}"
                break
            num_right += 1
            num_same += max(compare(computed[0], each) for each in computed) <= TOLERANCE
        if num_right:
            yield OK, f"the mean over the ranks in {num_right} steps"
        if num_right and num_same == num_right:
            yield MISTAKE, f"on {size} ranks, all ranks compute the same gradient: give each other samples"


def _judge_gradient(computed: Sequence[Vector], used: Sequence[Vector], weights: Vector) -> str | None:
    """Judge the gradients of one update of all ranks, clipped or not. Returns None if they are the mean."""
    size = len(computed)
    mean = _average(computed, [1.0] * size)
    factors, distances = zip(*(_fit(each, mean) for each in used), strict=True)
    of_weighted = max(_fit(each, _average(computed, weights))[1] for each in used)
    if of_weighted > GRADIENT_TOLERANCE and max(distances) <= GRADIENT_TOLERANCE:
        return (
            f"ranks with {min(weights):g} and {max(weights):g} samples have the same weight in the gradient, so that "
            "it is not the mean over the samples"
        )
    if of_weighted > GRADIENT_TOLERANCE:
        if max(_fit(*pair)[1] for pair in zip(used, computed, strict=True)) <= GRADIENT_TOLERANCE:
            return "each rank updates with its own gradient: wrap the model in DistributedDataParallel"
        return f"the gradient is not the mean over the ranks: it is off by {max(distances):.1e} of its norm"
    if abs(factors[0] - size) <= GRADIENT_TOLERANCE * size:
        return f"the gradient is the sum over the ranks, {factors[0]:.3g} times the mean: divide by the world size"
    return None


def check_replicas(runs: Runs) -> Iterator[Finding]:
    """Check that all ranks hold the same weights after each update."""
    sizes = [rank.updates[0]["num_elements"] for ranks in runs.values() for rank in ranks]
    for size, ranks in runs.items():
        if size == 1 or len(ranks) != size or any(rank.updates[0]["num_elements"] != max(sizes) for rank in ranks):
            continue
        for step, updates in enumerate(zip(*(rank.updates for rank in ranks), strict=False)):
            if (error := max(compare(updates[0]["after"], each["after"]) for each in updates)) > TOLERANCE:
                how = f"have different weights after step {step} (by {error:.1e} of their norm)"
                yield MISTAKE, f"on {size} ranks, ranks {how}"
                break
        else:
            yield OK, f"the same weights on {size} ranks after each of {ranks[0].num_steps} steps"


# Check -> what it does, and why it may have nothing to judge.
CHECKS: dict[str, tuple[Callable[[Runs], Iterator[Finding]], str]] = {
    "samples": (check_samples, "no DataLoader was iterated before a backward pass, or samples are drawn repeatedly"),
    "order": (check_order, "fewer than two epochs over a data set with indices began"),
    "gradient": (check_gradient, "no gradient of several ranks was seen before it was averaged"),
    "replicas": (check_replicas, "no weights that each rank has a copy of were updated on several ranks"),
    "evaluation": (check_evaluation, "no complete pass over a DataLoader without a backward pass"),
}


def check_all(runs: Runs) -> list[CheckResult]:
    """Return the result of each check."""
    results = []
    for name, (check, unseen) in CHECKS.items():
        found: dict[str, list[str]] = {}  # verdict -> sentences
        for verdict, sentence in check(runs):
            found.setdefault(verdict, []).append(sentence)
        verdict = next((each for each in (MISTAKE, OK) if each in found), UNSEEN)
        results.append(CheckResult(name, verdict, "; ".join(dict.fromkeys(found.get(verdict, [unseen])))))
    return results
