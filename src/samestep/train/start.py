"""Records a start of a run: its script, its machine and its data, after comparing them with those of the run."""

import platform
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.data.lanes import Lanes
from samestep.data.loader import Loader
from samestep.data.spec import DataSpec, has_lanes
from samestep.errors import Error, InvalidValue, RunDirectoryError
from samestep.files import read_bytes
from samestep.hashing import hash_bytes, hash_content
from samestep.plan.loop_plan import Task
from samestep.plan.seeds import derive
from samestep.processes import run_captured
from samestep.train.context import RunContext
from samestep.train.determinism import describe_machine, keeping_generators
from samestep.train.loop_data import LoopData
from samestep.train.prepared import Prepared
from samestep.version import __version__
from samestep.watch.trackers import TrackerInfo
from samestep.world.environment import advise
from samestep.world.group import Group

GIT_TIMEOUT_S = 5.0
NUM_COMPARED = 8  # micro-batches of two lanes, as long as they are the same


def record_start(data: LoopData, context: RunContext, prepared: Prepared) -> TrackerInfo:
    """Record this start in the run directory, which belongs to this process from here on. Return its description.

    Raises:
        InvalidValue: the ranks have different data sets, or the lanes of a stream are the same.
        RunDirectoryError: the data are not the run's.
    """
    location = context.location
    path = location.path
    machine = describe_machine(context.config, context.device)
    samples = _compare_samples(data, context, machine, overrides=prepared.overrides)
    git: dict[str, Any] = {}
    script: dict[str, Any] = {}
    if path is not None:
        git, script = context.group.once(lambda: (read_commit(), describe_script()))
    plan = data.plan
    begin = {"first_step": plan.first_step, "first_epoch": plan.first_epoch} if plan.first_step else {}
    options = replace(
        prepared.contents.options,
        samples=samples,
        git=git,
        script=script,
        numbers={**prepared.numbers, **data.numbers, **begin},
        machine=machine,
        config=context.script_config,
    )
    location.begin(prepared.point, options)
    versions = {"samestep": __version__, "python": platform.python_version(), "torch": machine["torch"]}
    return TrackerInfo(
        "" if path is None else path.name,
        path,
        context.script_config,
        0,
        options=context.config.identity(),
        environment=versions | {"device": machine["device"], "world_size": context.world_size},
        git_commit=git.get("commit", ""),
        git_is_dirty=git.get("is_dirty", False),
        data=tuple(samples),
    )


def read_commit() -> dict[str, Any]:
    """Return the git commit of the script's work tree, and whether tracked files differ from it.

    Returns:
        {"commit": "3f2a...", "is_dirty": False}; {} outside of a work tree, without git, or if git fails.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    directory = Path(script).absolute().parent if script else Path.cwd()
    if not any((parent / ".git").exists() for parent in (directory, *directory.parents)):
        return {}
    # No locks and no monitor: this must not write to the work tree or start programs that it names.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(directory), "status"]
    command += ["--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty"]
    try:
        done = run_captured(command, limit_s=GIT_TIMEOUT_S)
    except OSError:
        return {}
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if not commits or commits[0] == "(initial)":
        return {}
    return {"commit": commits[0], "is_dirty": any(not line.startswith("#") for line in lines)}


def describe_script() -> dict[str, Any]:
    """Return the file of the script, the start of its sha256, and its arguments; {} in a notebook.

    Returns:
        {"file": "train.py", "sha256": "9f86d081884c7d65", "arguments": ["--lr", "0.1"]}
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    with suppress(OSError):
        if file is not None:
            content = read_bytes(Path(file), is_given=True)
            sha256 = hash_bytes(content)[:16]
            return {"file": Path(file).name, "sha256": sha256, "arguments": sys.argv[1:]}
    return {}


def _compare_samples(
    data: LoopData, context: RunContext, machine: Mapping[str, Any], *, overrides: bool
) -> Sequence[str]:
    """Return the hashes of a few samples, after comparing them with those of all ranks and of the run.

    Args:
        overrides: whether to accept other data than the run's.
    """
    directory = context.location.directory
    group = context.group
    seed = context.config.seed
    lanes = data.lanes
    hashes: list[str] = []
    if lanes is None and (group.world_size > 1 or directory is not None):
        hashes = read_samples(data.spec, seed)
        _compare_ranks(hashes, data.spec, group, machine)

    def check() -> list[str]:
        if lanes is not None:  # samples of a stream are compared when they are read again
            _check_lanes(data.spec, lanes, seed)
        if directory is None:
            return []
        directory.check_numbers(data.numbers)  # gives a better error than a sample
        return compare_run(hashes, data.spec, directory.record, machine, overrides=overrides)

    samples = group.once(check)
    if lanes is not None:
        lanes.close()  # they were read with other seeds
    return samples


def _compare_ranks(hashes: list[str], spec: DataSpec, group: Group, machine: Mapping[str, Any]) -> None:
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


def _check_lanes(spec: DataSpec, lanes: Lanes, seed: int) -> None:
    """Raise InvalidValue if the first two lanes of a stream begin alike: it does not divide its data. On one rank.

    They are read with the same seeds, so that noise that is added to samples does not hide it.
    """
    if lanes.num_lanes == 1 or has_lanes(lanes.dataset):
        return
    seeds = [derive(seed, "data", step=step, pass_=1) for step in range(NUM_COMPARED)]
    places = [(step, lane) for step in range(NUM_COMPARED) for lane in (0, 1)]
    tasks = [Task(lanes.indices(lane, step), seeds[step], (step, lane)) for step, lane in places]
    with closing(_read_hashes(spec, tasks)) as hashes:
        if all(first and first == second for first, second in zip(hashes, hashes, strict=True)):  # two at a time
            raise InvalidValue(
                f"several of the {lanes.num_lanes} lanes of {type(lanes.dataset).__name__} begin with the same "
                "samples: let __iter__ divide the data by torch.utils.data.get_worker_info(), or give it a method "
                "lane(lane, num_lanes)",
                code="SS313",
            )


def read_samples(spec: DataSpec, seed: int) -> list[str]:
    """Return the hashes of a few samples, each read twice and collated alone, as in training.

    A hash is "" for a sample that cannot be read, contains no numbers, or differs when it is read again.
    """
    indices = [index for index in _choose(spec) for _ in range(2)]
    tasks = [Task(np.array([index]), derive(seed, "data", step=index, pass_=1)) for index in indices]
    hashes = [*_read_hashes(spec, tasks)]
    return [one if one == again else "" for one, again in zip(hashes[::2], hashes[1::2], strict=True)]


def _read_hashes(spec: DataSpec, tasks: Sequence[Task]) -> Generator[str, None, None]:
    """Yield the hash of each task's batch; "" for one that cannot be read, which the training will report.

    If the run has workers, this starts one: a data set may open its files at the first read, and the training's
    workers, which are forked later, would share a file opened in this process.
    """
    alone = replace(spec, num_workers=min(spec.num_workers, 1))
    with keeping_generators(), Loader(alone, tasks, device=torch.device("cpu")) as loader:
        for _ in tasks:
            found = ""
            with suppress(Error):
                found = hash_content(next(loader).batch)
            yield found


def _choose(spec: DataSpec) -> list[int]:
    return sorted({0, len(spec) // 2, len(spec) - 1})
