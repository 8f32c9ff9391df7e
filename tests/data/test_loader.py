"""Loading micro-batches, with real DataLoader workers, real signals and real processes."""

import collections
import gc
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import psutil
import pytest
import torch
from support.commands import Popen
from support.waiting import DEADLINE_S
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from samestep.data.loader import Loaded, Loader, locate_error, seed_all, to_device
from samestep.data.spec import read_data_arguments
from samestep.errors import Error, InvalidValue, WorkerDied, recognize
from samestep.hashing import hash_short
from samestep.plan.loop_plan import Task
from samestep.train.determinism import keeping_generators

CPU = torch.device("cpu")


class Noisy:
    """A data set that augments with all three generators."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, float, float]:
        return index + torch.rand(3), index + random.random(), index + np.random.rand()


class Stuck(Noisy):
    def __getitem__(self, index: int) -> NoReturn:
        while True:
            signal.pause()


class Many:
    """A data set with __getitems__."""

    def __len__(self) -> int:
        return 100

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return list(torch.tensor(indices)[:, None] + torch.rand(len(indices), 2))


class Odd(Noisy):
    """A data set whose sample 17 differs from all others."""

    def __init__(self, odd: Callable[[], Any]) -> None:
        self.odd = odd

    def __getitem__(self, index: int) -> Any:
        return self.odd() if index == 17 else torch.zeros(3)


def fail_with_key_error() -> Any:
    raise KeyError("x")


def plan_tasks(num_tasks: int, size: int = 4) -> list[Task]:
    return [
        Task(np.arange(size * k, size * k + size) % 100, (k + 1) * 987654321987654321 % 2**63) for k in range(num_tasks)
    ]


def open_loader(data: Any, tasks: Iterable[Task], **options: Any) -> Loader:
    return Loader(read_data_arguments(data, **options), iter(tasks), device=CPU)


def load(data: Any, tasks: list[Task], **options: Any) -> list[Loaded]:
    with open_loader(data, tasks, **options) as loader:
        return list(loader)


def assert_same(a: list[Loaded], b: list[Loaded]) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one[1:] == other[1:]
        torch.testing.assert_close(one.batch, other.batch, rtol=0, atol=0)


def test_the_bits_do_not_depend_on_the_workers() -> None:
    """With `__getitems__`. (A test below, which signals workers, has a data set without it.)"""
    tasks = plan_tasks(7)
    here = load(Many(), tasks)
    assert_same(here, load(Many(), tasks, num_workers=2))
    assert_same(here[3:5], load(Many(), tasks[3:5]))  # nor on earlier micro-batches


# The worker is a new interpreter that imports torch: 2 s, and far more on a busy machine.
def test_the_bits_do_not_depend_on_how_workers_start() -> None:
    tasks = plan_tasks(3)
    data = DataLoader(Noisy(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    assert_same(load(Noisy(), tasks), load(data, tasks))


def test_the_bits_do_not_depend_on_threads() -> None:
    class Sums(Many):
        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            return [torch.rand(200_000).sum() * 1e-3 for _ in indices]

    one = load(Sums(), plan_tasks(2))
    torch.set_num_threads(2)
    try:
        two = load(Sums(), plan_tasks(2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert_same(one, two)


def test_the_samples_are_read_with_python_ints_in_the_order_of_the_task() -> None:
    class Types(Noisy):
        def __getitem__(self, index: int) -> Any:
            return index, type(index).__name__

    [loaded] = load(Types(), [Task(np.array([5, 3, 9]), 1)], collate_fn=list)
    assert loaded.batch == [(5, "int"), (3, "int"), (9, "int")]


def test_generators_of_different_libraries_draw_different_numbers() -> None:
    seed_all(0x1234_5678_9ABC_DEF0)
    words = {
        int(torch.rand(()) * 2**24),
        int(np.random.randint(2**32, dtype=np.uint32)) & (2**24 - 1),
        random.getrandbits(32) & (2**24 - 1),
    }
    assert len(words) == 3


def test_the_generators_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are seeded and restored."""
    gpus = tuple(torch.Generator() for _ in range(3))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    def draw() -> list[float]:
        return [torch.rand((), generator=gpu).item() for gpu in gpus]

    seed_all(7)
    with keeping_generators():
        expected = draw()
    assert len({*expected}) == 1
    assert draw() == expected


