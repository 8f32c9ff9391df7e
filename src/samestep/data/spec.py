"""Checks and normalizes the data that a script passes: a map-style data set, a stream, or a DataLoader of either."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
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


def read_data_arguments(
    data: Any,
    *,
    sizes: Sequence[int] = (),
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int | None = None,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    pin_memory: bool | None = None,
    takes_streams: bool = False,
) -> DataSpec:
    """Return the specification for a data set or a DataLoader.

    Arguments other than None take precedence over the DataLoader's. The defaults are default_collate, no workers,
    shuffled, and the last short batch kept.

    Args:
        sizes: micro-batch size and batch size of the run. A DataLoader with another batch size is refused; () accepts
            any.
        takes_streams: whether data sets without indexing are also accepted.

    Raises:
        Error: the data set has no indexing, no length or no samples, its sampler is not supported, or the sizes differ.
    """
    given: dict[str, Any] = {
        "collate_fn": collate_fn,
        "num_workers": num_workers,
        "shuffle": shuffle,
        "drop_last": drop_last,
        "pin_memory": pin_memory,
    }
    wanted = {name: value for name, value in given.items() if value is not None}
    if isinstance(data, DataLoader):
        spec = dataclasses.replace(_understand_loader(data, sizes, takes_streams), **wanted)
    else:
        spec = DataSpec(data, **wanted)
    _check_dataset(spec.dataset, takes_streams)
    if not isinstance(spec.num_workers, int) or spec.num_workers < 0:
        raise InvalidValue(f"num_workers is {spec.num_workers!r}: give 0 (load in this process) or more", code="SS101")
    return spec


def _understand_loader(loader: DataLoader[Any], sizes: Sequence[int], takes_streams: bool) -> DataSpec:
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise InvalidType(
            f"{type(loader).__name__} defines its own iteration, which would not follow the run's order: "
            "pass its data set, with collate_fn= and num_workers= as arguments",
            code="SS304",
        )
    _check_dataset(loader.dataset, takes_streams)
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise InvalidValue(
            "the DataLoader has its own batch_sampler, or batch_size=None, but the run chooses the samples "
            "of a batch: pass the data set itself, and sampler=f with f(epoch) -> indices",
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
        shuffle=not is_stream(loader.dataset) and _is_shuffled(loader),
        drop_last=loader.drop_last,
        micro_batch_size=loader.batch_size,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor or 2,
        timeout_s=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _is_shuffled(loader: DataLoader[Any]) -> bool:
    sampler = loader.sampler
    name = type(sampler).__name__
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is RandomSampler:
        if not sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
            return True
        name += " with replacement" if sampler.replacement else f" with num_samples={sampler.num_samples}"
    if isinstance(sampler, DistributedSampler):
        hint = "remove it, since the run itself divides the samples among the ranks"
    else:
        hint = "pass the data set itself, and sampler=f with f(epoch) -> indices, the same on all ranks"
    raise InvalidType(f"the DataLoader's sampler is a {name}, which a run does not support: {hint}", code="SS304")


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
