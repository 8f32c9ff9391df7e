"""Workers that are reused by later evaluations, with real processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, dataloader, default_collate

from samestep.data.loader import Loader
from samestep.data.pools import MOST, Pools, describe_value
from samestep.data.spec import DataSpec
from samestep.plan.loop_plan import Task

CPU = torch.device("cpu")
TASKS = [Task(np.arange(i, i + 3), i) for i in range(0, 12, 3)]


class Data:
    """A data set with everything that a script may change between two evaluations."""

    def __init__(self) -> None:
        self.scale, self.text = 1.0, "a"
        self.labels = [0] * 12
        self.long = [(i,) for i in range(5000)]
        self.table = {"x": [0, 1]}
        self.tensor, self.array = torch.zeros(12), np.zeros((4, 12), dtype=np.float32)
        self.large = torch.zeros(12, 100_000, dtype=torch.bfloat16)
        self.shift: Callable[[float], float] = Shift()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> float:
        parts = self.scale, len(self.text), self.labels[i], self.long[i][0], self.table["x"][0], self.tensor[i]
        return self.shift(sum(map(float, parts)) + float(self.array[:, i].sum()) + float(self.large[i].float().sum()))


class Shift:
    by = 0.0

    def __call__(self, value: float) -> float:
        return value + self.by

    def collate(self, samples: list[Any]) -> Any:
        return default_collate([self(sample) for sample in samples])


@pytest.fixture
def pools() -> Iterator[Pools]:
    opened = Pools()
    yield opened
    opened.close()
    assert not multiprocessing.active_children()


def evaluate(pools: Pools, spec: DataSpec, num_tasks: int = len(TASKS)) -> tuple[list[Any], set[int | None]]:
    """Return its micro-batches, and the worker processes that exist afterwards."""
    with Loader(spec, iter(TASKS), device=CPU, workers=pools.lend(spec, CPU)) as loader:
        loaded = [next(loader).batch.tolist() for _ in range(num_tasks)]
        if num_tasks == len(TASKS):
            assert list(loader) == []
    return loaded, {process.pid for process in multiprocessing.active_children()}


def test_workers_stay_from_the_second_evaluation_on(pools: Pools) -> None:
    spec = DataSpec(Data(), num_workers=2)
    ends = [evaluate(pools, replace(spec)) for _ in range(4)]
    alone, _ = evaluate(pools, replace(spec, num_workers=0))
    assert [loaded for loaded, _ in ends] == [alone] * 4
    assert not ends[0][1]
    assert ends[1][1] == ends[2][1] == ends[3][1]
    assert len(ends[1][1]) == 2
    assert len(evaluate(pools, replace(spec, num_workers=1))[1]) == 1


def change_large(data: Data) -> None:
    data.large.data[:, 1::2] += 1


CHANGES: dict[str, Callable[[Data], Any]] = {
    "attribute": lambda data: setattr(data, "scale", 2.0),
    "element": lambda data: data.labels.__setitem__(7, 1),
    "element of a long list": lambda data: data.long.__setitem__(7, (100,)),
    "inside a dict": lambda data: data.table["x"].__setitem__(0, 5),
    "tensor": lambda data: data.tensor.add_(1),
    "tensor's data": lambda data: data.tensor.data.add_(1),
    "array": lambda data: data.array.__setitem__((3, 7), 1),
    "large tensor's data": change_large,
    "attribute of an attribute": lambda data: setattr(data.shift, "by", 3.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(Subset(data, range(12)), range(12))])
def test_a_change_between_two_evaluations_is_described(change: Callable[[Data], Any], wrap: Any) -> None:
    data = Data()
    spec = wrap(data)
    before = describe_value(spec)
    assert describe_value(spec) == before
    change(data)
    assert describe_value(spec) != before


def test_a_changed_data_set_is_seen_by_the_next_evaluation(pools: Pools) -> None:
    spec = DataSpec(Data(), num_workers=1)
    before = [evaluate(pools, spec) for _ in range(2)][1]
    spec.dataset.labels[7] = 1
    after, processes = evaluate(pools, spec)
    assert after == evaluate(pools, replace(spec, num_workers=0))[0] != before[0]
    assert processes.isdisjoint(before[1])


def test_a_changed_collate_fn_is_seen(pools: Pools) -> None:
    shift = Shift()
    spec = DataSpec(Data(), num_workers=1, collate_fn=shift.collate)
    for by in (0.0, 0.0, 1.0):
        shift.by = by
        with_workers = evaluate(pools, replace(spec, collate_fn=shift.collate))[0]
        assert with_workers == evaluate(pools, replace(spec, num_workers=0))[0]


def test_an_evaluation_that_is_left_ends_its_workers(pools: Pools) -> None:
    spec = DataSpec(Data(), num_workers=1)
    evaluate(pools, spec)
    assert len(evaluate(pools, spec)[1]) == 1
    assert not evaluate(pools, spec, num_tasks=1)[1]
    assert len(evaluate(pools, spec)[1]) == 1


def test_few_data_sets_have_workers_and_new_ones_have_none(pools: Pools) -> None:
    specs = [DataSpec(Data(), num_workers=1) for _ in range(MOST + 1)]
    for spec in specs * 2:
        _, processes = evaluate(pools, spec)
    assert len(processes) == MOST
    thread = threading.Thread(target=lambda: pools.lend(specs[0], CPU) or ended.append(None))
    ended: list[None] = []
    thread.start()
    thread.join()
    assert ended  # its workers would end when that thread ends


def test_a_forked_child_leaves_the_workers_to_its_parent(pools: Pools) -> None:
    spec = DataSpec(Data(), num_workers=1)
    evaluate(pools, spec)
    _, before = evaluate(pools, spec)
    pid = os.fork()
    if pid == 0:
        iterator: Any = dataloader._MultiProcessingDataLoaderIter
        if hasattr(iterator, "_clean_up_persistent_workers_atexit"):  # not in torch 2.11
            iterator._clean_up_persistent_workers_atexit()
        pools.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert evaluate(pools, spec)[1] == before


@pytest.mark.parametrize("is_killed", [True, False])
def test_workers_end_although_one_held_a_lock(is_killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.data.loader.STOP_S", 0.05)
    loader = Loader(DataSpec(Data(), num_workers=2), iter(TASKS), device=CPU)
    next(loader)
    workers = loader._workers
    assert workers is not None
    workers.iterator._workers_done_event._cond.acquire()  # as a worker holds it while it checks whether to leave
    if is_killed:
        process = next(iter(workers.processes))
        assert process.pid is not None
        with suppress(RuntimeError):  # torch's, if its SIGCHLD handler comes first
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    loader.close()
    assert not multiprocessing.active_children()
