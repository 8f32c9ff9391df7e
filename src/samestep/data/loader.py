"""Loads micro-batches from sample indices, seeded per micro-batch. The result does not depend on the loading process.

A `Loader` turns `Task`s into `Loaded` micro-batches of a `DataSpec`, in this process or in torch's DataLoader workers;
`to_device` moves them. An error of the data set or collate_fn becomes one sentence that names the sample.
"""

import copy
import dataclasses
import multiprocessing
import os
import random
import signal
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate, default_convert, get_worker_info

from samestep.data.spec import DataSpec
from samestep.errors import KINDS, WORKER_ADVICE, Error, InvalidValue, WorkerDied, name_kind
from samestep.files import open_regular
from samestep.hashing import hash_short
from samestep.plan.loop_plan import Task
from samestep.processes import Held, die_with_parent, hold
from samestep.torch_internals import (
    abandon_workers,
    end_feeders,
    end_on_feeder_error,
    forget_workers,
    look_for_dead_workers,
)

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # by DataLoader workers


class Loaded(NamedTuple):
    """One micro-batch on the host.

    Attributes:
        place: of its task.
        position: the position of its lane, for a stream.
    """

    batch: Any
    fingerprint: int
    place: tuple[int, int]
    position: Any = None


class WorkerFailure(NamedTuple):
    """A DataLoader worker sends this instead of a micro-batch. torch's own wrapper would lose the cause."""

    error: Error
    worker_traceback: str


# The part of random.seed for integers. The checks for other types take longer than the seeding.
_python_random: Any = random.seed.__self__  # type: ignore[attr-defined]
_seed_python = super(random.Random, _python_random).seed


def seed_all(seed: int) -> None:
    """Seed Python's random, NumPy's global generator and torch's: the CPU's and those of all visible GPUs.

    Takes about 10 us; torch.manual_seed alone would take 220 us.

    Args:
        seed: 63 well-mixed bits, as `plan.order.derive` returns.
    """
    _seed_python(seed)
    _python_random.gauss_next = None
    # NumPy gets the high bits. With the low 32 bits, it would draw the same numbers as torch's CPU generator, which is
    # a Mersenne Twister, too.
    np.random.seed(seed >> 31)
    torch.default_generator.manual_seed(seed)
    for generator in torch.cuda.default_generators:  # none before CUDA is initialized; a model may use several GPUs
        generator.manual_seed(seed)


