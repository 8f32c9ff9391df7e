"""Runs all checks on every rank. Rank 0 collects the facts, derives findings and prints the report."""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from samestep.tools.doctor.collectives import judge_collectives, look_at_collectives
from samestep.tools.doctor.context import Context, Participants
from samestep.tools.doctor.data_loading import judge_data_loading, look_at_data_loading
from samestep.tools.doctor.disk import judge_disk, look_at_disk
from samestep.tools.doctor.doctor_options import Options
from samestep.tools.doctor.findings import FAIL, Check, Finding, judge_answers
from samestep.tools.doctor.gpus import judge_gpus, look_at_gpus
from samestep.tools.doctor.host_resources import (
    judge_cores,
    judge_limits,
    judge_versions,
    look_at_cores,
    look_at_limits,
    look_at_versions,
)
from samestep.tools.doctor.network import judge_network, look_at_network
from samestep.tools.doctor.report import Report
from samestep.world.environment import Environment, read_host
from samestep.world.host import read_host_id
from samestep.world.store_exchange import StoreExchange

MEET_S = 60.0  # for the other ranks to join
GRACE_S = 5.0  # for the other ranks to finish a check after rank 0
PARTING_S = 2.0
END_S = 600.0  # for rank 0 to finish the checks that it does alone
MAX_REASON = 300

GROUP_ADVICE = (
    "check that all ranks run and reach each other on all ports; with several interfaces, name one "
    "(GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=eth0); NCCL_DEBUG=INFO shows what NCCL does"
)

CHECKS = (
    Check("versions", look_at_versions, judge_versions),
    Check("devices", look_at_gpus, judge_gpus, limit_s=20.0),
    Check("cores", look_at_cores, judge_cores),
    Check("limits", look_at_limits, judge_limits),
    Check("network", look_at_network, judge_network, limit_s=20.0),
    Check("run_dir", look_at_disk, judge_disk, limit_s=15.0),
    Check("collectives", look_at_collectives, judge_collectives, limit_s=45.0, advice=GROUP_ADVICE, in_thread=False),
)
FEEDING = Check("loader", look_at_data_loading, judge_data_loading, limit_s=90.0, in_thread=False)


def examine(
    environment: Environment,
    options: Options,
    *,
    checks: Sequence[Check] | None = None,
    clock: Callable[[], float] = time.time,
) -> int:
    """Run the checks as one of the ranks. Returns the exit code: 1 on rank 0 if a check has failed, else 0.

    Args:
        environment: this rank's environment.
        options: the options of the command.
        checks: replaces the list of all checks.
        clock: the clock of this host.
    """
    if checks is None:
        checks = (*CHECKS, FEEDING) if options.script else CHECKS
    report = Report(as_json=options.json) if environment.rank == 0 else None
    exchange = None
    try:
        exchange = StoreExchange(environment, MEET_S)
        return _examine(environment, options, checks, clock, exchange, report)
    except (OSError, RuntimeError) as error:  # from the store; those of a check are caught there
        what = "cannot reach" if exchange is None else "has lost"
        return _end_alone(report, f"rank {environment.rank} {what} the rendezvous store: {describe_error(error)}")


def _examine(
    environment: Environment,
    options: Options,
    checks: Sequence[Check],
    clock: Callable[[], float],
    exchange: StoreExchange,
    report: Report | None,
) -> int:
    hellos = exchange.exchange("hello", [read_host(), f"{read_host()}/{read_host_id('net')}"], MEET_S)
    missing = sorted(set(range(environment.world_size)) - set(hellos))
    if missing:
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return _end_alone(report, f"{names} did not come within {MEET_S:g} s")
    hosts, keys = zip(*(hellos[rank] for rank in sorted(hellos)), strict=True)
    nodes = list(dict.fromkeys(keys))
    participants = Participants(hosts, [nodes.index(key) for key in keys])
    context = Context(environment, options, exchange, participants, clock)
    if report is not None:
        report.open(participants)
    for number, check in enumerate(checks):
        _check_one(context, check, f"check/{number}", report)
    code = 0 if report is None else report.close()
    _part(exchange)
    return code


def _end_alone(report: Report | None, what: str) -> int:
    """Report that the ranks cannot communicate."""
    if report is None:
        print(f"samestep doctor: {what}", file=sys.stderr)
        return 1
    report.begin("rendezvous")
    advice = "see the output of those ranks; the port of the endpoint must be open to all hosts"
    report.add(Finding("rendezvous", FAIL, what, advice))
    return report.close()


def _check_one(context: Context, check: Check, name: str, report: Report | None) -> None:
    if report is not None:
        report.begin(check.name)
    context.doing, began_s = "", time.monotonic()
    watchdog = threading.Timer(check.limit_s, _give_up, (context, check, name, report))
    watchdog.daemon = True
    if check.in_thread:
        answer = look_bounded(context, check)
    else:
        watchdog.start()
        answer = look(context, check)
        watchdog.cancel()
    context.exchange.post(name, answer)
    if report is not None:
        left_s = began_s + check.limit_s - time.monotonic() if "facts" in answer else GRACE_S
        answers = context.exchange.collect(name, left_s + GRACE_S)
        report.add(*judge_answers(check, context.participants, answers))


def look(context: Context, check: Check) -> dict[str, Any]:
    """Run a check on this rank. Returns {"facts": ...} or {"error": reason}."""
    try:
        return {"facts": check.look(context)}
    except Exception as error:
        at = f" in {context.doing}" if context.doing else ""
        return {"error": describe_error(error) + at}


def look_bounded(context: Context, check: Check) -> dict[str, Any]:
    """`look` in a thread, with a time limit. A thread that hangs is abandoned."""
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(look(context, check)), daemon=True)
    thread.start()
    thread.join(check.limit_s)
    if answers:
        return answers[0]
    at = f" in {context.doing}" if context.doing else ""
    return {"error": f"it hung{at}, and was abandoned after {check.limit_s:g} s"}


def describe_error(error: BaseException) -> str:
    """Format an error in one line, without the C++ stack that torch appends."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}"[:MAX_REASON] if lines else type(error).__name__


def _give_up(context: Context, check: Check, name: str, report: Report | None) -> None:
    """End this process, after rank 0's report: the main thread hangs."""
    with suppress(RuntimeError):
        context.exchange.post(f"{name}/hanging", context.doing or "it")
        if report is None:
            context.exchange.collect("end", GRACE_S, [0])
    if report is not None:
        hanging: dict[int, str] = {}
        with suppress(RuntimeError):
            hanging = context.exchange.collect(f"{name}/hanging", PARTING_S)
        places: dict[str, list[int]] = {}
        for rank, place in hanging.items():
            places.setdefault(place, []).append(rank)
        silent = set(range(context.environment.world_size)) - set(hanging)
        parts = [f"{context.participants.name_ranks(ranks)} in {place}" for place, ranks in places.items()]
        parts += [f"{context.participants.name_ranks(silent)} without an answer"] if silent else []
        found = f"could not be checked: after {check.limit_s:g} s still hanging: {', and '.join(parts)}"
        report.add(Finding(check.name, FAIL, found, check.advice))
        report.close()
        with suppress(RuntimeError):
            context.exchange.post("end", True)
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(1)


def _part(exchange: StoreExchange) -> None:
    """Wait so that rank 0, whose process can hold the store, ends last."""
    with suppress(RuntimeError):
        if exchange.rank == 0:
            exchange.post("end", True)
            exchange.collect("bye", PARTING_S, range(1, exchange.world_size))
        else:
            exchange.collect("end", END_S, [0])
            exchange.post("bye", True)
