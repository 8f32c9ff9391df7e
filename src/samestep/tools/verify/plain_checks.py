"""Compares the records of a script's ranks, and reports the usual mistakes of distributed training."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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

Runs = Mapping[int, Sequence["Rank"]]  # number of ranks -> records of each


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
        ids: the samples of each batch: their indices, or hashes of their contents.
        places: all samples in order: their indices in the loader's data set, which a Subset maps to the ids.
        is_subset: the loader's data set is a Subset.
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
    drop_last: bool
    ids: list[list[Any]] = field(default_factory=list)
    places: list[Any] = field(default_factory=list)
    is_subset: bool = False
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
        updates: (number of the optimizer, step) -> the fields of its events "begin_update" and "end_update", and
            "num_backwards" until its end. An update without "after" has not ended.
        saves: numbers of (updates, backward passes) before each save.
        is_cut: the recorder has ended the script after the steps of the trial.
        num_ahead: number of batches that loops fetch before they train on one.
        losses: the numbers of its own losses that the script has read.
    """

    rank: int = -1
    passes: list[Pass] = field(default_factory=list)
    updates: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    saves: list[tuple[int, int]] = field(default_factory=list)
    is_cut: bool = False
    num_ahead: int = 0
    losses: list[float] = field(default_factory=list)

    def list_passes(self, is_training: bool) -> list[Pass]:
        """Return its passes in order: those with backward passes, or the others."""
        return [each for each in self.passes if each.ids and (each.num_backwards > 0) == is_training]

    def list_batches(self) -> list[list[Any]] | None:
        """Return the batches that it trained on; None if they are not one per backward pass."""
        batches: list[list[Any]] = []
        for each in self.list_passes(True):
            first = max(each.num_before - self.num_ahead, 0)
            if first + each.num_backwards > len(each.ids):
                return None
            batches += each.ids[first : first + each.num_backwards]
        return batches


def read_ranks(directory: Path) -> list[Rank]:
    """Read the records of the processes that made an update, in the order of their ranks."""
    ranks = [_read_rank(read_lines(path)) for path in directory.glob("rank-*.jsonl")]
    return sorted((each for each in ranks if each.updates), key=lambda each: each.rank)


def _read_rank(lines: Iterable[Mapping[str, Any]]) -> Rank:
    """Read the events that `plain_recorder` describes."""
    record = Rank()
    num_backwards = 0
    latest = None
    for line in lines:
        match line["event"]:
            case "begin_pass":
                for each in record.passes:
                    each.is_open &= each.dataset != line["dataset"]
                record.passes.append(Pass(line["dataset"], line["length"], line["num_batches"], line["drop_last"]))
            case "batch":
                latest = record.passes[line["pass_number"]]
                latest.ids.append(line["ids"])
                latest.places += line.get("places", line["ids"])
                latest.is_subset = "places" in line
                latest.is_grad = latest.is_grad or line["is_grad"]
            case "end_pass":
                record.passes[line["pass_number"]].is_ended = True
                record.passes[line["pass_number"]].is_open = False
            case "backward":
                num_backwards += 1
                for each in record.passes:  # several, if a loop takes batches from several loaders
                    if each.is_grad and (each is latest or each.is_open):
                        each.num_before = each.num_before if each.num_backwards else len(each.ids) - 1
                        each.num_backwards += 1
            case "loss":
                record.losses.append(line["value"])
            case "trim" if latest is not None:
                latest.is_trimmed = True
            case "begin_update":
                record.rank = line["rank"]
                record.updates[line["optimizer"], line["step"]] = dict(line)
            case "end_update":
                record.updates[line["optimizer"], line["step"]] |= {**line, "num_backwards": num_backwards}
            case "save":
                record.saves.append((line["num_updates"], num_backwards))
            case "cut":
                record.is_cut = True
    record.num_ahead = max((each.num_ahead for each in record.list_passes(True)), default=0)
    return record


def _join_updates(ranks: Sequence[Rank]) -> list[tuple[tuple[int, int], list[dict[str, Any]]]]:
    """Return the updates that all ranks have completed: its key in `Rank.updates`, and the fields of each rank."""
    keys = sorted(ranks[0].updates, key=lambda key: key[1])
    joined = ((key, [rank.updates.get(key, {}) for rank in ranks]) for key in keys)
    return [(key, steps) for key, steps in joined if all("after" in step for step in steps)]


