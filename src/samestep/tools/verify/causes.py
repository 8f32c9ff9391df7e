"""Finds the causes of a difference between two runs, and describes what to change."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.tools.verify.rank_reads import read_places
from samestep.tools.verify.traces import Difference, Traced, find_difference, name_tensor
from samestep.tools.verify.trials import TrialOutcome

if TYPE_CHECKING:
    from torch import Tensor

OPERATOR = re.compile(r"(\S+) does not have a deterministic implementation")

RunAgain = Callable[..., TrialOutcome]


def explain(
    one: Traced, other: Traced, difference: Difference, *, is_resumed: bool, run_again: RunAgain, run_other: RunAgain
) -> list[str]:
    """Return the likely causes, the most likely first.

    Args:
        one: the reference run.
        other: the run that differs: on the same number of ranks, on another number, with another shard, or resumed.
        run_again: runs the script again, on as many ranks as the reference, up to the difference.
        run_other: as `run_again`, on as many ranks as the run that differs.
    """
    is_other = any(one.settings[name] != other.settings[name] for name in ("world_size", "shard"))
    causes = _find_settings(one, other)
    if difference.what == "samples":
        causes.append("the steps use different samples: the sampler must depend on the epoch alone, not on the rank")
    moved = ", ".join(dict.fromkeys([*one.moved, *other.moved]))
    if not is_resumed and not is_other:
        return causes + _explain_unrepeatable(difference, moved, run_again)
    if moved and not is_resumed:
        causes.append(_explain_generators(moved))
    elif difference.what == "input":
        causes.append(_explain_input(difference, run_again))
    if difference.what == "draws":
        causes.append(_explain_draws(difference))
    if is_resumed:  # uninterrupted runs were equal, otherwise none would have been interrupted
        which = f" (such as {moved})" if moved else ""
        causes.append(
            f"it differs from step {difference.step} on, after a resume at step {other.settings['begin']}: state that "
            f"the script keeps from step to step{which} is in no snapshot; pass it to run.prepare, or use run.state"
        )
        return causes
    return causes + ([] if causes else _explain_ranks(one, other, difference, run_again, run_other))


def _explain_generators(moved: str) -> str:
    """Describe generators of the script that were used in the steps."""
    return (
        f"{moved} draws in the steps, and is not seeded per micro-batch: use the global generators of torch, "
        "numpy.random or random, which samestep seeds before each one"
    )


def _explain_draws(difference: Difference) -> str:
    return (
        f"the body of {difference.name} draws a different number of random values: this number must not depend on the "
        "rank, or on earlier micro-batches"
    )


def _find_settings(one: Traced, other: Traced) -> list[str]:
    causes = []
    threads = sorted(one.threads | other.threads)
    if threads != [one.settings["num_threads"]]:
        causes.append(
            f"the thread count changed: torch computed with {' and with '.join(map(str, threads))} threads, the run's "
            f"number is {one.settings['num_threads']}: remove torch.set_num_threads "
            "and pass samestep.Run(num_threads=...)"
        )
    if one.settings["reduction"] == "fast" and one.settings["world_size"] != other.settings["world_size"]:
        causes.append("reduction='fast' adds in a different order at each number of ranks: remove it")
    return causes


def _explain_input(difference: Difference, run_again: RunAgain) -> str:
    changed = _read_twice(run_again)
    must = "a sample must depend only on its index and on torch, numpy.random and random, which samestep seeds"
    if changed is not None:
        which = f" ({', '.join(changed)} changes)" if changed else ""
        return (
            f"the data set, or collate_fn, keeps state between reads{which}: two reads of a sample with one seed "
            f"differ; {must}"
        )
    return (
        f"the data set, or collate_fn, returned different values for the same samples ({difference.name} of step "
        f"{difference.step}): {must}"
    )


def _explain_unrepeatable(difference: Difference, moved: str, run_again: RunAgain) -> list[str]:
    """Find out why two runs on the same number of ranks differ. Names a cause only if it makes a difference."""
    if _is_hash_seed(run_again):
        return [
            "the order of a set of strings, or hash() of a string, affects training: it differs with each "
            "PYTHONHASHSEED; sort the elements of a set, or run export PYTHONHASHSEED=0 before every start"
        ]
    if (operator := _find_operator(run_again)) is not None:
        return [
            f"{operator} is an operator that is not deterministic, and the script allows it: remove "
            "deterministic=False, and replace the operators that torch then refuses"
        ]
    if moved:
        return [_explain_generators(moved)]
    if difference.what == "draws":
        return [_explain_draws(difference)]
    if difference.what == "initial":
        return [
            f"{name_tensor(difference.name)} differs before the first step: build it after samestep.Run(...), which "
            "seeds the generators, or with a fixed seed"
        ]
    if difference.what == "input":
        return [
            f"the data set, or collate_fn, returned different values for the same samples ({difference.name} of step "
            f"{difference.step}): build random data after samestep.Run(...), which seeds the generators, or with a "
            "fixed seed, and read no clock and no file that changes"
        ]
    return [
        "not found: neither a generator that draws in the steps, nor the order of sets, nor an operator that torch "
        "knows not to be deterministic; look for clocks (time.time(), datetime.now()), generators without a seed, "
        "memory addresses (id(), a set of objects), files that change, and threads that the script starts"
    ]


def _explain_ranks(
    one: Traced, other: Traced, difference: Difference, run_again: RunAgain, run_other: RunAgain
) -> list[str]:
    if difference.what == "state" and difference.tensor in one.settings["buffers"]:
        return [
            f"{name_tensor(difference.tensor or '')} is a buffer that depends on the number of ranks: its value "
            "must come from the whole step (step.num_samples, step.loss), not from this rank's micro-batches"
        ]
    if places := _find_rank(run_again, run_other):
        return [_describe_reads(places)]
    if other.settings["shard"] is not None and _is_of_shard(one, difference.step, run_other):
        return [_explain_shard(other, difference)]
    if difference.what == "initial":
        return [
            f"{name_tensor(difference.name)} differs before the first step: its initial value must not depend on the "
            "rank or the number of ranks"
        ]
    where = {
        "losses": f"the same inputs of {difference.name} give a different loss",
        "gradient": f"the same losses give a different gradient of {difference.name}",
        "state": f"the same gradients give a different {name_tensor(difference.name)}",
        "value": f"the same gradients give a different {name_tensor(difference.name)}",
    }.get(difference.what, "the state differs")
    return [
        f"{where}: state is kept from one micro-batch to the next (an attribute, a global variable, a generator), "
        "and each rank computes different micro-batches"
    ]


def _explain_shard(other: Traced, difference: Difference) -> str:
    """Describe what a difference that does not exist without `shard` can come from."""
    name = name_tensor(difference.name)
    fused = ", ".join(other.settings["fused"])
    if difference.what == "initial":
        why = (
            f"{name} differs before the first step: set initial values before run.prepare, because values that are "
            "drawn for the parts of a tensor depend on its division"
        )
    elif difference.what == "losses":
        why = f"the same inputs of {name} give a different loss: the forward pass computes from a part of a tensor"
    elif difference.what == "gradient":
        why = (
            f"the same losses give a different gradient of {name}: something changes the sums over the ranks, such as "
            "a mean in place of a sum, or +0.0 in place of the neutral -0.0"
        )
    elif difference.what == "state" and fused and other.settings["shard"] == "fsdp2":
        why = f"{fused} has fused=True, whose kernel rounds the last elements of a part differently: leave it out"
    else:
        why = (
            f"the same gradients give a different {name}: the update computes from the parts of tensors that a rank "
            "holds, such as a norm of its gradients; for clipping, use run.clip_grad_norm_"
        )
    return f"it is the same without shard={other.settings['shard']}, and {why}"


def _describe_reads(places: str) -> str:
    return (
        f"the script reads its rank or the number of ranks, and training depends on it ({places}): with fixed values, "
        "the runs are the same; derive values from step.number and the samples"
    )


def explain_drift(outcome: TrialOutcome, run_other: RunAgain) -> list[str]:
    """Find out why the models of the ranks differ, if the run ended because of that.

    Args:
        run_other: runs the script again, on as many ranks as that run.
    """
    if not _has_drifted(outcome):
        return []
    fixed = run_other(fixes_rank=True)
    if not _has_drifted(fixed) and (places := read_places(fixed.place)):
        return [f"  likely: {_describe_reads(places)}"]
    return ["  likely: a rank changes the model by its own values: updates must depend only on the gradient"]


def _has_drifted(outcome: TrialOutcome) -> bool:
    return "hold the same model" in outcome.output or "a different model than" in outcome.output


def _is_hash_seed(run_again: RunAgain) -> bool:
    """Return whether two runs are the same with one hash seed, and differ with another."""
    first = run_again()
    return _are_same(first, run_again()) and not _are_same(first, run_again(hash_seed="1"))


def _find_operator(run_again: RunAgain) -> str | None:
    """Run the script, and return the first operator that torch's deterministic mode refuses."""
    found = OPERATOR.search(run_again(overrides={"deterministic": True}).output)
    return None if found is None else found[1]


