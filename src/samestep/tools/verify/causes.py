"""Why two runs are not the same, as far as it can be found by looking; in words that say what to change."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.tools.verify.source import find_generator_makers, find_rank_readers
from samestep.tools.verify.traces import Difference, Traced, name_tensor

if TYPE_CHECKING:
    from torch import Tensor

OPERATOR = re.compile(r"(\S+) does not have a deterministic implementation")


def explain(
    one: Traced,
    other: Traced,
    difference: Difference,
    *,
    is_resumed: bool,
    find_operator: Callable[[], str | None],
) -> list[str]:
    """The likely causes, the likeliest first.

    Args:
        one: of the reference run.
        other: of the run that differs: at the same number of ranks, at another one, or resumed.
        find_operator: runs the script under torch's deterministic mode, and names the operator that it refuses.
    """
    repeats = one.settings["world_size"] != other.settings["world_size"]  # at one number of ranks, the run repeats
    files = one.settings["files"]
    causes = [*_find_settings(one, other)]
    if difference.what == "samples":
        causes.append("the steps hold other samples: the sampler must depend on the epoch alone, not on the rank")
    moved = list(dict.fromkeys([*one.moved, *other.moved]))
    if moved and not is_resumed:
        causes.append(
            f"{', '.join(moved)} draws in the steps, and nothing seeds it per micro-batch: draw from torch, "
            "numpy.random or random themselves, which samestep seeds before each one"
        )
    if difference.what == "input":
        causes += _explain_input(difference, files, known=bool(moved))
    if difference.what == "draws":
        causes.append(
            f"the body of {difference.name} draws another number of random values: what it draws must not depend on "
            "the rank, or on what it has seen before"
        )
    if is_resumed:  # from begin to end it has repeated, or it would not have been interrupted
        which = f" ({', '.join(moved)}, say)" if moved else ""
        causes.append(
            f"it parts at step {difference.step}, after a resume at step {other.settings['begin']}: what the script "
            f"itself keeps from step to step{which} is in no snapshot; hand it to run.prepare, or keep it in run.state"
        )
    elif not repeats and difference.what in ("losses", "gradient", "state") and not moved:
        causes += _explain_unrepeatable(files, find_operator())
    elif repeats:
        causes += _explain_ranks(one, difference, files, known=bool(causes))
    return causes


def _find_settings(one: Traced, other: Traced) -> list[str]:
    causes = []
    threads = sorted(one.threads | other.threads)
    if threads != [one.settings["threads"]]:
        causes.append(
            f"the thread count moved: torch computed with {' and with '.join(map(str, threads))} threads, the run's "
            f"number is {one.settings['threads']}: leave torch.set_num_threads out and say samestep.Run(threads=...)"
        )
    if one.settings["reduction"] == "fast" and one.settings["world_size"] != other.settings["world_size"]:
        causes.append("reduction='fast' adds up in another order at each number of ranks: leave it out")
    return causes


def _explain_input(difference: Difference, files: list[str], *, known: bool) -> list[str]:
    if known:
        return []
    makers = find_generator_makers(files)
    hint = f"; generators of its own are made in {makers}" if makers else ""
    return [
        f"the data set, or collate_fn, gave other values for the same samples ({difference.name} of step "
        f"{difference.step}): what it gives must follow from the index and from torch, numpy.random and random, which "
        f"samestep seeds{hint}"
    ]


def _explain_unrepeatable(files: list[str], operator: str | None) -> list[str]:
    if operator is not None:
        return [
            f"{operator} is an operator that is not deterministic, and the script allows it: leave "
            "deterministic=False out, and replace what torch then refuses"
        ]
    makers = find_generator_makers(files, unseeded=True)
    hint = f", such as the one of {makers}" if makers else ""
    return [
        f"from the same inputs come other numbers each time: a generator that nobody seeds{hint}, the clock, or an "
        "operator that is not deterministic"
    ]


def _explain_ranks(one: Traced, difference: Difference, files: list[str], *, known: bool) -> list[str]:
    causes = []
    readers = find_rank_readers(files)
    if difference.what == "state" and difference.tensor in one.settings["buffers"]:
        causes.append(
            f"{name_tensor(difference.tensor or '')} is a buffer that depends on the number of ranks: what it counts "
            "must come from the whole step (step.num_samples, step.loss), not from this rank's micro-batches"
        )
    if readers and not known:
        causes.append(f"the script reads its rank, or how many there are, in {readers}: nothing that trains may")
    if causes or known:
        return causes
    where = {
        "losses": f"the same inputs of {difference.name} give another loss",
        "gradient": f"the same losses give another gradient of {difference.name}",
        "state": f"the same gradients give another {name_tensor(difference.name)}",
        "value": f"the same gradients give another {name_tensor(difference.name)}",
    }.get(difference.what, "the state differs")
    return [
        f"{where}: something is kept from one micro-batch to the next (an attribute, a global variable, a generator), "
        "and each rank has seen others"
    ]


def explain_drift(one: Traced, output: str) -> list[str]:
    """Why ranks do not hold the same model, where a run has ended with that."""
    if "hold the same model" not in output and "another model than" not in output:
        return []
    readers = find_rank_readers(one.settings["files"])
    if readers:
        return [f"  likely: the script reads its rank in {readers}: nothing that trains may"]
    return ["  likely: what each rank computes for itself changes the model: updates must follow from the gradient"]


def find_operator(output: str) -> str | None:
    """The operator that torch's deterministic mode has refused, from what a run has printed."""
    found = OPERATOR.search(output)
    return None if found is None else found[1]


def measure_difference(one: Path, other: Path, name: str) -> str:
    """The largest difference between two dumps of a tensor, in units in the last place."""
    import torch

    from samestep.snapshot.encoding import read_tensors

    pair = [read_tensors(place / "dump.safetensors").get(name) for place in (one, other)]
    a, b = pair
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return "it has another shape, or is there in one of them only"
    flat_a, flat_b = a.flatten(), b.flatten()
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
    return (
        f"{int(differs.sum())} of {len(ulps)} elements differ, by up to {int(ulps[place])} ulp (element {place}: "
        f"{flat_a[place].item():.9g} and {flat_b[place].item():.9g})"
    )


def _order(words: "Tensor") -> "Tensor":
    """Bit patterns of floating point numbers -> integers in the numbers' order, one apart for neighbours."""
    wide = words.long()
    return wide.where(wide >= 0, -(wide & ((1 << (8 * words.element_size() - 1)) - 1)))
