"""Checksums of tensors, which show whether all ranks have the same model, and which rank differs.

A replica differs after a bit flip in a machine's memory, or if code changes it on one rank only. Training does not
reveal that, because every rank adds the same gradients to its own weights. Nothing here communicates.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from samestep.hashing import hash_short


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's 8-byte words, modulo 2**64, the last one padded: an int64 scalar on its device.

    A change of one element always changes the sum; an exchange of two words does not. torch sums int64 at the speed of
    memory, and narrower types twenty times slower.
    """
    bits = tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 8:
        bits = bits.clone()
    num_rest = len(bits) % 8
    words = bits[: len(bits) - num_rest].view(torch.int64).sum()
    if num_rest:
        words += pad(bits[-num_rest:], (0, 8 - num_rest)).view(torch.int64)[0]
    return words


def read_back(checksums: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the values of checksums. One transfer per device."""
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in checksums.items():
        by_device.setdefault(tensor.device, {})[name] = tensor
    return {
        name: value
        for sums in by_device.values()
        for name, value in zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)
    }


def combine(checksums: Mapping[str, int]) -> int:
    """Hash the checksums, by name, to 63 bits."""
    return hash_short(json.dumps(checksums, sort_keys=True).encode()) >> 1


@dataclass(frozen=True)
class Drift:
    """A difference between replicas.

    Attributes:
        tensor: the first tensor that differs.
        num_tensors: number of tensors that differ.
        differing: the numbers of the replicas that differ from the majority; without a majority, of all.
        has_majority: more than half of the ranks agree on all tensors.
    """

    tensor: str
    num_tensors: int
    differing: tuple[int, ...]
    has_majority: bool


def find_drift(replicas: Sequence[Mapping[str, int]]) -> Drift | None:
    """Compare the checksums by tensor name, one mapping per rank. Returns None if all are equal."""
    names = dict.fromkeys(name for replica in replicas for name in replica)
    tensors = [name for name in names if len({replica.get(name) for replica in replicas}) > 1]
    if not tensors:
        return None
    states = [tuple(replica.get(name) for name in tensors) for replica in replicas]
    [(usual, count)] = Counter(states).most_common(1)
    has_majority = 2 * count > len(states)
    differing = [rank for rank, state in enumerate(states) if state != usual or not has_majority]
    return Drift(tensors[0], len(tensors), tuple(differing), has_majority)


def explain_drift(drift: Drift, names: Sequence[str], step: int, equal_at: int | None) -> str:
    """Return the message.

    Args:
        names: of the ranks that were compared, such as "rank 0 (node3)".
        step: number of completed steps.
        equal_at: the last step after which the ranks were equal; None: never compared.
    """
    who = " and ".join(names[number] for number in drift.differing)
    if drift.has_majority:
        have = "has" if len(drift.differing) == 1 else "have"
        others = len(names) - len(drift.differing)
        what = f"{who} {have} a different model than the other {others}, which agree, after step {step}"
    else:
        what = f"{who} do not have the same model after step {step}, and no majority says which is right"
    more = f" and {drift.num_tensors - 1} more tensors differ" if drift.num_tensors > 1 else " differs"
    since = "" if equal_at is None else f", and all were equal after step {equal_at}"
    return (
        f"{what}: {drift.tensor}{more}{since}; this state is not saved, and the last snapshot is older. Suspect first "
        "a decision (a schedule, an early stop) based on the loss of one rank, such as loss.item() in the inner loop: "
        "base it on step.loss, step.metrics or epoch.metrics, which are the same on all ranks; then code that changes "
        "the model or the optimizer on some ranks only (run.rank, different arguments); then the memory of a machine"
    )
