"""Each epoch reads and uses each sample once, at any number of ranks and with any last step."""

import functools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from support.runs import ask
from support.tiny import Tiny, learn, tiny_run, update
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import samestep

NUM_EPOCHS = 2
Used = dict[int, list[int]]  # step -> samples, in the order of the micro-batches


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


def use_samples(
    directory: Path, data: Any, *, batch_size: int, micro_batch_size: int, **arguments: Any,
) -> None:  # fmt: skip
    """Trains for some epochs (or `num_steps`) in directory/run; each rank writes what it used to `rank-R.jsonl`."""
    used: list[int] = []

    def body(t: Tiny, indices: Tensor, x: Tensor) -> None:
        assert 0 < len(indices) <= micro_batch_size
        used.extend(indices.tolist())
        learn(t, x)

    def then(t: Tiny) -> None:
        update(t)
        with open(directory / f"rank-{t.run.rank}.jsonl", "a") as file:
            file.write(json.dumps([t.step.number, used]) + "\n")
        used.clear()

    tiny_run(
        directory / "run", model=lambda: nn.Linear(1, 1), batch_size=batch_size, micro_batch_size=micro_batch_size,
        keep_last=99, data=data, num_epochs=NUM_EPOCHS, body=body, then=then, **arguments,
    )  # fmt: skip


def read_used(directory: Path) -> Used:
    """The samples that all ranks used."""
    used: Used = {}
    for path in sorted(directory.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            step, samples = json.loads(line)
            used.setdefault(step, []).extend(samples)
    return used


def join(used: Used, first: int = 0, last: int | None = None) -> list[int]:
    """The samples of steps first..last-1, in order."""
    return [sample for step in range(first, len(used) if last is None else last) for sample in used[step]]


def use_each(cases: list[tuple[Path, Any, dict[str, Any]]]) -> None:
    """Trains one run after the other."""
    for directory, data, arguments in cases:
        use_samples(directory, data, **arguments)


def train_each(cases: list[tuple[Path, int, dict[str, Any]]], world_size: int) -> list[tuple[Used, Counter[int]]]:
    """Several runs in one launch: for each, the used samples, and the number of reads of each sample.

    The few samples that each rank reads to identify its data are not counted.
    """
    runs = []
    for directory, length, arguments in cases:
        directory.mkdir(exist_ok=True)
        runs.append((directory, Recorded(length, directory / "read"), arguments))
    samestep.spawn(use_each, world_size, (runs,))
    results = []
    for directory, data, _ in runs:
        identifying = Counter(dict.fromkeys({0, len(data) // 2, len(data) - 1}, world_size))
        results.append((read_used(directory), data.count() - identifying))
    return results


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


def test_every_tail(tmp_path: Path) -> None:
    cases = [(tmp_path / name, length, {"batch_size": 24, "micro_batch_size": 4, **how})
             for name, (length, how) in CASES.items()]  # fmt: skip
    results = dict(zip(CASES, train_each(cases, 5), strict=True))
    for name, (used, read) in results.items():
        length, how = CASES[name]
        samples, per_epoch = join(used), 24 if "drop_last" in how else 38 if "sampler" in how else length
        assert read == Counter(samples), name
        shown = json.loads(ask("inspect", tmp_path / name / "run", "--samples", "--json"))
        assert shown["audit"]["passed"], name
        assert {step["step"]: step["samples"] for step in shown["steps"]} == used, name
        epochs = [samples[start : start + per_epoch] for start in range(0, len(samples), per_epoch)]
        if "num_steps" in how:
            assert [len(step) for step in used.values()] == [24] * 6, name
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
    dropped = results["drop_last"][0]
    assert {*join(dropped, 0, 1)} != {*join(dropped, 1, 2)}, "each epoch drops others"


def test_a_loader_is_taken_for_its_data(tmp_path: Path) -> None:
    data = Recorded(38, tmp_path / "read")
    loader = DataLoader(data, batch_size=4, shuffle=False, drop_last=True)
    samestep.spawn(functools.partial(use_samples, tmp_path, loader, batch_size=24, micro_batch_size=4), 3)
    assert join(read_used(tmp_path)) == [*range(24), *range(24)]
    assert data.count() - Counter([0, 19, 37] * 3) == dict.fromkeys(range(24), NUM_EPOCHS)


EVALUATIONS = [(31, None, 0), (3, None, 0), (40, 7, 2)]  # samples, samples of a micro-batch, workers


def evaluate_all(directory: Path) -> list[dict[str, Any]]:
    run = Tiny(batch_size=24, micro_batch_size=4).run

    def score(batch: Any) -> dict[str, Any]:
        return {"indices": batch[0].tolist(), "mean": batch[0].double().mean()}

    return [
        run.evaluate(score, Recorded(length, directory / str(length)), micro_batch_size=size, num_workers=num_workers)
        for length, size, num_workers in EVALUATIONS
    ]


def test_evaluate_sees_each_sample_once_in_order(tmp_path: Path) -> None:
    scores = samestep.spawn(evaluate_all, 5, (tmp_path,))
    for (length, _, _), found in zip(EVALUATIONS, scores, strict=True):
        assert found == {"indices": list(range(length)), "mean": (length - 1) / 2}
        assert Recorded(length, tmp_path / str(length)).count() == dict.fromkeys(range(length), 1)
