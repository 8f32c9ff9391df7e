"""Opens a loop: everything between the check of its arguments and its first step.

The first loop of a start records its script, its machine and its data, after comparing them with those of the run.
`_begin_healing` says what happens to a loop if a rank dies (docs/dev/healing.md).
"""

import platform
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from samestep.console import describe_ranks, format_count
from samestep.data.lanes import Lanes
from samestep.data.loader import Loader
from samestep.data.source import keep_shards
from samestep.data.spec import DataSpec, has_lanes
from samestep.errors import Error, InvalidValue, LeftOver, RunDirectoryError
from samestep.hashing import hash_content
from samestep.launch.rank_reports import build_failure, report
from samestep.plan.loop_plan import Task
from samestep.plan.order import derive
from samestep.plan.tree import describe_division
from samestep.processes import leave_now, run_captured
from samestep.snapshot.logs import Heal
from samestep.train.context import LoopKind, RunContext
from samestep.train.determinism import describe_machine, fix_compiler, keeping_generators
from samestep.train.divided_state import DividedOptimizers
from samestep.train.feed import Feed
from samestep.train.guards import Call, wait_for_call
from samestep.train.interception import LoopParts, measure_sizes
from samestep.train.loop import Loop
from samestep.train.loop_data import LoopData
from samestep.train.lost_copies import LostCopies
from samestep.train.prepared import Prepared
from samestep.train.step import Observers, StepObserver, list_borrowed
from samestep.train.stopping import Services
from samestep.train.workers import CompleteSnapshots
from samestep.version import __version__
from samestep.watch.trackers import TrackerInfo
from samestep.world.environment import advise
from samestep.world.group import Group, describe_script
from samestep.world.membership import Change

TRACKED_STEPS = 1000  # whose rows may not have reached the trackers when rank 0 dies
GIT_TIMEOUT_S = 5.0
NUM_COMPARED = 8  # micro-batches of two lanes, as long as they are the same


def open_loop(data: LoopData, context: RunContext, prepared: Prepared, services: Services) -> Loop:
    """Open the script's next loop, on all ranks.

    Raises:
        Error: the loop is not the same on all ranks, or not the one that the run has recorded.
    """
    state = context.state
    if data.lanes is not None and context.config.shard == "fsdp2" and context.world_size > 1:
        raise InvalidValue(
            'shard="fsdp2" does not support data that can only be read in order: use shard="optimizer"', code="SS608"
        )
    if context.config.workers is not None and data.plan.has_short_step:
        raise InvalidValue(
            f"the last step of an epoch is shorter than the {context.config.batch_size} samples that the workers need: "
            "pass drop_last=True, or use run.steps",
            code="SS615",
        )
    wait_for_call(context.group, Call.LOOP)
    context.group.agree(
        {**data.numbers, "the number of steps": data.planned, "the length of the data set": data.plan.length}
    )
    info = None
    if state.is_before_loops:
        info = _record_start(data, context, prepared)
        fix_compiler()
    state.begin_loop(data, context.config.max_steps, context.location)
    directory = context.location.path
    if directory is not None and data.shards:
        problem = context.location.once(lambda: keep_shards(directory, data.shards_hash, data.shards))
        if problem:
            context.say(problem)
    _resume_state(data, context, prepared)
    services.stopping.begin_loop()
    services.metrics.begin_loop(data.plan, prepared, info)
    observers = _build_observers(data, context, prepared, services)
    is_ending = services.stopping.is_ending
    interceptors = prepared.interceptors
    borrow = partial(list_borrowed, interceptors) if interceptors else None
    feed = Feed(context, data, borrow, has_steps=not is_ending)
    loop = Loop(context, prepared, services, feed, observers)
    services.watch(loop.conclude)
    _begin_healing(context, feed, services, prepared)
    if not state.loop.is_past:
        prepared.misuse.begin_loop()
        if state.loop.kind is not LoopKind.FURTHER:
            _announce(data, context, prepared, is_ending=is_ending)
        services.metrics.start()
    return loop


