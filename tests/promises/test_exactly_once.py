"""Each epoch reads and uses each sample once, at any number of ranks and with any last step."""

import json
import os
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from support.runs import ask
from support.tiny import Tiny, learn, tiny_run, update
from torch import Tensor, nn
from torch.utils.data import Dataset

import samestep

NUM_EPOCHS, MICRO_BATCH_SIZE = 2, 4


class Recorded(Dataset[tuple[int, Tensor]]):
    """Writes to a file which samples any process reads."""

    def __init__(self, length: int, path: Path) -> None:
        self.length, self.path = length, path

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b"%d\n" % index)
        os.close(file)
        return index, torch.tensor([index / self.length])

    def count(self) -> Counter[int]:
        """The number of reads of each sample."""
        return Counter(map(int, self.path.read_text().split()))


def use_samples(run_dir: Path, data: Recorded, **arguments: Any) -> list[list[int]]:
    """Trains for some epochs (or `num_steps`). Returns the samples of each step, in the order of the micro-batches."""
    steps: list[list[int]] = []
    used: list[int] = []

    def body(t: Tiny, indices: Tensor, x: Tensor) -> None:
        assert 0 < len(indices) <= MICRO_BATCH_SIZE
        used.extend(indices.tolist())
        learn(t, x)

    def then(t: Tiny) -> None:
        update(t)
        steps.append([*chain.from_iterable(t.run._context.group.gather(used))])
        used.clear()

    tiny_run(
        run_dir, model=lambda: nn.Linear(1, 1), batch_size=24, micro_batch_size=MICRO_BATCH_SIZE, keep_last=99,
        data=data, num_epochs=NUM_EPOCHS, body=body, then=then, **arguments,
    )  # fmt: skip
    return steps


def draw_some(epoch: int) -> list[int]:
    """Some samples twice, some not at all."""
    return [(epoch + 3 * i) % 31 for i in range(38)]


# Numbers of samples, in steps of 24, and how they are read.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "no tail": (24, {}),
    "whole micro-batches": (24 + 12, {}),
    "a ragged micro-batch": (24 + 14, {"num_workers": 2}),
    "fewer micro-batches than ranks": (24 + 8, {}),
    "less than a micro-batch": (24 + 1, {}),
    "an epoch of less than a micro-batch": (3, {}),
    "drop_last": (24 + 15, {"drop_last": True}),
    "a sampler": (31, {"sampler": draw_some}),
    "endless steps": (31, {"num_steps": 6}),
    "several epochs in a step": (7, {"num_steps": 6}),
}


def use_each(directory: Path) -> dict[str, list[list[int]]]:
    """Trains each case in a run of its own, one after the other."""
    return {
        name: use_samples(directory / name, Recorded(length, directory / f"{name}.read"), **how)
        for name, (length, how) in CASES.items()
    }


def test_every_tail(tmp_path: Path) -> None:
    num_ranks = 5
    results = samestep.spawn(use_each, num_ranks, (tmp_path,))
    for name, used in results.items():
        length, how = CASES[name]
        samples = [*chain.from_iterable(used)]
        per_epoch = 24 if "drop_last" in how else 38 if "sampler" in how else length
        # To identify its data, each rank reads a few samples, twice.
        identifying = Counter(dict.fromkeys({0, length // 2, length - 1}, 2 * num_ranks))
        assert Recorded(length, tmp_path / f"{name}.read").count() == Counter(samples) + identifying, name
        shown = json.loads(ask("inspect", tmp_path / name, "--samples", "--json"))
        assert shown["audit"]["passed"], name
        assert [step["samples"] for step in shown["steps"]] == used, name
        epochs = [samples[start : start + per_epoch] for start in range(0, len(samples), per_epoch)]
        if "num_steps" in how:
            assert [len(step) for step in used] == [24] * 6, name
            assert len({*epochs[-1]}) == len(epochs.pop()) == 6 * 24 % length, name
        else:
            assert len(epochs) == NUM_EPOCHS, name
        if "sampler" in how:
            assert epochs == [draw_some(0), draw_some(1)]
            continue
        for epoch in epochs:
            assert len({*epoch}) == len(epoch) == per_epoch, name
            assert {*epoch} <= {*range(length)}, name
        assert length < 10 or epochs[0] != epochs[1], name
    first, second = results["drop_last"]
    assert {*first} != {*second}, "each epoch drops others"
