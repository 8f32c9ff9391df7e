"""Opens a loop: everything between the check of its arguments and its first step.

`begin_healing` says what happens to it if a rank dies (docs/dev/healing.md).
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch.optim.lr_scheduler import LRScheduler

from samestep.console import describe_ranks, format_ranks
from samestep.data.order_files import keep_shards
from samestep.errors import InvalidValue
from samestep.plan.sizes import describe_division
from samestep.snapshot.logs import Heal
from samestep.train import calls
from samestep.train.context import RunContext
from samestep.train.description import describe_run, describe_script, read_commit
from samestep.train.determinism import describe_machine, fix_compiler
from samestep.train.guards import ScheduleChecks
from samestep.train.inputs.loop_data import LoopData
from samestep.train.inputs.samples import add_samples
from samestep.train.interception import Interceptor, LoopParts
from samestep.train.loops.feed import Feed
from samestep.train.loops.loop import Loop
from samestep.train.loops.services import Services
from samestep.train.prepared import Prepared, measure_sizes
from samestep.train.run_state import LoopKind, RunState
from samestep.train.step import Observers, StepObserver, list_borrowed
from samestep.watch.trackers import TrackerInfo
from samestep.world.environment import advise
from samestep.world.membership import Change

TRACKED_STEPS = 1000  # whose rows may not have reached the trackers when rank 0 dies


def open_loop(
    data: LoopData,
    context: RunContext,
    state: RunState,
    prepared: Prepared,
    services: Services,
    interceptors: Sequence[Interceptor],
) -> Loop:
    """Open the script's next loop, on all ranks.

    Raises:
        Error: the loop is not the same on all ranks, or not the one that the run has recorded.
    """
    if data.lanes is not None and context.config.shard == "fsdp2" and context.world_size > 1:
        raise InvalidValue(
            'shard="fsdp2" does not support data that can only be read in order: use shard="optimizer"', code="SS608"
        )
    calls.wait_for_call(context.group, calls.LOOP)
    lengths = {"the number of steps": data.planned, "the length of the data set": data.plan.length}
    context.group.agree(data.numbers | lengths)
    if state.is_before_loops:
        services.metrics.set_description(record_start(data, context, prepared))
        fix_compiler()
    state.begin_loop(data, context.config.max_steps, context.location)
    directory = context.location.path
    if directory is not None and data.shards:
        problem = context.location.once(lambda: keep_shards(directory, data.shards_hash, data.shards))
        if problem:
            context.say(problem)
    resume_state(data, context, state, prepared)
    services.stopping.begin_loop()
    services.metrics.begin_loop(data.plan, prepared)
    observers = build_observers(data, context, state, prepared, services, interceptors)
    has_steps = not state.loop.is_past and not services.stopping.is_ending
    borrow = partial(list_borrowed, interceptors) if interceptors else None
    feed = Feed(context, data, state, borrow, has_steps=has_steps)
    loop = Loop(context, state, prepared, services, feed, observers)
    services.watch(loop.conclude)
    begin_healing(context, state, feed, services, interceptors)
    if not state.loop.is_past:
        prepared.misuse.begin_loop()
        announce_loop(loop, context, state, prepared, is_ending=services.stopping.is_ending)
        services.metrics.start(data.num_epochs)
    return loop


def record_start(data: LoopData, context: RunContext, prepared: Prepared) -> TrackerInfo:
    """Record this start in the run directory, which belongs to this process from here on. Return its description."""
    location = context.location
    machine = describe_machine(context.config, context.device)
    options = prepared.contents.options
    seed = context.config.seed
    options = add_samples(options, context.group, location.directory, data, seed, machine, prepared.overrides)
    if location.path is not None:
        git, script = context.group.once(lambda: (read_commit(), describe_script()))
        options = replace(options, git=git, script=script)
    plan = data.plan
    begin = {"first_step": plan.first_step, "first_epoch": plan.first_epoch} if plan.first_step else {}
    numbers = {**prepared.numbers, **data.numbers, **begin}
    options = replace(options, numbers=numbers, machine=machine, config=context.script_config)
    location.begin(prepared.point, options)
    return describe_run(context, machine, options)


def resume_state(data: LoopData, context: RunContext, state: RunState, prepared: Prepared) -> None:
    """Bring the stream to the loop's position, and objects that the script's lines before this loop have changed."""
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


def build_observers(
    data: LoopData,
    context: RunContext,
    state: RunState,
    prepared: Prepared,
    services: Services,
    interceptors: Sequence[Interceptor],
) -> Observers:
    """Return what listens to the loop's steps, in the order of notification, and what intercepts them."""
    parts = LoopParts(
        data,
        prepared.gradients,
        services.watchdog,
        context.location.path,
        lambda position: prepared.contents.build(position | state.list_ends(), state.script, prepared.collect_states()),
        lambda: measure_sizes(prepared.objects, prepared.shard_blocks),
    )
    for interceptor in interceptors:
        interceptor.begin_loop(parts)
    observers: list[StepObserver] = [
        prepared.parameters,
        services.metrics,
        services.stopping,
        prepared.misuse,
    ]
    by_name = prepared.objects.by_name
    if schedules := {name: thing for name, thing in by_name.items() if isinstance(thing, LRScheduler)}:
        observers.append(ScheduleChecks(schedules))
    return Observers([*observers, *interceptors], interceptors)