def _resume_state(data: LoopData, context: RunContext, prepared: Prepared) -> None:
    """Bring the stream to the loop's position, and objects that the script's lines before this loop have changed."""
    state = context.state
    if data.lanes is not None:
        state.resume_lanes(data.lanes, data.plan)
    if state.loop.kind is not LoopKind.RESUMED:
        return
    if state.loop.number:  # the script's lines before this loop ran again, after the state was restored
        state.set_script(prepared.restore_again(context))
    elif name := prepared.replicas.find_change():
        prepared.restore_again(context)
        context.say(
            f"the script has changed {name} since run.prepare: the state of step {state.steps_done} is restored again"
        )


def _build_observers(data: LoopData, context: RunContext, prepared: Prepared, services: Services) -> Observers:
    """Return what listens to the loop's steps, in the order of notification, and what intercepts them."""
    state = context.state
    parts = LoopParts(
        data,
        prepared.gradients,
        services.watchdog,
        lambda position: prepared.contents.build(position | state.list_ends(), state.script, prepared.collect_states()),
        lambda: measure_sizes(prepared.objects, prepared.shard_blocks),
    )
    for interceptor in prepared.interceptors:
        interceptor.begin_loop(parts)
    divided = prepared.divided
    first: list[StepObserver] = []
    if prepared.gradients.workers is not None:
        first.append(CompleteSnapshots(services.snapshotter))
    if (
        isinstance(divided, DividedOptimizers)
        and context.config.shard == "optimizer"
        and context.config.shard_copies > 1
    ):
        first.append(LostCopies(divided, prepared.parameters, services.metrics))
    return Observers(
        [*first, prepared.parameters, services.metrics, services.stopping, prepared.misuse, *prepared.interceptors],
        prepared.interceptors,
    )


