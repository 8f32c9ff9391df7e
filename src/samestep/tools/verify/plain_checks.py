"""Compares the records of a script's ranks, and reports the usual mistakes of distributed training."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from samestep.tools.traced_script import read_lines
from samestep.tools.verify.trials import STUCK
from samestep.units import format_ranks

OK = "ok"
MISTAKE = "MISTAKE"
NOTE = "note"
UNSEEN = "not observed"
GRADIENT_TOLERANCE = 5e-3  # of the norm; gradients that are compressed to bfloat16 for the network are accurate to 2e-3
TOLERANCE = 1e-6  # of the norm, between copies of float32
FEWEST = 8  # samples whose order is compared
ALONE = "on 1 rank"

Runs = Mapping[int, Sequence["Rank"]]  # number of ranks -> records of each
Update = Mapping[str, Any]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check: OK, MISTAKE, NOTE (correct, but see the sentence) or UNSEEN, and a sentence."""

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
        is_open: more batches may follow.
        is_ended: the loop has requested a batch after the last one.
        is_trimmed: Accelerate has removed the padding from results.
        num_backwards: backward passes while it was open, if `is_grad`.
        num_before: batches before the one during which the first of them ran.
    """

    dataset: int
    length: int | None
    num_batches: int | None
    drop_last: bool = False
    is_subset: bool = False
    is_shuffled: bool = True
    ids: list[list[Any]] = field(default_factory=list)
    is_grad: bool = False
    is_open: bool = True
    is_ended: bool = False
    is_trimmed: bool = False
    num_backwards: int = 0
    num_before: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether the pass reached the end of the loader. Lightning requests none after the last batch."""
        return self.is_ended or len(self.ids) == self.num_batches

    @property
    def num_ahead(self) -> int:
        """Number of batches that the loop fetches before it trains on one; 0 if the pass is not complete."""
        return max(self.num_before - len(self.ids) + self.num_backwards, 0) if self.is_complete else 0

    def flatten(self) -> list[Any]:
        """Return the ids of all batches."""
        return [each for batch in self.ids for each in batch]


@dataclass
class Rank:
    """The record of one rank.

    Attributes:
        updates: of all optimizers: the fields of the events "begin_update" and "end_update", and "num_backwards" until
            its end. An update without "after" has not ended.
        is_cut: the recorder has ended the script after the steps of the trial.
    """

    rank: int = -1
    passes: list[Pass] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False

    @property
    def num_steps(self) -> int:
        """Number of updates of its first optimizer."""
        return sum(update["optimizer"] == 0 for update in self.updates)

    def list_passes(self, is_training: bool) -> list[Pass]:
        """Return its passes in order: those with backward passes, or the others."""
        return [each for each in self.passes if each.ids and (each.num_backwards > 0) == is_training]

    def list_batches(self) -> list[list[Any]] | None:
        """Return the batches that it trained on; None if they are not one per backward pass."""
        passes = self.list_passes(True)
        num_ahead = max((each.num_ahead for each in passes), default=0)
        batches: list[list[Any]] = []
        for each in passes:
            first = max(each.num_before - num_ahead, 0)
            if first + each.num_backwards > len(each.ids):
                return None
            batches += each.ids[first : first + each.num_backwards]
        return batches


def read_ranks(directory: Path) -> list[Rank]:
    """Read the records of the processes that made an update, in the order of their ranks."""
    ranks = [_read_rank(read_lines(path)) for path in directory.glob("rank-*.jsonl")]
    return sorted((each for each in ranks if each.updates), key=lambda each: each.rank)


def _read_rank(lines: Iterable[dict[str, Any]]) -> Rank:
    """Read the events that `plain_recorder` describes."""
    record = Rank()
    num_backwards = 0
    latest = None
    for line in lines:
        match line.pop("event"):
            case "begin_pass":
                for each in record.passes:
                    each.is_open &= each.dataset != line["dataset"]
                record.passes.append(Pass(**line))
            case "batch":
                latest = record.passes[line["pass_number"]]
                latest.ids.append(line["ids"])
                latest.is_grad |= line["is_grad"]
            case "end_pass":
                ended = record.passes[line["pass_number"]]
                ended.is_ended = True
                ended.is_open = False
            case "backward":
                num_backwards += 1
                for each in record.passes:  # several, if a loop takes batches from several loaders
                    if each.is_grad and (each is latest or each.is_open):
                        each.num_before = each.num_before if each.num_backwards else len(each.ids) - 1
                        each.num_backwards += 1
            case "trim" if latest is not None:
                latest.is_trimmed = True
            case "begin_update":
                record.rank = line["rank"]
                record.updates.append(line)
            case "end_update":
                record.updates[-1] |= {**line, "num_backwards": num_backwards}
            case "cut":
                record.is_cut = True
    return record