def describe_end(code: int) -> str:
    """Describe how a start has ended that should have ended with exit code 0."""
    return "does not end" if code == STUCK else f"ends with exit code {code}"


def compare(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the distance of two projections, relative to the larger one."""
    larger = max(_norm(one), _norm(other))
    return _norm([a - b for a, b in zip(one, other, strict=True)]) / larger if larger else 0.0


def _norm(vector: Sequence[float]) -> float:
    return float(sum(each * each for each in vector) ** 0.5)


def _fit(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the factor c for which `one` is nearest to c * other, and the distance from it."""
    square = sum(each * each for each in other)
    factor = sum(a * b for a, b in zip(one, other, strict=True)) / square if square else 0.0
    return factor, compare(one, [factor * each for each in other])


def _average(vectors: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    return [
        sum(w * each for w, each in zip(weights, column, strict=True)) / sum(weights)
        for column in zip(*vectors, strict=True)
    ]


def _conclude(check: str, faults: Sequence[str], notes: Sequence[str], unseen: str) -> CheckResult:
    if faults:
        return CheckResult(check, MISTAKE, "; ".join(dict.fromkeys(faults)))
    return CheckResult(check, OK, "; ".join(dict.fromkeys(notes))) if notes else CheckResult(check, UNSEEN, unseen)


@dataclass(frozen=True)
class DrawnEpoch:
    """The n-th passes of all ranks over a data set.

    Attributes:
        counts: sample -> how often the ranks together have drawn it.
        length: the number of different samples in the data set of one process; None if it is not known.
        is_split: each rank has a data set of its own part, so that equal indices are other samples.
    """

    passes: Sequence[Pass]
    counts: Mapping[Any, int]
    length: int | None
    is_split: bool

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


def _list_epochs(runs: Runs, is_training: bool) -> dict[int, list[DrawnEpoch]]:
    """Return the epochs with or without backward passes at each number of ranks."""
    lengths: list[int | None] = []
    for passes in _group_passes(runs.get(1, []), is_training):
        num = len({*passes[0].flatten()}) if passes[0].is_complete else None
        lengths.append(num if passes[0].length is None else passes[0].length)
    epochs: dict[int, list[DrawnEpoch]] = {}
    for size, ranks in runs.items():
        pairs = zip_longest(_group_passes(ranks, is_training), lengths)
        epochs[size] = [_count(passes, length) for passes, length in pairs if passes]
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


def _count(passes: Sequence[Pass], length: int | None) -> DrawnEpoch:
    """Count the samples in the passes of all ranks.

    Args:
        length: of the data set on 1 rank, or the number of samples of an iterable one.
    """
    lengths = [each.length for each in passes]
    is_split = len(passes) > 1 and length == sum(each or 0 for each in lengths) and not passes[0].is_subset
    ids = ((rank, each) if is_split else each for rank, one in enumerate(passes) for each in one.flatten())
    return DrawnEpoch(passes, Counter(ids), length if length is not None else lengths[0], is_split)


def check_samples(runs: Runs) -> CheckResult:
    """Check that the ranks together train on each sample once per epoch."""
    faults = []
    notes = []
    epochs = _list_epochs(runs, True)
    if any(epoch.num_repeated for epoch in epochs.get(1, [])):
        faults = [
            f"on {format_ranks(size)}, every rank draws the same samples in the same order: use a DistributedSampler, "
            "or other seeds"
            for size, found in epochs.items()
            if any(epoch.is_repeated for epoch in found)
        ]
        return _conclude("samples", faults, [], "a single process also draws samples several times per epoch")
    for size, found in epochs.items():
        where = f"on {format_ranks(size)}"
        for number, epoch in enumerate(found):
            num = len(epoch.counts)
            num_repeated = epoch.num_repeated
            num_missing = epoch.num_missing
            num_batches = sorted({len(each.ids) for each in epoch.passes})
            if num_repeated and epoch.is_everywhere:
                faults.append(f"{where}, every rank trains on the same {num} samples: use a DistributedSampler")
            elif num_repeated and epoch.is_padded:
                notes.append(
                    f"{where}, {num_repeated} of {num} samples are repeated at the end of an epoch, as padding"
                )
            elif num_repeated:
                faults.append(f"{where}, {num_repeated} of {num} samples are repeated in epoch {number}")
            if epoch.is_complete and len(num_batches) > 1:
                faults.append(f"{where}, ranks have {num_batches[0]} to {num_batches[-1]} batches in epoch {number}")
            if not epoch.is_complete:
                notes.append(f"{where}, epoch {number} is longer than the trial: only repeats were looked for")
            elif num_missing and epoch.passes[0].drop_last and num_missing < sum(len(p.ids[0]) for p in epoch.passes):
                notes.append(f"{where}, {num_missing} of {epoch.length} are left out of an epoch by drop_last")
            elif num_missing:
                faults.append(f"{where}, {num_missing} of {epoch.length} samples are skipped in epoch {number}")
            elif not num_repeated:
                notes.append(f"{where}, an epoch has each of {num} samples")
    return _conclude("samples", faults, notes, "no torch DataLoader was iterated before a backward pass")


def check_order(runs: Runs) -> CheckResult:
    """Check that shuffled samples have another order in each epoch."""
    faults = []
    notes = []
    for size, ranks in runs.items():
        passes = ranks[0].list_passes(True)
        for one, other in pairwise(passes):
            num = min(len(one.places), len(other.places))
            if one.dataset != other.dataset or num < FEWEST or isinstance(one.places[0], str):
                continue
            if all(a < b for a, b in pairwise(one.places)):
                notes.append("the samples are not shuffled")
            elif one.places[:num] == other.places[:num]:
                where = f"on {format_ranks(size)}"
                faults.append(f"{where}, epochs have the same shuffled order: call sampler.set_epoch(epoch)")
            else:
                notes.append("a different one in each epoch")
    return _conclude("order", faults, notes, "fewer than two epochs over a data set with indices began")


def check_gradient(runs: Runs) -> CheckResult:
    """Check that updates use the mean of the gradients over all samples of all ranks."""
    faults = []
    notes = []
    num_right = 0
    for size, ranks in runs.items():
        if size == 1 or len(ranks) != size:
            continue
        batches = [rank.list_batches() for rank in ranks]
        is_same = _have_same_gradients(ranks)
        if is_same:
            notes.append(f"the same on each of {size} ranks")
        if is_same and not any(batches) and _has_exchanged(ranks):  # `check_samples` compares batches
            faults.append(f"on {size} ranks, all ranks compute the same gradient: each must train on other samples")
        begins = [0] * size
        for key, steps in _join_updates(ranks):
            weights = [1.0] * size
            if key[0] == 0:  # which backward passes belong to another optimizer is not known
                ends = [step["num_backwards"] for step in steps]
                weights = _count_samples(batches, begins, ends)
                begins = ends
            fault = _judge_gradient(steps, weights)
            num_right += fault is None and not is_same
            if fault:
                faults.append(f"on {size} ranks, in step {key[1]}, {fault}")
                break
    notes += [f"the mean over the ranks in {num_right} steps"] if num_right else []
    unseen = "no gradient of several ranks was seen both before and after it was averaged"
    return _conclude("gradient", faults, notes, unseen)


def _have_same_gradients(ranks: Sequence[Rank]) -> bool:
    """Return whether all ranks compute the same gradient in each update."""
    steps = [[line["computed"] for line in lines] for _, lines in _join_updates(ranks)]
    return any(_norm(step[0] or ()) for step in steps) and all(
        all(step) and max(compare(step[0], each) for each in step) <= TOLERANCE for step in steps
    )


def _count_samples(
    batches: Sequence[list[list[Any]] | None], begins: Sequence[int], ends: Sequence[int]
) -> list[float]:
    """Return the number of samples in some backward passes of each rank; 1 for all if they are not known."""
    if any(each is None for each in batches):
        return [1.0] * len(batches)
    parts = [(each or [])[begin:end] for each, begin, end in zip(batches, begins, ends, strict=True)]
    return [float(sum(map(len, part))) or 1.0 for part in parts]


def _judge_gradient(steps: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> str | None:
    """Judge the gradients of one update of all ranks. Returns None if they are the mean, "" if this is not known."""
    computed = [step["computed"] for step in steps]
    if not all(computed) or not any(map(_norm, computed)):
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
    own = [_fit(step["used"], step["computed"])[1] for step in steps]
    factors, distances = zip(*(_fit(step["used"], mean) for step in steps), strict=True)
    if max(distances) > tolerance:
        if max(own) <= tolerance:
            return "each rank updates with its own gradient: wrap the model in DistributedDataParallel"
        return f"the gradient is not the mean over the ranks: it is off by {max(distances):.1e} of its norm"
    if abs(factors[0] - len(steps)) <= tolerance * factors[0]:
        return f"the gradient is the sum over the ranks, {factors[0]:.3g} times the mean: divide by the world size"
    return ""  # clipped, or scaled for float16, after it was averaged


def check_replicas(runs: Runs) -> CheckResult:
    """Check that all ranks hold the same weights before the first update and after each."""
    faults = []
    notes = []
    full = max((rank.updates[0, 0]["num_elements"] for ranks in runs.values() for rank in ranks), default=0)
    for size, ranks in runs.items():
        if size == 1 or len(ranks) != size or any(rank.updates[0, 0]["num_elements"] != full for rank in ranks):
            continue
        notes.append(f"the same weights on {size} ranks after each of {len(ranks[0].updates)} steps")
        moments = [("begin with different weights", [rank.updates[0, 0]["before"] for rank in ranks])]
        moments += [
            (f"have different weights after step {step}", [line["after"] for line in lines])
            for (_, step), lines in _join_updates(ranks)
        ]
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
    counts = [{update["num_collectives"] for update in rank.updates.values()} for rank in ranks]
    return any(len(rank.updates) < 2 or len(c) > 1 or None in c for rank, c in zip(ranks, counts, strict=True))


def check_evaluation(runs: Runs) -> CheckResult:
    """Check that an evaluation counts each sample once."""
    faults = []
    notes = []
    repeats = []
    for size, epochs in _list_epochs(runs, False).items():
        where = f"on {format_ranks(size)}"
        for epoch in epochs:
            if not epoch.is_complete:
                continue
            num = len(epoch.counts)
            how = ", as padding" if epoch.is_padded else ""
            if epoch.num_missing:
                faults.append(f"{where}, {epoch.num_missing} of {epoch.length} samples are not evaluated")
            if epoch.is_everywhere:
                repeats.append(f"{where}, each rank evaluates all {num} samples: correct, but no faster than one")
            elif epoch.num_repeated and not all(each.is_trimmed for each in epoch.passes):
                faults.append(
                    f"{where}, {epoch.num_repeated} of {num} samples count more than once{how}: give each rank its "
                    "share without padding, and add up sums and counts"
                )
            else:
                notes.append(f"{where}, each of {num} samples counts once")
    if repeats and not faults:
        return CheckResult("evaluation", NOTE, "; ".join(dict.fromkeys(repeats)))
    return _conclude("evaluation", faults, notes, "no complete pass over a DataLoader without a backward pass")


def check_losses(runs: Runs) -> list[CheckResult]:
    """Return a note if ranks read different losses, or only some read theirs: such a log is not of the batch."""
    for size, ranks in runs.items():
        read = [rank.losses for rank in ranks if rank.losses]
        differ = any(len({*values}) > 1 for values in zip(*read, strict=False))
        if differ or 0 < len(read) < len(ranks):
            who = "each" if len(read) == len(ranks) else f"{len(read)} of them"
            text = f"on {size} ranks, {who} reads the loss of its own samples: to log it, average it over the ranks"
            return [CheckResult("losses", NOTE, text)]
    return []


@dataclass(frozen=True)
class ResumedRun:
    """An interrupted run, and the run that was restarted after it.

    Attributes:
        whole, interrupted, resumed: the ranks of the uninterrupted, the killed and the restarted run.
        code: exit code of the restarted run.
        has_resume_args: arguments that make the script resume were given.
    """

    whole: Sequence[Rank]
    interrupted: Sequence[Rank]
    resumed: Sequence[Rank]
    code: int
    has_resume_args: bool


def check_restart(restart: ResumedRun) -> list[CheckResult]:
    """Check that a restarted script continues with the state and the samples of its last save."""
    found = _find_save(restart)
    if isinstance(found, CheckResult):
        return [replace(found, check="resume"), found]
    num_done, num_backwards = found
    saved = restart.interrupted[0].updates[0, num_done - 1]["after"]
    faults = _check_state(saved, _list_updates(restart.resumed[0]), _list_updates(restart.whole[0]), num_done)
    state = _conclude("state", faults, [f"the same as after step {num_done}"], "")
    return [_check_continuation(restart, num_backwards), state]


def _find_save(restart: ResumedRun) -> tuple[int, int] | CheckResult:
    """Return the newest save with which the restarted script begins: its numbers of (updates, backward passes).

    If there is none, returns the result of the check "state".
    """
    saves = [save for save in restart.interrupted[0].saves if save[0]] if restart.interrupted else []
    if not saves:
        return CheckResult("state", UNSEEN, "the script saved nothing with torch.save within the trial")
    is_cut = any(rank.is_cut for rank in restart.resumed)
    if restart.code and not is_cut:
        num = min((len(_list_updates(rank)) for rank in restart.resumed), default=0)
        return CheckResult("state", MISTAKE, f"the restarted script {describe_end(restart.code)} after {num} steps")
    if not restart.resumed or restart.interrupted[0].is_cut:
        return CheckResult(
            "state", UNSEEN, "the trial ended before a kill after a save, or no step followed the restart"
        )
    updates = restart.interrupted[0].updates
    first = restart.resumed[0].updates[0, 0]["before"]
    for save in reversed(saves):
        last = updates.get((0, save[0] - 1), {})
        if "after" in last and compare(last["after"]["params"], first["params"]) <= TOLERANCE:
            return save
    if not first["num_states"] and not restart.has_resume_args:
        text = "it begins anew after a kill: give --resume-args, if it needs an argument to resume"
        return CheckResult("state", UNSEEN, text)
    return CheckResult("state", MISTAKE, "the restarted script begins with weights that it never saved")


def _check_state(
    saved: Mapping[str, Any], resumed: Sequence[Mapping[str, Any]], whole: Sequence[Mapping[str, Any]], num_done: int
) -> list[str]:
    """Compare the state after the save, and later learning rates, with those of the restarted script.

    The optimizer's state holds the learning rate: if it is lost, another rate may be a consequence.

    Args:
        saved: the state after the save.
        resumed: the updates after the restart.
        whole: the updates of the uninterrupted run, of which the save has the first `num_done`.
    """
    state = resumed[0]["before"]
    if saved["num_states"] and not state["num_states"]:
        return ["the optimizer's state is lost: save and load optimizer.state_dict()"]
    if saved["num_steps"] != state["num_steps"] or compare(saved["state"], state["state"]) > TOLERANCE:
        return [f"the optimizer's state differs (step {saved['num_steps']}, then {state['num_steps']})"]
    for step, (new, old) in enumerate(zip(resumed, whole[num_done:], strict=False)):
        if not _are_same_rates(new["lr"], old["lr"]):
            return [
                f"the learning rate of step {step} after the restart is {new['lr'][0]:g}, that of the uninterrupted "
                f"run {old['lr'][0]:g}: save and load the states of the schedule and the optimizer"
            ]
    return []


def _are_same_rates(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(map(partial(math.isclose, rel_tol=TOLERANCE), one, other))


def _list_updates(rank: Rank) -> list[dict[str, Any]]:
    """Return the updates of its first optimizer, in order."""
    return [line for (optimizer, _), line in sorted(rank.updates.items()) if optimizer == 0]


def _check_continuation(restart: ResumedRun, num_done: int) -> CheckResult:
    """Compare the batches after the restart with those after the save in an uninterrupted run."""
    num_ahead = restart.whole[0].num_ahead  # only a complete pass shows it, and the others may have none
    interrupted, resumed = (
        _join([replace(rank, num_ahead=max(rank.num_ahead, num_ahead)) for rank in ranks])
        for ranks in (restart.interrupted, restart.resumed)
    )
    whole = _join(restart.whole)
    if interrupted is None or resumed is None or whole is None:
        return CheckResult("resume", UNSEEN, "batches and backward passes do not correspond")
    if whole[: len(interrupted)] != interrupted:
        return CheckResult("resume", UNSEEN, "the order of the samples differs from run to run: give it a seed")
    if (num := min(len(resumed), len(whole) - num_done)) > 0:
        if resumed[:num] == whole[num_done : num_done + num]:
            return CheckResult("resume", OK, f"continues with the batches that follow the save, {num} of {num}")
        few = min(num, 3)
        places = [place for place in range(len(whole) - few + 1) if resumed[:few] == whole[place : place + few]]
        if places:
            place = min(places, key=lambda place: abs(place - num_done))
            what = "skips" if place > num_done else "repeats"
            return CheckResult("resume", MISTAKE, f"it {what} {abs(place - num_done)} batches after batch {num_done}")
    return CheckResult("resume", UNSEEN, "after the restart, the order differs from that of the uninterrupted run")


def _join(ranks: Sequence[Rank]) -> list[tuple[Any, ...]] | None:
    """Return the batches of all ranks, joined by their number; None if they are not known."""
    batches = [rank.list_batches() for rank in ranks]
    if not batches or any(each is None for each in batches):
        return None
    return list(zip(*(each for each in batches if each is not None), strict=False))