def _announce(data: LoopData, context: RunContext, prepared: Prepared, *, is_ending: bool) -> None:
    """Print how the ranks divide the steps of the first loop, and where it resumes. `is_ending`: it has no step."""
    config = context.config
    steps_done = context.state.steps_done
    last_step = context.state.loop.last_step
    num_ranks = context.group.ranks_per_replica
    division = describe_division(config.batch_size // config.micro_batch_size, context.group.num_replicas, num_ranks)
    if config.workers is not None:
        division = f"{format_count(config.workers, 'worker')} on {format_count(context.world_size, 'rank')}"
    if prepared.point.meta is None:
        context.say(division)
        return
    before = prepared.point.meta["world_size"]
    ranks = "" if before == context.world_size else f" (was {format_count(before, 'rank')})"
    context.say(f"{division}; resumed at step {steps_done}{ranks}")
    if not is_ending:
        return
    if steps_done < last_step:
        why = f"run.stop() has ended it after step {steps_done}"
        longer = f"start with {advise(resume=steps_done)}"
    else:
        why = f"{steps_done} of {last_step} steps are done"
        limit = "more steps" if data.plan.is_endless else "more epochs"
        longer = f"ask for {'a larger max_steps' if last_step == config.max_steps else limit}"
    context.say(
        f"nothing left to do in this loop: {why}, and the script continues after it; to train it longer, {longer}, or "
        f"begin anew with {advise(fresh=True)}"
    )


def _begin_healing(context: RunContext, feed: Feed, services: Services, prepared: Prepared) -> None:
    """If the launcher was started with --heal, let the other ranks continue after the death of one, if they can."""
    environment = context.environment
    if not environment.heals or environment.world_size == 1:
        return
    shard = context.config.shard
    has_pipelines = context.group.ranks_per_replica > 1
    advice = "; shard_copies=2 would let the others continue" if shard == "optimizer" and not has_pipelines else ""
    problems = {
        "one pipeline on all ranks (a rank's stages die with it)": has_pipelines and context.group.num_replicas == 1,
        f'shard="{shard}" (a rank\'s part of the state dies with it{advice})': (
            shard is not None and context.config.shard_copies == 1
        ),
        "workers (their optimizer's state dies with a rank)": context.config.workers is not None,
        "a run directory that the nodes do not share": context.location.is_replicated,
        **{each.called: True for each in prepared.interceptors if not each.permits_healing},
    }
    if problem := next((each for each, is_there in problems.items() if is_there), ""):
        context.group.refuse_healing()
        context.say(
            f"--heal does not support {problem}: if a rank dies, all start again from the newest snapshot, as often as "
            "--max-restarts permits"
        )
    else:
        continue_without = partial(_continue_without, context, feed, services, prepared)
        context.group.begin_healing(environment, continue_without, partial(_end_left_over, environment.rank))


def _end_left_over(rank: int, error: LeftOver) -> NoReturn:
    """End this process, since the others continue without it. The script has no part in this."""
    report(build_failure(rank, error, 1))
    leave_now(1)


def _continue_without(context: RunContext, feed: Feed, services: Services, prepared: Prepared, change: Change) -> None:
    """Continue without ranks that have died, in the new group."""
    if (ownership := prepared.gradients.ownership) is not None:
        ownership.check()
    location = context.location
    steps_done = context.state.steps_done
    feed.divide_again()
    if context.rank == 0 and change.has_lost_first:
        kept = location.kept
        rows = [] if kept is None else kept.get_rows(steps_done - TRACKED_STEPS)
        location.take_over(steps_done, is_in_loop=context.state.is_in_loop)
        services.snapshotter.take_over()
        services.metrics.take_over(rows)
    services.watchdog.change_group()
    seconds = time.monotonic() - change.began_s
    location.write_heal(Heal(steps_done, change.lost, len(change.left), seconds))
    context.say(
        f"lost {describe_ranks(change.lost)} in step {steps_done}, and continued after {seconds:.2f} s: "
        f"{describe_ranks(change.left)} -> {describe_ranks(range(len(change.left)))}"
    )


def _record_start(data: LoopData, context: RunContext, prepared: Prepared) -> TrackerInfo:
    """Record this start in the run directory, which belongs to this process from here on. Return its description.

    Raises:
        InvalidValue: the ranks have different data sets, or the lanes of a stream are the same.
        RunDirectoryError: the data are not the run's.
    """
    path = context.location.path
    machine = describe_machine(context.config, context.device)
    samples = _compare_samples(data, context, machine, overrides=prepared.overrides)
    git, script = ({}, {}) if path is None else context.group.once(lambda: (read_commit(), describe_script()))
    context.location.begin(
        prepared.point,
        replace(
            prepared.contents.options,
            samples=samples,
            git=git,
            script=script,
            numbers={**prepared.numbers, **data.numbers},
            machine=machine,
            config=context.script_config,
        ),
    )
    return TrackerInfo(
        "" if path is None else path.name,
        path,
        context.script_config,
        0,
        options=context.config.identity(),
        environment={
            "samestep": __version__,
            "python": platform.python_version(),
            "torch": machine["torch"],
            "device": machine["device"],
            "world_size": context.world_size,
        },
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
    pairs = zip(_choose(spec), some, others, strict=False)
    return next((index for index, one, other in pairs if one and other and one != other), None)


def _check_lanes(spec: DataSpec, lanes: Lanes, seed: int) -> None:
    """Raise InvalidValue if the first two lanes of a stream begin alike: it does not divide its data. On one rank.

    They are read with the same seeds, so that noise that is added to samples does not hide it.
    """
    if lanes.num_lanes == 1 or has_lanes(lanes.dataset):
        return
    tasks = [
        Task(lanes.indices(lane, step), derive(seed, "data", step=step, pass_=1), (step, lane))
        for step in range(NUM_COMPARED)
        for lane in (0, 1)
    ]
    with closing(_read_hashes(spec, tasks)) as hashes:
        for first in hashes:
            second = next(hashes)
            if not first or first != second:
                return
    raise InvalidValue(
        f"several of the {lanes.num_lanes} lanes of {type(lanes.dataset).__name__} begin with the same samples: let "
        "__iter__ divide the data by torch.utils.data.get_worker_info(), or give it a method lane(lane, num_lanes)",
        code="SS313",
    )


def read_samples(spec: DataSpec, seed: int) -> list[str]:
    """Return the hashes of a few samples, each read twice and collated alone, as in training.

    A hash is "" for a sample that cannot be read, contains no numbers, or differs when it is read again.
    """
    tasks = [
        Task(np.array([index]), derive(seed, "data", step=index, pass_=1)) for index in _choose(spec) for _ in range(2)
    ]
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