def _read_twice(run_again: RunAgain) -> list[str] | None:
    """Run the script with samples of each step read twice in one process, with the same seed.

    Returns:
        The attributes of the data set that changed between the reads; None if the reads are equal.
    """
    rereads = [line["reread"] for line in run_again(reread=True).trace.steps.values() if "reread" in line]
    changed = dict.fromkeys(name for reread in rereads for name in reread["changed"])
    return [*changed] if any(reread["differs"] for reread in rereads) else None


def _find_rank(run_again: RunAgain, run_other: RunAgain) -> str:
    """Run the script on both numbers of ranks, where it reads rank 0 of 1 everywhere.

    Returns:
        The places in the script that read a rank or a number of ranks; "" if the runs still differ.
    """
    other = run_other(fixes_rank=True)
    places = read_places(other.place)
    return places if places and _are_same(run_again(fixes_rank=True), other) else ""


def _is_of_shard(reference: Traced, last_step: int, run_other: RunAgain) -> bool:
    """Return whether the run that differs is the same as the reference up to `last_step` if nothing is divided."""
    undivided = run_other(shard="none").trace
    return last_step in undivided.steps and find_difference(reference, undivided) is None


def _are_same(one: TrialOutcome, other: TrialOutcome) -> bool:
    steps = one.trace.steps.keys()
    return bool(steps) and steps == other.trace.steps.keys() and find_difference(one.trace, other.trace) is None


