"""Checks whether the data set is the run's: its shards, and hashes of a few samples."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from samestep.data.content import hash_content
from samestep.data.lanes import Lanes
from samestep.data.loader import Loader
from samestep.data.spec import DataSpec, has_lanes
from samestep.errors import Error, InvalidValue, RunDirectoryError
from samestep.plan.loop_plan import Task
from samestep.plan.seeds import derive
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.run_record import StartOptions
from samestep.train.generators import keeping_generators
from samestep.train.inputs.loop_data import LoopData
from samestep.world.environment import advise
from samestep.world.group import Group

NUM_COMPARED = 8  # micro-batches of two lanes, as long as they are the same


def add_samples(
    options: StartOptions,
    group: Group,
    directory: RunDirectory | None,
    data: LoopData,
    seed: int,
    machine: Mapping[str, Any],
    overrides: bool,
) -> StartOptions:
    """Return the options with the hashes of a few samples, after comparing them with those of all ranks and of the run.

    Args:
        directory: on the rank that writes it.
        machine: description of this machine.
        overrides: whether to accept other data than the run's.

    Raises:
        InvalidValue: the ranks have different data sets, or the lanes of a stream are the same.
        RunDirectoryError: the data are not the run's.
    """
    hashes: list[str] = []
    if data.lanes is None and (group.world_size > 1 or directory is not None):
        hashes = read_samples(data.spec, seed)
        compare_ranks(hashes, data.spec, group, machine)

    def check() -> list[str]:
        if data.lanes is not None:  # samples of a stream are compared when they are read again
            check_lanes(data.spec, data.lanes, seed)
        if directory is None:
            return []
        directory.check_numbers(data.numbers)  # gives a better error than a sample
        return compare_run(hashes, data.spec, directory.record, machine, overrides=overrides)

    samples = group.once(check)
    if data.lanes is not None:
        data.lanes.close()  # they were read with other seeds
    return replace(options, samples=samples)


def compare_ranks(hashes: list[str], spec: DataSpec, group: Group, machine: Mapping[str, Any]) -> None:
    """Compare the samples of all ranks that run on one kind of machine."""
    (first, kind), *others = group.gather((hashes, dict(machine)))
    for rank, (theirs, its_kind) in enumerate(others, start=1):
        index = _find_different(spec, first, theirs)
        if index is not None and its_kind == kind:
            raise InvalidValue(
                f"sample {index} of the data set differs between rank 0 and rank {rank}: build the same data set, of "
                "the same dtypes, on all ranks, after samestep.Run(...), which seeds the generators; the run divides "
                "it",
                code="SS305",
            )


def compare_run(
    hashes: list[str], spec: DataSpec, record: Mapping[str, Any], machine: Mapping[str, Any], *, overrides: bool
) -> list[str]:
    """Compare the samples with those in `run.json`. Returns the hashes to record.

    On a different kind of machine, a difference is not an error: the same preprocessing may give different bits there.
    """
    before: list[str] = record.get("samples", [])
    index = _find_different(spec, before, hashes)
    if index is None:
        return before or hashes
    if not overrides and record["machine"] == machine:
        raise RunDirectoryError(
            f"the data set is not the one that the run began with (sample {index} differs): build it, of the same "
            "dtypes, after samestep.Run(...), which seeds the generators, or with a fixed seed; to continue with this "
            f"one, pass override=True to run.prepare, or start with {advise(override=True)}",
            code="SS306",
        )
    return hashes


def _find_different(spec: DataSpec, some: Iterable[str], others: Iterable[str]) -> int | None:
    """Return the first of the samples whose hashes are known and differ."""
    rows = zip(_choose(spec), some, others, strict=False)
    return next((index for index, one, other in rows if one and other and one != other), None)


def check_lanes(spec: DataSpec, lanes: Lanes, seed: int) -> None:
    """Compare the first two lanes of a stream. On one rank.

    Raises:
        InvalidValue: they have the same first `NUM_COMPARED` micro-batches: the stream does not divide its data.
    """
    if lanes.num_lanes > 1 and not has_lanes(lanes.dataset) and _are_alike(spec, lanes, seed):
        raise InvalidValue(
            f"several of the {lanes.num_lanes} lanes of {type(lanes.dataset).__name__} begin with the same samples: "
            "let __iter__ divide the data by torch.utils.data.get_worker_info(), or give it a method "
            "lane(lane, num_lanes)",
            code="SS313",
        )


def _are_alike(spec: DataSpec, lanes: Lanes, seed: int) -> bool:
    """Return whether two lanes begin alike.

    They are read with the same seeds, so that noise that is added to samples does not hide it.
    """
    tasks = [
        Task(lanes.indices(lane, step), derive(seed, "data", step=step, pass_=1))
        for step in range(NUM_COMPARED)
        for lane in (0, 1)
    ]
    alone = replace(spec, num_workers=min(spec.num_workers, 1))
    with keeping_generators(), suppress(Error), Loader(alone, tasks, device=torch.device("cpu")) as loader:
        for _ in range(NUM_COMPARED):
            first, second = (hash_content(next(loader).batch) for _ in range(2))
            if not first or first != second:
                return False
        return True
    return False  # a lane cannot be read, which the training will report


def read_samples(spec: DataSpec, seed: int) -> list[str]:
    """Return the hashes of a few samples, each read twice and collated alone, as in training.

    A hash is "" for a sample that cannot be read, contains no numbers, or differs when it is read again.

    If the run has workers, this starts one: a data set may open its files at the first read, and the training's
    workers, which are forked later, would share a file opened in this process.
    """
    indices = _choose(spec)
    tasks = [Task(np.array([index]), derive(seed, "data", step=index, pass_=1)) for index in indices for _ in range(2)]
    alone = replace(spec, num_workers=min(spec.num_workers, 1))
    with keeping_generators(), Loader(alone, tasks, device=torch.device("cpu")) as loader:
        hashes = [_read_hash(loader) for _ in tasks]
    return [one if one == again else "" for one, again in zip(hashes[::2], hashes[1::2], strict=True)]


def _read_hash(loader: Loader) -> str:
    with suppress(Error):  # the training will raise it for this sample
        return hash_content(next(loader).batch)
    return ""


def _choose(spec: DataSpec) -> list[int]:
    return sorted({0, len(spec) // 2, len(spec) - 1})