def test_loading_with_workers_leaves_the_generators_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), np.random.rand()

    seed_all(7)
    expected = draw()
    seed_all(7)
    load(Noisy(), plan_tasks(3), num_workers=1)
    assert draw() == expected


@pytest.mark.parametrize(("num_workers", "ahead"), [(0, 0), (2, 6)])
def test_tasks_are_taken_no_earlier_than_needed(num_workers: int, ahead: int) -> None:
    taken = itertools.count()
    tasks = (task for task in itertools.cycle(plan_tasks(5)) if next(taken) >= 0)
    data = DataLoader(Noisy(), batch_size=4, num_workers=num_workers, prefetch_factor=3 if num_workers else None)
    with open_loader(data, tasks) as loader:
        for done in range(1, 8):
            next(loader)
            assert done <= int(repr(taken)[6:-1]) <= done + ahead


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (fail_with_key_error, r"the data set failed at sample 17 \(KeyError: 'x' at .*test_loader.py:\d+"),
        (lambda: next(iter(())), r"the data set failed at sample 17 \(StopIteration at "),
        (lambda: torch.zeros(4), r"collate_fn failed at one of the samples 16, 17, 18, 19 \(RuntimeError: stack ex"),
        (lambda: None, r"collate_fn failed at one of the samples .* \((TypeError|AttributeError): "),
        (lambda: (torch.zeros(3),), r"collate_fn failed at one of the samples .* \((TypeError|AttributeError): "),
    ],
)
def test_a_failure_names_the_sample(num_workers: int, odd: Callable[[], Any], said: str) -> None:
    tasks = plan_tasks(6)  # the fifth has samples 16 to 19
    with open_loader(Odd(odd), tasks, num_workers=num_workers) as loader:
        for _ in range(4):
            next(loader)
        with pytest.raises(Error, match=said) as caught:
            next(loader)
        assert ("in DataLoader worker 0" in str(caught.value)) == (num_workers > 0)
        assert caught.value.__cause__ is not None
        assert num_workers == 0 or "Traceback" in str(caught.value.__cause__)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_is_killed_is_named_with_its_samples(number: signal.Signals) -> None:
    said = rf"^DataLoader worker 0 .pid \d+. was killed by {number.name}: check"
    data = Odd(lambda: os.kill(os.getpid(), number))
    with pytest.raises(WorkerDied, match=said) as caught:
        load(data, plan_tasks(5), num_workers=2)
    assert caught.value.__suppress_context__
    torchs = RuntimeError(f"DataLoader worker (pid 7) is killed by signal: {signal.strsignal(number)}. ")
    said = f"DataLoader worker (pid 7) was killed by {number.name} while the script ran: check for a lack of memory"
    assert str(recognize(torchs)).startswith(said)


def test_the_death_of_a_worker_raises_at_the_next_micro_batch_only() -> None:
    """torch would raise from its signal handler, wherever the script is: Python ignores that in a callback."""
    with open_loader(Noisy(), plan_tasks(20), num_workers=1) as loader:
        next(loader)
        (process,) = loader._workers.processes
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        signal.raise_signal(signal.SIGCHLD)  # the handler runs here
        with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
            list(loader)


def test_a_failure_keeps_its_traceback_in_the_log_of_the_rank(tmp_path: Path) -> None:
    with pytest.raises(Error) as caught:
        load(Odd(fail_with_key_error), plan_tasks(6))
    located = locate_error(caught.value, tmp_path / "logs", 3, "step 4")
    assert str(located).endswith(f", on rank 3 in step 4 (traceback: {tmp_path / 'logs' / '3.log'})")
    kept = (tmp_path / "logs" / "3.log").read_text()
    assert "failed at sample 17" in kept
    assert "in fail_with_key_error" in kept


