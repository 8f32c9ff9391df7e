"""Checks whether the data set is the run's: its shards, and hashes of a few samples."""

from collections.abc import Mapping
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
from samestep.snapshot.run_record import StartOptions, describe_changes
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
    """Return the options with rank 0's result of `check_samples`, after `compare_ranks`."""
    own = None
    if group.world_size > 1 and data.lanes is None:
        own = read_samples(data.spec, seed)
        compare_ranks(own, data.spec, seed, group, machine)

    def check() -> tuple[list[str], str]:
        if data.lanes is not None:
            check_lanes(data.spec, data.lanes, seed)
        if directory is None:
            return [], ""
        directory.check_numbers(data.numbers)  # gives a better error than a sample
        if data.lanes is not None:  # they are compared when they are read again
            return [], ""
        before = directory.record.get("samples", [])
        now = check_samples(data.spec, seed, directory.record, machine, overrides=overrides, now=own)
        return now, describe_changes({"samples": before or now}, {"samples": now})

    samples, changed = group.once(check)
    if data.lanes is not None:
        data.lanes.close()  # they were read with other seeds
    return replace(options, samples=samples, changed_data=changed)


def compare_ranks(own: list[str], spec: DataSpec, seed: int, group: Group, machine: Mapping[str, Any]) -> None:
    """Compare the samples that the ranks have read, on all ranks that run on one kind of machine.

    Samples that differ when a rank reads them twice are not compared.

    Args:
        own: this rank's `read_samples`.
        machine: description of this machine.

    Raises:
        InvalidValue: the ranks have different data sets.
    """
    (first, kind), *others = group.gather((own, dict(machine)))
    differing = [
        (rank, index)
        for rank, (theirs, its_kind) in enumerate(others, start=1)
        for index, expected, found in zip(_choose(spec), first, theirs, strict=True)
        if its_kind == kind and expected and found and expected != found
    ]
    if differing and all(group.gather(read_samples(spec, seed) == own)):
        rank, index = differing[0]
        raise InvalidValue(
            f"sample {index} of the data set differs between rank 0 and rank {rank}: build the same data set, of the "
            "same dtypes, on all ranks, after samestep.Run(...), which seeds the generators; the run divides it",
            code="SS305",
        )


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


def check_samples(
    spec: DataSpec,
    seed: int,
    record: Mapping[str, Any],
    machine: Mapping[str, Any],
    *,
    overrides: bool,
    now: list[str] | None = None,
) -> list[str]:
    """Compare the first, the middle and the last sample with the run's. On one rank.

    Samples that differ when they are read twice in one start are not compared. On a different kind of machine, a
    difference is not an error: the same preprocessing may give different bits there.

    Args:
        record: content of `run.json`; its "samples" are the result of an earlier start.
        machine: description of this machine, as in the record.
        overrides: whether to accept different data.
        now: the result of `read_samples`, if it was called before.

    Returns:
        For each sample, its hash; "" for one that cannot be read or contains no numbers.

    Raises:
        RunDirectoryError: the data are not the run's.
    """
    before = record.get("samples", [])
    now = read_samples(spec, seed) if now is None else now
    rows = zip(_choose(spec), before, now, strict=False)
    changed = [row for row in rows if row[1] and row[2] and row[1] != row[2]]
    if not changed or read_samples(spec, seed) != now:
        return before or now
    if not overrides and record.get("machine") == machine:
        raise RunDirectoryError(
            f"the data set is not the one that the run began with (sample {changed[0][0]} differs): build it, of "
            "the same dtypes, after samestep.Run(...), which seeds the generators, or with a fixed seed; to continue "
            f"with this one, pass override=True to run.prepare, or start with {advise(override=True)}",
            code="SS306",
        )
    return now


def read_samples(spec: DataSpec, seed: int) -> list[str]:
    """Return the hashes of a few samples, each read and collated alone, as in training.

    If the run has workers, this starts one: a data set may open its files at the first read, and the training's
    workers, which are forked later, would share a file opened in this process.
    """
    tasks = [Task(np.array([index]), derive(seed, "data", step=index, pass_=1)) for index in _choose(spec)]
    alone = replace(spec, num_workers=min(spec.num_workers, 1))
    with keeping_generators(), Loader(alone, tasks, device=torch.device("cpu")) as loader:
        found = []
        for _ in tasks:
            with suppress(Error):  # the training will raise it for this sample
                found.append(hash_content(next(loader).batch))
                continue
            found.append("")
    return found


def _choose(spec: DataSpec) -> list[int]:
    return sorted({0, len(spec) // 2, len(spec) - 1})
