"""Continues a loop after the death of a rank (docs/dev/healing.md)."""

import time
from collections.abc import Sequence
from functools import partial

from samestep.console import describe_ranks
from samestep.snapshot.kept_logs import Heal
from samestep.train.context import RunContext
from samestep.train.loops.feed import Feed
from samestep.train.loops.services import Services
from samestep.train.state.run_state import RunState
from samestep.train.step.interception import Interceptor
from samestep.world.membership import Change

TRACKED_STEPS = 1000  # whose rows may not have reached the trackers when rank 0 dies


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
        group.refuse_healing(environment, reason)
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
    context.say(_describe(change, state.steps_done, seconds))


def _find_problem(context: RunContext, interceptors: Sequence[Interceptor]) -> str:
    """Return what prevents that the other ranks continue after the death of one; "" if nothing does."""
    config = context.config
    if config.shard is not None:
        return f'shard="{config.shard}" (a rank\'s part of the state dies with it)'
    if context.location.is_replicated:
        return "a run directory that the nodes do not share"
    return next((each.called for each in interceptors if not each.permits_healing), "")


def _describe(change: Change, step: int, seconds: float) -> str:
    be = "is" if len(change.lost) == 1 else "are"
    left = describe_ranks(change.left)
    others = f"{left} continues alone"
    if len(change.left) > 1:
        numbers = range(len(change.left))
        others = f"{left} continue" + (f" as {describe_ranks(numbers)}" if [*change.left] != [*numbers] else "")
    return f"{describe_ranks(change.lost)} {be} gone in step {step}: {others}, after {seconds:.2f} s"