@pytest.mark.parametrize("num_workers", [0, 1])
def test_getitems_must_give_a_sample_for_each_index(num_workers: int) -> None:
    class Short(Many):
        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            return super().__getitems__(indices)[1:]

    with pytest.raises(InvalidValue, match="3 samples for 4 indices"):
        load(Short(), plan_tasks(1), num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_read_batch_gives_the_micro_batch(num_workers: int) -> None:
    class Whole(Many):
        def read_batch(self, indices: Any) -> Tensor:
            assert (indices.dtype, type(indices)) == (np.int64, np.ndarray)
            if (indices == 17).any():
                raise ValueError("torn page")
            return torch.tensor(indices) * 10

    tasks = plan_tasks(3)
    loaded = load(Whole(), tasks, num_workers=num_workers)
    assert [one.batch.tolist() for one in loaded] == [(task.indices * 10).tolist() for task in tasks]
    assert [one.fingerprint for one in loaded] == [hash_short(task.indices.data) for task in tasks]
    collated = load(Whole(), tasks[:1], num_workers=num_workers, collate_fn=list)  # a collate_fn needs samples
    assert [tuple(row.shape) for row in collated[0].batch] == [(2,)] * len(tasks[0].indices)
    with pytest.raises(Error, match=r"the data set failed at one of the samples 16, 17, 18 \(ValueError: torn page"):
        load(Whole(), [Task(np.arange(16, 19), 0)], num_workers=num_workers)


def test_close_leaves_no_process_and_no_thread() -> None:
    threads = set(threading.enumerate())
    for ending in ("close", "exhausted", "dropped"):
        loader = open_loader(Noisy(), plan_tasks(20), num_workers=2)
        next(loader)
        workers = multiprocessing.active_children()
        assert len(workers) == 2
        if ending == "close":
            loader.close()
            loader.close()
            assert list(loader) == []
        elif ending == "exhausted":
            assert len(list(loader)) == 19
        del loader
        gc.collect()
        assert not any(psutil.pid_exists(worker.pid) for worker in workers if worker.pid), ending
        assert set(threading.enumerate()) <= threads, ending


def test_close_ends_a_thread_that_sends_more_than_a_pipe_holds() -> None:
    threads = set(threading.enumerate())
    tasks = (Task(np.zeros(1 << 16, int), number) for number in range(8))
    loader = open_loader(Stuck(), tasks, num_workers=1)
    assert set(threading.enumerate()) > threads
    loader.close()
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_leave_the_decision_to_the_rank(number: signal.Signals) -> None:
    tasks = plan_tasks(30)
    with open_loader(Noisy(), tasks, num_workers=2) as loader:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, number)  # at once: they may not have started
        loaded = [next(loader) for _ in range(10)]
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, number)
        loaded += list(loader)
    assert_same(loaded, load(Noisy(), tasks))