def _join_updates(ranks: Sequence[Rank]) -> list[list[Update]]:
    """Return the updates that all ranks have completed: the fields of each rank."""
    joined = zip(*(rank.updates for rank in ranks), strict=False)
    return [[*lines] for lines in joined if all("after" in line for line in lines)]


def describe_end(code: int) -> str:
    """Describe how a start has ended that should have ended with exit code 0."""
    return "does not end" if code == STUCK else f"ends with exit code {code}"


def compare(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the distance of two projections, relative to the larger one."""
    larger = max(math.hypot(*one), math.hypot(*other))
    return math.dist(one, other) / larger if larger else 0.0


def _fit(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the factor c for which `one` is nearest to c * other, and the distance from it."""
    square = _dot(other, other)
    factor = _dot(one, other) / square if square else 0.0
    return factor, compare(one, [factor * each for each in other])


def _average(vectors: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    return [_dot(weights, column) / sum(weights) for column in zip(*vectors, strict=True)]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _conclude(check: str, faults: Sequence[str], notes: Sequence[str], unseen: str) -> CheckResult:
    if faults:
        return CheckResult(check, MISTAKE, "; ".join(dict.fromkeys(faults)))
    return CheckResult(check, OK, "; ".join(dict.fromkeys(notes))) if notes else CheckResult(check, UNSEEN, unseen)


# --- samples ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnEpoch:
    """The n-th passes of all ranks over a data set.

    Attributes:
        where: the number of ranks, in words.
        length: the number of different samples in the data set of one process; None if it is not known.
        is_split: each rank has a data set of its own part, so that equal indices are other samples.
        counts: sample -> how often the ranks together have drawn it.
    """

    where: str
    passes: Sequence[Pass]
    length: int | None
    is_split: bool
    counts: Mapping[Any, int]

    @property
    def is_repeated(self) -> bool:
        """Whether all of several ranks have drawn the same samples in the same order."""
        drawn = [each.flatten() for each in self.passes]
        num = min(map(len, drawn))
        return not self.is_split and len(drawn) > 1 and num >= FEWEST and all(d[:num] == drawn[0][:num] for d in drawn)

    @property
    def is_complete(self) -> bool:
        return all(each.is_complete for each in self.passes)

    @property
    def is_everywhere(self) -> bool:
        """Whether each of several ranks has drawn all samples."""
        return len(self.passes) > 1 and all({*each.flatten()} == self.counts.keys() for each in self.passes)

    @property
    def num_missing(self) -> int:
        """Number of samples that a complete epoch does not have."""
        return max(self.length - len(self.counts), 0) if self.is_complete and self.length is not None else 0

    @property
    def num_repeated(self) -> int:
        """Number of samples that were drawn more than once."""
        return sum(count > 1 for count in self.counts.values())

    @property
    def is_padded(self) -> bool:
        """Whether the repeated samples of a complete epoch are all in the last batch of a rank."""
        last = {each for one in self.passes for each in one.ids[-1]}
        return self.is_complete and {each for each, count in self.counts.items() if count > 1} <= last


def _list_epochs(runs: Runs, is_training: bool) -> list[DrawnEpoch]:
    """Return the epochs with or without backward passes, those of each number of ranks in order."""
    lengths: list[int | None] = []  # of the data sets on 1 rank, or the number of samples of an iterable one
    for alone, *_ in _group_passes(runs.get(1, []), is_training):
        num = len({*alone.flatten()}) if alone.is_complete else None
        lengths.append(num if alone.length is None else alone.length)
    epochs = []
    for size, ranks in runs.items():
        for passes, length in zip_longest(_group_passes(ranks, is_training), lengths):
            if passes:
                epochs.append(_count(format_ranks(size), passes, length))
    return epochs


def _group_passes(ranks: Sequence[Rank], is_training: bool) -> list[list[Pass]]:
    """Return the n-th passes over each data set, of the ranks that made them."""
    groups: dict[tuple[int, int], list[Pass]] = {}
    for rank in ranks:
        counts: Counter[int] = Counter()
        for each in rank.list_passes(is_training):
            groups.setdefault((each.dataset, counts[each.dataset]), []).append(each)
            counts[each.dataset] += 1
    return [groups[key] for key in sorted(groups)]


def _count(where: str, passes: Sequence[Pass], length: int | None) -> DrawnEpoch:
    """Count the samples in the passes of all ranks. `length`: on 1 rank."""
    lengths = [each.length for each in passes]
    is_split = len(passes) > 1 and length == sum(each or 0 for each in lengths) and not passes[0].is_subset
    ids = ((rank, each) if is_split else each for rank, one in enumerate(passes) for each in one.flatten())
    return DrawnEpoch(f"on {where}", passes, length if length is not None else lengths[0], is_split, Counter(ids))


def check_samples(runs: Runs) -> CheckResult:
    """Check that the ranks together train on each sample once per epoch."""
    epochs = _list_epochs(runs, True)
    if any(epoch.num_repeated for epoch in epochs if epoch.where == ALONE):
        faults = [
            f"{epoch.where}, every rank draws the same samples in the same order: use a DistributedSampler, or other "
            "seeds"
            for epoch in epochs
            if epoch.is_repeated
        ]
        return _conclude("samples", faults, [], "a single process also draws samples several times per epoch")
    faults = []
    notes = []
    for epoch in epochs:
        where = epoch.where
        num = len(epoch.counts)
        num_repeated = epoch.num_repeated
        num_missing = epoch.num_missing
        num_batches = sorted({len(each.ids) for each in epoch.passes})
        if num_repeated and epoch.is_everywhere:
            faults.append(f"{where}, every rank trains on the same {num} samples: use a DistributedSampler")
        elif num_repeated and epoch.is_padded:
            notes.append(f"{where}, {num_repeated} of {num} samples are repeated at the end of an epoch, as padding")
        elif num_repeated:
            faults.append(f"{where}, {num_repeated} of {num} samples are repeated in an epoch")
        if epoch.is_complete and len(num_batches) > 1:
            faults.append(f"{where}, ranks have {num_batches[0]} to {num_batches[-1]} batches in an epoch")
        if not epoch.is_complete:
            notes.append(f"{where}, an epoch is longer than the trial: only repeats were looked for")
        elif num_missing and epoch.passes[0].drop_last and num_missing < sum(len(p.ids[0]) for p in epoch.passes):
            notes.append(f"{where}, {num_missing} of {epoch.length} are left out of an epoch by drop_last")
        elif num_missing:
            faults.append(f"{where}, {num_missing} of {epoch.length} samples are skipped in an epoch")
        elif not num_repeated:
            notes.append(f"{where}, an epoch has each of {num} samples")
    return _conclude("samples", faults, notes, "no torch DataLoader was iterated before a backward pass")


def check_order(runs: Runs) -> CheckResult:
    """Check that shuffled samples have another order in each epoch."""
    faults = []
    notes = []
    for size, ranks in runs.items():
        for one, other in pairwise(ranks[0].list_passes(True)):
            places = one.flatten()
            num = min(len(places), len(other.flatten()))
            if one.dataset != other.dataset or num < FEWEST or isinstance(places[0], str):
                continue
            if not one.is_shuffled or all(a < b for a, b in pairwise(places)):
                notes.append("the samples are not shuffled")
            elif places[:num] == other.flatten()[:num]:
                faults.append(
                    f"on {format_ranks(size)}, epochs have the same shuffled order: call sampler.set_epoch(epoch)"
                )
            else:
                notes.append("a different one in each epoch")
    return _conclude("order", faults, notes, "fewer than two epochs over a data set with indices began")


def check_evaluation(runs: Runs) -> CheckResult:
    """Check that an evaluation counts each sample once."""
    faults = []
    notes = []
    repeats = []
    for epoch in _list_epochs(runs, False):
        if not epoch.is_complete:
            continue
        where = epoch.where
        num = len(epoch.counts)
        if epoch.num_missing:
            faults.append(f"{where}, {epoch.num_missing} of {epoch.length} samples are not evaluated")
        if epoch.is_everywhere:
            repeats.append(f"{where}, each rank evaluates all {num} samples: correct, but no faster than one")
        elif epoch.num_repeated and not all(each.is_trimmed for each in epoch.passes):
            how = ", as padding" if epoch.is_padded else ""
            faults.append(
                f"{where}, {epoch.num_repeated} of {num} samples count more than once{how}: give each rank its share "
                "without padding, and add up sums and counts"
            )
        else:
            notes.append(f"{where}, each of {num} samples counts once")
    if repeats and not faults:
        return CheckResult("evaluation", NOTE, "; ".join(dict.fromkeys(repeats)))
    return _conclude("evaluation", faults, notes, "no complete pass over a DataLoader without a backward pass")


# --- gradients and weights ----------------------------------------------------------------------------------------


def check_gradient(runs: Runs) -> CheckResult:
    """Check that updates use the mean of the gradients over all samples of all ranks."""
    faults = []
    notes = []
    for size, ranks in runs.items():
        if size == 1 or len(ranks) != size:
            continue
        batches = [rank.list_batches() for rank in ranks]
        is_same = _have_same_gradients(ranks)
        if is_same:
            notes.append(f"the same on each of {size} ranks")
        if is_same and not any(batches) and _has_exchanged(ranks):  # `check_samples` compares batches
            faults.append(f"on {size} ranks, all ranks compute the same gradient: each must train on other samples")
        num_right = 0
        begins = [0] * size
        for step, lines in enumerate(_join_updates(ranks)):
            ends = [line["num_backwards"] for line in lines]
            fault = _judge_gradient(lines, _count_samples(ranks, batches, begins, ends))
            begins = ends
            num_right += fault is None and not is_same
            if fault:
                faults.append(f"on {size} ranks, in step {step}, {fault}")
                break
        notes += [f"the mean over the ranks in {num_right} steps"] if num_right else []
    unseen = "no gradient of several ranks was seen both before and after it was averaged"
    return _conclude("gradient", faults, notes, unseen)


def _have_same_gradients(ranks: Sequence[Rank]) -> bool:
    """Return whether all ranks compute the same gradient in each update."""
    steps = [[line["computed"] for line in lines] for lines in _join_updates(ranks)]
    return any(math.hypot(*(step[0] or ())) for step in steps) and all(
        all(step) and max(compare(step[0], each) for each in step) <= TOLERANCE for step in steps
    )


def _count_samples(
    ranks: Sequence[Rank], batches: Sequence[list[list[Any]] | None], begins: Sequence[int], ends: Sequence[int]
) -> list[float]:
    """Return the number of samples in some backward passes of each rank; 1 for all if they are not known.

    With several optimizers, it is not known to which of them a backward pass belongs.
    """
    if any(each is None for each in batches) or any(rank.num_steps < len(rank.updates) for rank in ranks):
        return [1.0] * len(batches)
    parts = [(each or [])[begin:end] for each, begin, end in zip(batches, begins, ends, strict=True)]
    return [float(sum(map(len, part))) or 1.0 for part in parts]


def _judge_gradient(steps: Sequence[Update], weights: Sequence[float]) -> str | None:
    """Judge the gradients of one update of all ranks. Returns None if they are the mean, "" if this is not known."""
    computed = [step["computed"] for step in steps]
    if not all(computed) or not any(math.hypot(*each) for each in computed):
        return ""
    mean, weighted = (_average(computed, each) for each in ([1.0] * len(steps), weights))
    tolerance = GRADIENT_TOLERANCE

    def is_used(wanted: Sequence[float]) -> bool:
        return any(all(compare(step[name], wanted) <= tolerance for step in steps) for name in ("reduced", "used"))

    if is_used(weighted):
        return None
    if is_used(mean):
        return (
            f"ranks with {min(weights):g} and {max(weights):g} samples have the same weight in the gradient, so that "
            "it is not the mean over the samples"
        )
    factors, distances = zip(*(_fit(step["used"], mean) for step in steps), strict=True)
    if max(distances) > tolerance:
        if max(_fit(step["used"], step["computed"])[1] for step in steps) <= tolerance:
            return "each rank updates with its own gradient: wrap the model in DistributedDataParallel"
        return f"the gradient is not the mean over the ranks: it is off by {max(distances):.1e} of its norm"
    if abs(factors[0] - len(steps)) <= tolerance * factors[0]:
        return f"the gradient is the sum over the ranks, {factors[0]:.3g} times the mean: divide by the world size"
    return ""  # clipped, or scaled for float16, after it was averaged


def check_replicas(runs: Runs) -> CheckResult:
    """Check that all ranks hold the same weights before the first update and after each."""
    faults = []
    notes = []
    sizes = [rank.updates[0]["num_elements"] for ranks in runs.values() for rank in ranks]
    for size, ranks in runs.items():
        if size == 1 or len(ranks) != size or any(rank.updates[0]["num_elements"] != max(sizes) for rank in ranks):
            continue
        notes.append(f"the same weights on {size} ranks after each of {ranks[0].num_steps} steps")
        moments = [("begin with different weights", [rank.updates[0]["before"] for rank in ranks])]
        for step, lines in enumerate(_join_updates(ranks)):
            moments.append((f"have different weights after step {step}", [line["after"] for line in lines]))
        for how, states in moments:
            if (error := max(compare(states[0]["params"], state["params"]) for state in states)) > TOLERANCE:
                faults.append(f"on {size} ranks, ranks {how} (by {error:.1e} of their norm)")
                break
        else:
            if not _has_exchanged(ranks) and _have_same_gradients(ranks):
                faults.append(
                    f"{size} ranks exchange nothing, and make the same updates: each repeats the training of one rank; "
                    "give each its share of the samples, and wrap the model in DistributedDataParallel"
                )
    return _conclude("replicas", faults, notes, "no weights that each rank has a copy of were updated on several ranks")


def _has_exchanged(ranks: Sequence[Rank]) -> bool:
    """Return whether a rank has begun collectives between its updates, as far as this is known."""
    counts = [{update["num_collectives"] for update in rank.updates} for rank in ranks]
    return any(len(rank.updates) < 2 or len(c) > 1 or None in c for rank, c in zip(ranks, counts, strict=True))
