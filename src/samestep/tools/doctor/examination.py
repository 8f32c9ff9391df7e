"""Runs all checks on every rank. Rank 0 collects the facts, derives findings and prints the report."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from samestep.tools.doctor.collectives import judge_collectives, judge_links, look_at_collectives
from samestep.tools.doctor.data_loading import judge_data_loading, look_at_data_loading
from samestep.tools.doctor.disk import judge_disk, look_at_disk
from samestep.tools.doctor.facts import FAIL, Context, DoctorCheck, DoctorOptions, Finding, Participants, judge_answers
from samestep.tools.doctor.findings_report import FindingsReport
from samestep.tools.doctor.gpus import judge_gpus, look_at_gpus
from samestep.tools.doctor.host_resources import judge_memory, judge_versions, look_at_memory, look_at_versions
from samestep.tools.doctor.network import judge_network, look_at_network
from samestep.world.environment import Environment, read_host
from samestep.world.host import read_host_id
from samestep.world.rendezvous_store import StoreExchange

JOIN_S = 60.0  # for the other ranks to join
GRACE_S = 5.0  # for the other ranks to finish a check after rank 0
PARTING_S = 2.0
END_S = 600.0  # for rank 0 to finish the checks that it does alone
MAX_REASON = 300

GROUP_ADVICE = (
    "check that all ranks run and reach each other on all ports; with several interfaces, name one "
    "(GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=eth0); NCCL_DEBUG=INFO shows what NCCL does"
)

CHECKS = (
    DoctorCheck(look_at_versions, {"versions": judge_versions}),
    DoctorCheck(look_at_gpus, {"devices": judge_gpus}, limit_s=20.0),
    DoctorCheck(look_at_memory, {"memory": judge_memory}),
    DoctorCheck(look_at_network, {"network": judge_network}, limit_s=20.0),
    DoctorCheck(look_at_disk, {"run_dir": judge_disk}, limit_s=15.0),
    DoctorCheck(look_at_collectives, {"collectives": judge_collectives, "links": judge_links}, 45.0, GROUP_ADVICE),
)
LOADER = DoctorCheck(look_at_data_loading, {"loader": judge_data_loading}, limit_s=None)


def examine(environment: Environment, options: DoctorOptions, *, checks: Sequence[DoctorCheck] = CHECKS) -> int:
    """Run the checks as one of the ranks. Returns the exit code: 1 on rank 0 if a check has failed, else 0."""
    report = FindingsReport(as_json=options.json) if environment.rank == 0 else None
    problem = "cannot reach"
    try:
        exchange = StoreExchange(environment, JOIN_S)
        problem = "has lost"
        hellos = exchange.exchange("hello", [read_host(), f"{read_host()}/{read_host_id('net')}"], JOIN_S)
        if missing := sorted(set(range(environment.world_size)) - set(hellos)):
            names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            return _end_alone(report, f"{names} did not come within {JOIN_S:g} s")
        hosts, keys = zip(*(hellos[rank] for rank in sorted(hellos)), strict=True)
        nodes = list(dict.fromkeys(keys))
        context = Context(environment, options, exchange, Participants(hosts, [*map(nodes.index, keys)]))
        if report is not None:
            report.open(context.participants)
        have_hung = [_check(context, check, report) for check in (*checks, *([LOADER] if options.script else []))]
        code = 0 if report is None else report.close()
        _wait_for_rank_0(exchange)
    except (OSError, RuntimeError) as error:  # of the store; `look` returns those of a check
        return _end_alone(report, f"rank {environment.rank} {problem} the rendezvous store: {describe_error(error)}")
    if any(have_hung):
        sys.stdout.flush()
        os._exit(code)  # a thread that hangs in a collective would also block the end of the interpreter
    return code


def _end_alone(report: FindingsReport | None, what: str) -> int:
    """Report that the ranks cannot communicate."""
    if report is None:
        print(f"samestep doctor: {what}", file=sys.stderr)
        return 1
    report.begin("rendezvous")
    advice = "see the output of those ranks; the port of the endpoint must be open to all hosts"
    report.add(Finding(FAIL, what, advice, check="rendezvous"))
    return report.close()


def _check(context: Context, check: DoctorCheck, report: FindingsReport | None) -> bool:
    """Run one check. Returns whether it hung on this rank."""
    if report is not None:
        report.begin(check.name)
    context.doing = ""
    began_s = time.monotonic()
    answer = look(context, check) if check.limit_s is None else look_bounded(context, check, check.limit_s)
    hang = f"it hung{_format_activity(context)}, and was abandoned after {check.limit_s or 0:g} s"
    context.exchange.post(f"check/{check.name}", answer or {"error": hang})
    if report is not None:
        left_s = (check.limit_s or 0.0) + began_s - time.monotonic() if answer and "facts" in answer else 0.0
        answers = context.exchange.collect(f"check/{check.name}", max(left_s, 0.0) + GRACE_S)
        report.add(*judge_answers(check, context.participants, answers))
    return answer is None


def look(context: Context, check: DoctorCheck) -> dict[str, Any]:
    """Run a check on this rank. Returns {"facts": ...} or {"error": reason}."""
    try:
        return {"facts": check.look(context)}
    except Exception as error:
        return {"error": describe_error(error) + _format_activity(context)}


def look_bounded(context: Context, check: DoctorCheck, limit_s: float) -> dict[str, Any] | None:
    """`look` in a thread. Returns None if it hangs; the thread is abandoned."""
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(look(context, check)), daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else None


def _format_activity(context: Context) -> str:
    return f" in {context.doing}" if context.doing else ""


def describe_error(error: BaseException) -> str:
    """Format an error in one line, without the C++ stack that torch appends."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}"[:MAX_REASON] if lines else type(error).__name__


def _wait_for_rank_0(exchange: StoreExchange) -> None:
    """Wait for the report. Rank 0, whose process can hold the store, ends last."""
    with suppress(RuntimeError):
        if exchange.rank == 0:
            exchange.post("end", True)
            exchange.collect("bye", PARTING_S, range(1, exchange.world_size))
        else:
            exchange.collect("end", END_S, [0])
            exchange.post("bye", True)
