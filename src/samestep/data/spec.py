"""Checks and normalizes the data that a script passes: a map-style data set, a stream, or a DataLoader of either."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from samestep.errors import InvalidType, InvalidValue


@dataclass(frozen=True)
class DataSpec:
    """A data set, and how to load micro-batches from it.

    Args:
        micro_batch_size: the batch size of the DataLoader that was passed; None for a plain data set.
        pin_memory: whether to use page-locked host memory if the device is a CUDA GPU and there are workers.
    """

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] = default_collate
    num_workers: int = 0
    shuffle: bool = True
    drop_last: bool = False
    micro_batch_size: int | None = None
    pin_memory: bool = True
    prefetch_factor: int = 2
    timeout_s: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None

    def __len__(self) -> int:
        return len(self.dataset)


def read_data_arguments(data: Any, *, sizes: Sequence[int] = (), takes_streams: bool = False, **given: Any) -> DataSpec:
    """Return the specification for a data set or a DataLoader.

    Args:
        sizes: micro-batch size and batch size of the run. A DataLoader with another batch size is refused; () accepts
            any.
        takes_streams: whether data sets without indexing are also accepted.
        given: arguments of `DataSpec`. Those other than None take precedence over the DataLoader's, and over the
            defaults.

    Raises:
        Error: the data set has no indexing, no length or no samples, its sampler is not supported, or the sizes differ.
    """
    wanted = {name: value for name, value in given.items() if value is not None}
    is_loader = isinstance(data, DataLoader)
    _check_dataset(data.dataset if is_loader else data, takes_streams)
    spec = dataclasses.replace(_understand_loader(data, sizes) if is_loader else DataSpec(data), **wanted)
    if not isinstance(spec.num_workers, int) or spec.num_workers < 0:
        raise InvalidValue(f"num_workers is {spec.num_workers!r}: give 0 (load in this process) or more", code="SS101")
    return spec


def _understand_loader(loader: DataLoader[Any], sizes: Sequence[int]) -> DataSpec:
    if (own := _find_own(loader)) is not None:
        raise InvalidType(
            f"the DataLoader has its own {own}, but the run chooses the samples of a batch, and divides them among the "
            "ranks: pass the data set itself, with collate_fn= and num_workers=, and if another order is needed with "
            "sampler=f, f(epoch) -> indices",
            code="SS304",
        )
    if sizes and loader.batch_size not in sizes:
        raise InvalidValue(
            f"the DataLoader's batch_size is {loader.batch_size}, and the run's is {sizes[-1]}, in micro-batches of "
            f"{sizes[0]}: create a DataLoader with one of these two, or pass the data set itself, with num_workers= "
            "and collate_fn= as arguments",
            code="SS304",
        )
    return DataSpec(
        dataset=loader.dataset,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        shuffle=isinstance(loader.sampler, RandomSampler),
        drop_last=loader.drop_last,
        micro_batch_size=loader.batch_size,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor or 2,
        timeout_s=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _find_own(loader: DataLoader[Any]) -> str | None:
    """Return what of a DataLoader decides which samples a batch has; None if it is as DataLoader itself creates it."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        return "iteration"
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return "batch_sampler, or batch_size=None"
    sampler = loader.sampler
    if is_stream(loader.dataset) or type(sampler) is SequentialSampler:
        return None
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return None
    return f"sampler, a {type(sampler).__name__}"


def is_stream(dataset: Any) -> bool:
    """Return whether the data set is read in lanes (see `data.lanes`), since it has no indexing."""
    return isinstance(dataset, IterableDataset) or (has_lanes(dataset) and not hasattr(dataset, "__getitem__"))


def has_lanes(dataset: Any) -> bool:
    """Return whether the data set has a method `lane`."""
    return callable(getattr(dataset, "lane", None))


def _check_dataset(dataset: Any, takes_streams: bool) -> None:
    name = type(dataset).__name__
    if is_stream(dataset):
        if takes_streams:
            return
        raise InvalidType(
            f"{name} is a stream without indexing, so the end of an epoch is not known: pass it to "
            "run.steps(data, num_steps), or pass a map-style data set, with __getitem__ and __len__",
            code="SS302",
        )
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")):
        raise InvalidType(
            f"{name} does not support indexing, so no step could be repeated: "
            "pass a map-style data set, with __getitem__ and __len__",
            code="SS302",
        )
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        raise InvalidType(
            f"{name} has no len(): pass a map-style data set, with __getitem__ and __len__", code="SS302"
        ) from None
    if length == 0:
        raise InvalidValue(f"the data set ({name}) is empty: a run needs at least one sample", code="SS303")
