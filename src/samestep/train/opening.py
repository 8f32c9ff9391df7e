"""Opens a loop: everything between the check of its arguments and its first step.

`_begin_healing` says what happens to it if a rank dies (docs/dev/healing.md).
"""

import time
from collections.abc import Sequence
from functools import partial

from samestep.console import describe_ranks, format_ranks
from samestep.data.source import keep_shards
from samestep.errors import InvalidValue
from samestep.plan.sizes import describe_division
from samestep.snapshot.logs import Heal
from samestep.train.context import RunContext
from samestep.train.determinism import fix_compiler
from samestep.train.feed import Feed
from samestep.train.guards import Call, wait_for_call
from samestep.train.interception import Interceptor, LoopParts
from samestep.train.loop import Loop
from samestep.train.loop_data import LoopData
from samestep.train.prepared import Prepared, measure_sizes
from samestep.train.run_state import LoopKind
from samestep.train.start import record_start
from samestep.train.step import Observers, StepObserver, list_borrowed
from samestep.train.stopping import Services
from samestep.world.environment import advise
from samestep.world.membership import Change

TRACKED_STEPS = 1000  # whose rows may not have reached the trackers when rank 0 dies


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
    wait_for_call(context.group, Call.LOOP)
    lengths = {"the number of steps": data.planned, "the length of the data set": data.plan.length}
    context.group.agree(data.numbers | lengths)
    info = None
    if state.is_before_loops:
        info = record_start(data, context, prepared)
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
    feed = Feed(context, data, borrow, has_steps=not state.loop.is_past and not is_ending)
    loop = Loop(context, prepared, services, feed, observers)
    services.watch(loop.conclude)
    _begin_healing(context, feed, services, interceptors)
    if not state.loop.is_past:
        prepared.misuse.begin_loop()
        if not state.loop.is_further:
            _announce(data, context, prepared, is_ending=is_ending)
        services.metrics.start(data.num_epochs)
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
    observers: list[StepObserver] = [prepared.parameters, services.metrics, services.stopping, prepared.misuse]
    return Observers([*observers, *prepared.interceptors], prepared.interceptors)


def _announce(data: LoopData, context: RunContext, prepared: Prepared, *, is_ending: bool) -> None:
    """Print how the ranks divide the steps of the first loop, and where it resumes. `is_ending`: it has no step."""
    config = context.config
    steps_done = context.state.steps_done
    last_step = context.state.loop.last_step
    division = describe_division(config.batch_size // config.micro_batch_size, context.world_size)
    if prepared.point.meta is None:
        context.say(division)
        return
    before = prepared.point.meta["world_size"]
    ranks = "" if before == context.world_size else f" (was {format_ranks(before)})"
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


def _begin_healing(context: RunContext, feed: Feed, services: Services, interceptors: Sequence[Interceptor]) -> None:
    """If the launcher was started with --heal, let the other ranks continue after the death of one, if they can."""
    environment = context.environment
    if not environment.heals or environment.world_size == 1:
        return
    if problem := _find_problem(context, interceptors):
        context.group.refuse_healing()
        then = "all start again from the newest snapshot, as often as --max-restarts permits"
        context.say(f"--heal does not support {problem}: if a rank dies, {then}")
    else:
        context.group.begin_healing(environment, partial(_continue_without, context, feed, services))


def _continue_without(context: RunContext, feed: Feed, services: Services, change: Change) -> None:
    """Continue without ranks that have died, in the new group."""
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
    numbers = f"{describe_ranks(change.left)} -> {describe_ranks(range(len(change.left)))}"
    lost = f"lost {describe_ranks(change.lost)} in step {steps_done}"
    context.say(f"{lost}, and continued after {seconds:.2f} s: {numbers}")


def _find_problem(context: RunContext, interceptors: Sequence[Interceptor]) -> str:
    """Return what prevents that the other ranks continue after the death of one; "" if nothing does."""
    config = context.config
    if config.shard is not None:
        return f'shard="{config.shard}" (a rank\'s part of the state dies with it)'
    if context.location.is_replicated:
        return "a run directory that the nodes do not share"
    return next((each.called for each in interceptors if not each.permits_healing), "")