SCRIPT = """
import itertools, multiprocessing, os, sys
import numpy as np
import torch
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 1000  # how long torch's own exit hook waits for each worker
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 1000  # and after which a worker looks for its parent
from samestep.data.loader import Loader
from samestep.data.spec import read_data_arguments
from samestep.plan.loop_plan import Task

tasks = (Task(np.arange(4), seed) for seed in itertools.count())
loader = Loader(read_data_arguments(torch.zeros(8), num_workers=2), tasks, device=torch.device("cpu"))
next(loader)
print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
sys.stdin.readline()
exec(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("ending", "code"), [("pass", 0), ("1 / 0", 1), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -signal.SIGKILL)]
)
def test_no_worker_outlives_a_rank_that_does_not_close_its_loader(tmp_path: Path, ending: str, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, f"sys.stderr = None; {ending}"]
    process = Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    process.communicate("\n", timeout=DEADLINE_S)
    assert process.returncode == code
    assert not psutil.wait_procs(workers, timeout=DEADLINE_S)[1]


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclass(frozen=True)
class Record:
    x: Tensor
    name: str


class Graph:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> "Graph":
        return Graph(self.x.to(device))


def test_to_device_moves_every_structure() -> None:
    x = torch.zeros(2)
    counts: collections.defaultdict[str, Any] = collections.defaultdict(list, a=x)
    batch = {
        "nested": (x, [x, "text"]),
        "pair": Pair(x, {"deep": x}),
        "record": Record(x, "name"),
        "graph": Graph(x),
        "counts": counts,
        "packed": pack_sequence([x]),
        "rest": ["text", 3, None, 2.5],
    }
    meta = torch.device("meta")
    moved = to_device(batch, meta)
    tensors = [moved["nested"][0], moved["nested"][1][0], moved["pair"].x, moved["pair"].y["deep"]]
    tensors += [moved["record"].x, moved["graph"].x, moved["counts"]["a"], moved["packed"].data]
    assert {tensor.device for tensor in tensors} == {meta}
    assert {name: type(value) for name, value in moved.items()} == {name: type(value) for name, value in batch.items()}
    assert (moved["nested"][1][1], moved["record"].name) == ("text", "name")
    assert moved["counts"].default_factory is list
    assert moved["rest"] == ["text", 3, None, 2.5]
    assert batch["nested"][0].device == CPU  # the argument is unchanged
    assert to_device(batch, CPU, non_blocking=True) is batch, "batches are loaded there"


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.randn(9, 4, 2), torch.arange(9)),
        (torch.randn(4, 9).T, torch.rand(9) < 0.5, torch.randn(1, 3).expand(9, 3)),
        (torch.randn(9, 2, dtype=torch.complex64), torch.randn(9, 0), torch.randn(9, 2).to(torch.bfloat16)),
    ],
    ids=["common", "strided", "other dtypes"],
)
def test_a_tensor_dataset_is_read_by_the_column(tensors: tuple[Tensor, ...]) -> None:
    """The bits, types and shapes are those of reading it sample by sample."""
    tasks = [Task(np.array([3, 8, 0, 3]), 1), Task(np.array([5]), 2)]
    data = TensorDataset(*tensors)
    samples = [data[i] for i in (3, 8, 0, 3)]
    first, second = [loaded.batch for loaded in load(data, tasks, sizes=(4,))]
    assert type(first) is type(second) is list
    assert [len(column) for column in second] == [1] * len(tensors)
    for column, wanted in zip(first, default_collate(samples), strict=True):
        assert column.is_contiguous()
        assert torch.equal(column, wanted)
        assert (column.dtype, column.shape) == (wanted.dtype, wanted.shape)


@pytest.mark.parametrize("is_killed", [True, False])
def test_workers_end_although_one_held_a_lock(is_killed: bool) -> None:
    loader = open_loader(Noisy(), plan_tasks(3), num_workers=2)
    next(loader)
    workers = loader._workers
    workers.iterator._workers_done_event._cond.acquire()  # as a worker holds it while it checks whether to leave
    if is_killed:
        process = next(iter(workers.processes))
        with suppress(RuntimeError):  # torch's, if its SIGCHLD handler comes first
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    loader.close()
    assert not multiprocessing.active_children()


# --- what is accepted as a data set -----------------------------------------------------------------------------------


NUMBERS = TensorDataset(torch.arange(10))


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return itertools.repeat(torch.zeros(3))


class OwnLoader(DataLoader[Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([])


def collate(samples: list[object]) -> list[object]:
    return samples


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_loader_is_understood(shuffle: bool) -> None:
    loader = DataLoader(
        NUMBERS,
        batch_size=4,
        shuffle=shuffle,
        num_workers=2,
        prefetch_factor=3,
        drop_last=True,
        timeout=9,
        collate_fn=collate,
    )
    spec = read_data_arguments(loader, sizes=(4, 8))
    assert spec.dataset is NUMBERS
    assert spec.collate_fn is collate
    assert (spec.shuffle, spec.drop_last) == (shuffle, True)
    assert (spec.num_workers, spec.prefetch_factor, spec.timeout_s) == (2, 3, 9)
    assert spec.micro_batch_size == 4


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (DataLoader(NUMBERS, sampler=DistributedSampler(NUMBERS, 2, 0)), "own sampler, a DistributedSampler, but"),
        (DataLoader(NUMBERS, sampler=WeightedRandomSampler([1.0] * 10, 10)), "WeightedRandomSampler.*sampler=f"),
        (DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, replacement=True)), "own sampler, a RandomSampler"),
        (DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, num_samples=5)), "own sampler, a RandomSampler"),
        (DataLoader(NUMBERS, sampler=[3, 1, 2]), "own sampler, a list"),
        (DataLoader(NUMBERS, batch_size=None), "batch_size=None"),
        (DataLoader(NUMBERS, batch_sampler=[[1, 2], [3]]), "batch_sampler"),
        (DataLoader(Endless()), "Endless is a stream without indexing"),
        (OwnLoader(NUMBERS), "its own iteration"),
    ],
)
def test_data_loaders_that_a_run_cannot_honour(loader: DataLoader[Tensor], said: str) -> None:
    with pytest.raises(Error, match=said):
        read_data_arguments(loader)