def measure_difference(one: Path, other: Path, name: str) -> str:
    """Describe the largest difference between two dumps of a tensor, in units in the last place."""
    import torch

    from samestep.snapshot.serialization import read_tensors

    a, b = (read_tensors(place / "dump.safetensors").get(name) for place in (one, other))
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return "it has a different shape, or exists in only one of them"
    flat_a = a.flatten()
    flat_b = b.flatten()
    if not a.is_floating_point():
        differing = (flat_a != flat_b).nonzero()
        if not len(differing):
            return "it is the same in two further runs"
        place = int(differing[0])
        return f"element {place} is {flat_a[place].item()} and {flat_b[place].item()}"
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    words = flat_a.view(word), flat_b.view(word)
    differs = words[0] != words[1]
    if not differs.any():
        return "it is the same in two further runs"
    ulps = (_order(words[0]) - _order(words[1])).abs()
    place = int(torch.where(differs, ulps, -1).argmax())
    by = f"by up to {int(ulps[place])} ulp" if ulps[place] else "in the sign of zeros only"
    return (
        f"{int(differs.sum())} of {len(ulps)} elements differ, {by} (element {place}: "
        f"{flat_a[place].item():.9g} and {flat_b[place].item():.9g})"
    )


def _order(words: "Tensor") -> "Tensor":
    """Map bit patterns of floats to integers in the order of the floats. Neighbouring floats differ by one."""
    wide = words.long()
    return wide.where(wide >= 0, -(wide & ((1 << (8 * words.element_size() - 1)) - 1)))