def announce_loop(loop: Loop, context: RunContext, state: RunState, prepared: Prepared, *, is_ending: bool) -> None:
    """Print how the ranks divide the steps of the first loop, and where it resumes. `is_ending`: it has no step."""
    if state.loop.is_further:
        return
    config = context.config
    meta = prepared.point.meta
    division = describe_division(config.batch_size // config.micro_batch_size, context.world_size)
    if meta is None:
        context.say(division)
        return
    before = meta["world_size"]
    ranks = "" if before == context.world_size else f" (was {format_ranks(before)})"
    context.say(f"{division}; resumed at step {state.steps_done}{ranks}")
    if is_ending:
        why, longer = loop.explain_end()
        context.say(
            f"nothing left to do in this loop: {why}, and the script continues after it; to train it longer, "
            f"{longer}, or begin anew with {advise(fresh=True)}"
        )


def begin_healing(
    context: RunContext,
    state: RunState,
    feed: Feed,
    services: Services,
    interceptors: Sequence[Interceptor],
) -> None:
    """If the launcher was started with --heal, let the other ranks continue after the death of one, if they can."""
    environment = context.environment
    if not environment.heals or environment.world_size == 1:
        return
    group = context.group
    if problem := _find_problem(context, interceptors):
        reason = f"--heal does not support {problem}"
        group.refuse_healing()
        then = "all start again from the newest snapshot, as often as --max-restarts permits"
        context.say(f"{reason}: if a rank dies, {then}")
        return
    group.begin_healing(environment, partial(continue_without, context, state, feed, services))


def continue_without(context: RunContext, state: RunState, feed: Feed, services: Services, change: Change) -> None:
    """Continue without ranks that have died, in the new group."""
    feed.divide_again()
    if context.rank == 0 and change.has_lost_first:
        kept = context.location.kept
        rows = [] if kept is None else kept.get_rows(state.steps_done - TRACKED_STEPS)
        context.location.take_over(state.steps_done, is_in_loop=state.is_in_loop)
        services.snapshotter.take_over()
        services.metrics.take_over(rows)
    services.watchdog.change_group()
    seconds = time.monotonic() - change.began_s
    context.location.write_heal(Heal(state.steps_done, change.lost, len(change.left), seconds))
    numbers = f"{describe_ranks(change.left)} -> {describe_ranks(range(len(change.left)))}"
    lost = f"lost {describe_ranks(change.lost)} in step {state.steps_done}"
    context.say(f"{lost}, and continued after {seconds:.2f} s: {numbers}")


def _find_problem(context: RunContext, interceptors: Sequence[Interceptor]) -> str:
    """Return what prevents that the other ranks continue after the death of one; "" if nothing does."""
    config = context.config
    if config.shard is not None:
        return f'shard="{config.shard}" (a rank\'s part of the state dies with it)'
    if context.location.is_replicated:
        return "a run directory that the nodes do not share"
    return next((each.called for each in interceptors if not each.permits_healing), "")
