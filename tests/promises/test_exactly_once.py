"""Each epoch reads and uses each sample once, as the ledger says. (test_loop_plan.py has all lengths and divisions.)"""

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

NUM_RANKS = 5


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


def use_samples(directory: Path, name: str) -> list[list[int]]:
    """Train two epochs, or some steps. Return the samples of each step, in the order of the micro-batches."""
    length, how = CASES[name]
    steps: list[list[int]] = []
    used: list[int] = []

    def body(t: Tiny, indices: Tensor, x: Tensor) -> None:
        used.extend(indices.tolist())
        learn(t, x)

    def then(t: Tiny) -> None:
        update(t)
        steps.append([*chain.from_iterable(t.run._context.group.gather(used))])
        used.clear()

    tiny_run(
        directory / name, model=lambda: nn.Linear(1, 1), batch_size=24, micro_batch_size=4,
        data=Recorded(length, directory / f"{name}.read"), body=body, then=then, **how,
    )  # fmt: skip
    return steps


def draw_some(epoch: int) -> list[int]:
    """Some samples twice, some not at all."""
    return [(epoch + 3 * i) % 31 for i in range(38)]


# Numbers of samples, in steps of 24, and how they are read.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "a ragged micro-batch": (24 + 14, {"num_workers": 2}),
    "drop_last": (24 + 15, {"drop_last": True}),
    "a sampler": (31, {"sampler": draw_some}),
    "several epochs in a step": (7, {"num_steps": 7}),
}


def use_each(directory: Path) -> dict[str, list[list[int]]]:
    return {name: use_samples(directory, name) for name in CASES}


def test_each_sample_is_used_once(tmp_path: Path) -> None:
    results = samestep.spawn(use_each, NUM_RANKS, (tmp_path,))
    counts = {name: Counter(chain.from_iterable(used)) for name, used in results.items()}
    for name, used in results.items():
        length, _ = CASES[name]
        # To identify its data, each rank reads a few samples, twice.
        identifying = Counter(dict.fromkeys({0, length // 2, length - 1}, 2 * NUM_RANKS))
        read = Counter(map(int, (tmp_path / f"{name}.read").read_text().split()))
        assert read == counts[name] + identifying, name
        shown = json.loads(ask("inspect", tmp_path / name, "--samples", "--json"))
        assert shown["audit"]["passed"], name
        assert [step["samples"] for step in shown["steps"]] == used, name
    assert counts["a ragged micro-batch"] == dict.fromkeys(range(38), 2)
    assert counts["several epochs in a step"] == dict.fromkeys(range(7), 24)
    assert counts["a sampler"] == Counter(draw_some(0) + draw_some(1))
    first, second = results["drop_last"]
    assert len({*first}) == len({*second}) == 24
    assert {*first} != {*second}, "each epoch drops others"