def to_device(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return the batch with every tensor on the device.

    Handles (named) tuples, lists, mappings, dataclasses and objects with a method `to`; other values are returned
    unchanged. For the CPU, returns the same object, since batches are loaded there.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if callable(getattr(batch, "to", None)):  # PackedSequence, BatchEncoding; not all take non_blocking
        return batch.to(device)
    move = partial(to_device, device=device, non_blocking=non_blocking)
    if isinstance(batch, Mapping):
        moved = {key: move(item) for key, item in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return moved
        mapping = copy.copy(batch)  # keeps a defaultdict's factory and other attributes
        mapping.update(moved)
        return mapping
    if isinstance(batch, list):
        return [*map(move, batch)]
    if isinstance(batch, tuple):
        return type(batch)(*map(move, batch)) if hasattr(batch, "_fields") else tuple(map(move, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        record = copy.copy(batch)
        for field in dataclasses.fields(batch):  # frozen ones too, and without running __post_init__ again
            object.__setattr__(record, field.name, move(getattr(batch, field.name)))
        return record
    return batch


class Loader(Iterator[Loaded], AbstractContextManager["Loader"]):
    """Iterates over the micro-batches of tasks, in the order of the tasks.

    With `num_workers=0` each `next()` takes exactly one task and loads it in this process. This changes the global
    generators, and the caller seeds them again. With workers, tasks are taken `num_workers * prefetch_factor` ahead,
    and the generators of this process do not change. Both give the same bits. One Loader may serve many epochs: its
    workers run until the tasks end or `close()`.

    Args:
        positions: for a stream, the `LanePosition` of each lane where the tasks begin.

    Attributes:
        positions: for a stream, the newest `LanePosition` of each lane that `next` has returned.

    Raises:
        Error: (from next) the data set or collate_fn failed; the message names sample, exception and line.
        WorkerDied: (from next) a worker was killed.
    """

    def __init__(
        self,
        spec: DataSpec,
        tasks: Iterable[Task],
        *,
        device: torch.device,
        positions: Mapping[int, Any] | None = None,
    ) -> None:
        self._fetcher = Fetcher(spec.dataset, spec.collate_fn)
        self._workers = Workers(spec, device) if spec.num_workers else None
        self.begin(tasks)
        # The bits must equal those of a DataLoader worker, which has one thread.
        self._single_thread = torch.get_num_threads() > 1
        self.positions: dict[int, Any] = dict(positions or {})

    def begin(self, tasks: Iterable[Task]) -> None:
        """Begin a series of tasks. All tasks of the previous one have been loaded."""
        self._tasks = iter(tasks)
        if self._workers is not None:
            self._workers.begin(self._tasks)

    def __next__(self) -> Loaded:
        if self._workers is not None:
            loaded = self._workers.load()
        elif self._single_thread:
            loaded = self._load_in_one_thread(next(self._tasks))
        else:
            loaded = self._fetcher.load(next(self._tasks))
        if (position := loaded.position) is not None:
            self.positions[position.lane] = position
        return loaded

    def _load_in_one_thread(self, task: Task) -> Loaded:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._fetcher.load(task)
        finally:
            torch.set_num_threads(num_threads)

    def close(self) -> None:
        """Stop the workers now, so that no process and no thread of this Loader remains. May be called twice."""
        self._tasks = iter(())
        if self._workers is not None:
            self._workers.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_workers", None) is not None:
            self.close()


class Workers(Held):
    """torch's DataLoader workers for one spec. They load series of tasks, one after another, until `close`.

    Attributes:
        iterator: yields the loaded micro-batches.
        processes: the workers, by number.
    """

    def __init__(self, spec: DataSpec, device: torch.device) -> None:
        context = spec.multiprocessing_context
        parent_pid = None if (context or multiprocessing).get_start_method() == "forkserver" else os.getpid()
        self._series = _Series()
        self._loader: DataLoader[Any] = DataLoader(
            Fetcher(spec.dataset, spec.collate_fn),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._series,
            num_workers=spec.num_workers,
            collate_fn=_unchanged,
            pin_memory=spec.pin_memory and device.type == "cuda",
            prefetch_factor=spec.prefetch_factor,
            timeout=spec.timeout_s,
            worker_init_fn=partial(
                _start_worker, spec.worker_init_fn, torch.get_deterministic_debug_mode(), parent_pid
            ),
            multiprocessing_context=context,
            generator=torch.Generator().manual_seed(0),  # otherwise it draws from the default generator
            persistent_workers=True,
        )
        self.iterator: Any = iter(())
        self.processes: list[BaseProcess] = []

    def begin(self, tasks: Iterator[Task]) -> None:
        """Begin a series of tasks, after all tasks of the previous one. The first call starts the workers."""
        self._series.tasks = tasks
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)  # until _start_worker ignores them
        try:
            self.iterator = iter(self._loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if not self.processes:
            self.processes = look_for_dead_workers(self.iterator)
            hold(self)

    def load(self) -> Loaded:
        """Return the next micro-batch of the series. Raises StopIteration at its end, and ends the workers.

        Raises:
            Error: the data set failed.
            WorkerDied: a worker was killed.
        """
        try:
            loaded: Loaded | WorkerFailure = next(self.iterator)
        except StopIteration:
            self.close()
            raise
        except (EOFError, OSError, RuntimeError):  # torch reports the death in several ways
            self._check_alive()
            raise
        if isinstance(loaded, WorkerFailure):
            raise loaded.error from RuntimeError(f"in a DataLoader worker:\n{loaded.worker_traceback}")
        return loaded

    def _check_alive(self) -> None:
        """Raise WorkerDied if a worker is dead."""
        for number, process in enumerate(self.processes):
            process.join(0.1)  # a pipe may break before the process has ended
            if process.is_alive():
                continue
            code = process.exitcode or 0
            end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise WorkerDied(f"DataLoader worker {number} (pid {process.pid}) {end}: {WORKER_ADVICE}") from None

    def close(self) -> None:
        """End the workers, which hold no state: kill them."""
        iterator = self.iterator
        self.iterator = iter(())
        if not self.processes:
            return
        abandon_workers(iterator)
        for process in self.processes:
            process.kill()
            process.join()
        end_feeders(iterator)
        self.processes = []
        del self._loader  # it refers to the iterator, whose queues are open files

    def forget(self) -> None:
        if self.processes:
            forget_workers(self.iterator)
            self.processes = []


class _Series:
    """The sampler of torch's DataLoader: the tasks of the current series, as `Fetcher` takes them."""

    def __init__(self) -> None:
        self.tasks: Iterator[Task] = iter(())

    def __iter__(self) -> Iterator[tuple[bytes, int, tuple[int, int]]]:
        for task in self.tasks:
            yield task.indices.tobytes(), task.seed, task.place  # pickling an array would take 10 us more


def _start_worker(
    worker_init_fn: Callable[[int], None] | None, deterministic_mode: int, parent_pid: int | None, worker: int
) -> None:
    """Initialize a worker."""
    # A scheduler or a terminal signals the whole process group, but the rank may need this data to complete its step
    # and save. So only SIGKILL ends a worker. The kernel sends it when the rank dies.
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    die_with_parent()
    end_on_feeder_error(_end_worker)
    if parent_pid is not None and parent_pid != os.getppid():
        os._exit(1)  # the parent died before prctl, and before torch's own watchdog started
    if torch.get_deterministic_debug_mode() != deterministic_mode:  # only forked ones inherit it
        torch.set_deterministic_debug_mode(deterministic_mode)
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _end_worker(error: Exception) -> None:
    """End this worker, which cannot send a micro-batch: the rank would wait for it forever."""
    traceback.print_exception(error)
    os._exit(1)


class Fetcher:
    """Loads one task. It is the data set of torch's DataLoader in the workers."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._is_default = collate_fn is default_collate
        self._has_columns = self._is_default and type(dataset) is TensorDataset and all(map(_is_dense, dataset.tensors))
        self._read_batch: Callable[[NDArray[np.int64]], Any] | None = (
            getattr(dataset, "read_batch", None) if self._is_default else None
        )
        self._read_many: Callable[[list[int]], Any] | None = getattr(dataset, "__getitems__", None)
        self._read_position: Callable[[Task], Any] | None = getattr(dataset, "read_lane_position", None)

    def __getitem__(self, sent: tuple[bytes, int, tuple[int, int]]) -> Loaded | WorkerFailure:
        """In a worker: return the micro-batch of a task, or a `WorkerFailure`."""
        indices, seed, place = sent
        try:
            return self.load(Task(np.frombuffer(indices, np.int64), seed, place))
        except Error as error:
            return pack(error)

    def load(self, task: Task) -> Loaded:
        """Seed, read the samples, collate.

        Raises:
            Error: the data set or collate_fn raised an exception.
        """
        samples: Any = None  # unless the data set reads them one by one, or has read them
        position = None
        try:
            if self._has_columns and get_worker_info() is None:  # workers collate into shared memory
                # One operation per tensor, and no object per sample. Draws no random numbers, so it needs no seed.
                rows = torch.from_numpy(task.indices)
                batch: Any = [*map(methodcaller("index_select", 0, rows), self._dataset.tensors)]
            elif self._read_batch is not None:
                batch = self._read_batch(task.indices)
            else:
                seed_all(task.seed)
                indices = task.indices.tolist()
                if self._read_many is None:
                    samples = []
                    for index in indices:
                        samples.append(self._dataset[index])
                else:
                    samples = self._read_many(indices)
                batch = self._collate(samples, len(indices))
                if self._read_position is not None:
                    position = self._read_position(task)
        except Error:
            raise
        except Exception as error:
            num_read = None if samples is None else len(samples)
            raise Error(explain(error, task.indices.tolist(), num_read), code="SS301") from error
        return Loaded(batch, hash_short(task.indices.data), task.place, position)

    def _collate(self, samples: Any, count: int) -> Any:
        if isinstance(samples, list) and len(samples) != count:
            raise InvalidValue(f"__getitems__ gave {len(samples)} samples for {count} indices", code="SS301")
        if self._is_default and not isinstance(samples, list | tuple):  # a micro-batch already
            return default_convert(samples)
        return self._collate_fn(samples)


def _is_dense(item: Any) -> bool:
    return type(item) is Tensor and item.layout is torch.strided and not item.is_nested


def _unchanged(value: Any) -> Any:
    return value


# --- errors of the data set or collate_fn -----------------------------------------------------------------------------


def pack(error: Error) -> WorkerFailure:
    """Convert an Error in a worker for sending."""
    text = "".join(traceback.format_exception(error.__cause__ or error))
    # A script's own subclass may not be one that can be sent.
    return WorkerFailure(KINDS[name_kind(error)](str(error), code=error.code), text)


def locate_error(error: Error, logs: Path | None, rank: int, place: str) -> Error:
    """Return an Error of the data set or collate_fn with the rank and the place in the run. Raise it from
    `error.__cause__`.

    Args:
        logs: where the rank's log gets the traceback of the cause, whose path is then in the message.
    """
    where = ""
    if logs is not None and error.__cause__ is not None:
        log = logs / f"{rank}.log"
        text = "".join(traceback.format_exception(error.__cause__))
        with suppress(OSError):
            logs.mkdir(parents=True, exist_ok=True)
            with open(log, "a", opener=open_regular) as file:
                file.write(f"{error}\n{text}")
            where = f" (traceback: {log})"
    kind = KINDS[name_kind(error)]  # a script's own subclass may take other arguments
    return kind(f"{str(error).rstrip('.')}, on rank {rank} in {place}{where}", rank=rank, code=error.code)


def explain(error: Exception, indices: Sequence[int], num_read: int | None) -> str:
    """Describe a failure in one sentence.

    Args:
        indices: the samples of the micro-batch.
        num_read: number of the samples that the data set has read one by one before it failed. None: it reads them at
            once.
    """
    what = "collate_fn" if num_read == len(indices) else "the data set"
    at = 0 if len(indices) == 1 else num_read
    shown = [*map(str, indices)] if len(indices) <= 8 else [*map(str, indices[:6]), f"... {indices[-1]}"]
    where = f"one of the samples {', '.join(shown)}" if at in (None, len(indices)) else f"sample {indices[at]}"
    info = get_worker_info()
    worker = f", in DataLoader worker {info.id}" if info is not None else ""
    return f"{what} failed at {where} ({describe_error(error)}{worker})"


def describe_error(error: Exception) -> str:
    """Format an error and its innermost frame outside libraries on one line: `KeyError: 'x' at data.py:31`."""
    text = " ".join(str(error).split())
    text = f": {text[:300]}" if text else ""
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    ours = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    own = [frame for frame in frames if not frame.filename.startswith((*libraries, "<"))] or frames
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}{text}{place}"
