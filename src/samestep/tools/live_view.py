"""`samestep watch`: shows the live state of every rank of a running job."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
from msgspec.structs import asdict

from samestep.cli import PATH, Command, json_option, print_json
from samestep.console import escape, format_count, format_time, print_table
from samestep.snapshot.run_record import read_run
from samestep.watch.beats import Beat
from samestep.watch.records import (
    HEALS,
    RECORD,
    STALE_S,
    STATUS,
    RankStates,
    has_ended,
    read_or_empty,
    read_ranks,
    read_rows,
    read_status,
)

POLL_S = 1.0
CLEAR = "\x1b[H\x1b[J"  # of a terminal
OLD_S = 0.5  # age of a heartbeat that is shown
HEADER = ("rank", "host", "step", "phase", "in it for", "compute", "samples/s", "where")

DESCRIPTION = f"""\
Shows the live state of every rank of a running job, until the run ends; if the output is not a terminal, prints it
once. Ctrl-C ends it. RUN is the run's directory; for a run at a URL, its working copy on the machine of rank 0. The
table has one row per rank:

  rank, host    the rank and its machine
  step          completed steps, over all restarts
  phase         starting, loading (data), forward, backward, reducing (summing gradients over the ranks, including the
                wait for them), updating, saving, validating, script (code between two steps), left or ended
  in it for     time in this phase or micro-batch, in seconds; in minutes if 10 minutes or longer
  compute       milliseconds of forward and backward per micro-batch, without waits for data or other ranks
  samples/s     samples per second of this rank, over all phases
  where         after {POLL_S:g} s in one phase: the collective in which the rank waits, or the line of the script;
                1.4 s ago: the row is from a heartbeat of that age, so that the rank is further by now;
                silent: no heartbeat arrives

compute and samples/s are averages since the last start.
"""


@click.command("watch", cls=Command, help=DESCRIPTION)
@click.argument("run_dir", metavar="RUN", type=PATH)
@json_option
def run_watch(run_dir: Path, is_json: bool) -> int:
    """Show the state of a run's ranks until it ends; without a terminal, once."""
    read_run(run_dir, str(run_dir))
    if sys.stdout.isatty() and not is_json:
        return _follow(run_dir)
    record = read_ranks(run_dir)
    if is_json:
        ranks = [] if record is None else [asdict(rank) for rank in record.ranks]
        print_json({"status": read_status(run_dir), "time_s": record and record.time_s, "ranks": ranks})
        return 0
    is_running = read_or_empty(run_dir / STATUS).get("status", "running") == "running"
    if record is None or not is_running or time.time() - record.time_s > STALE_S:
        print(escape(describe_end(run_dir)))
    else:
        _print_ranks(run_dir, record)
    return 0


def _follow(run_dir: Path) -> int:
    print("the run is starting")
    while (record := read_ranks(run_dir)) or not has_ended(run_dir):
        if record:
            print(CLEAR, end="")
            _print_ranks(run_dir, record)
            if has_ended(run_dir):
                break
        time.sleep(POLL_S)
    print(escape(describe_end(run_dir)))
    return 0


def describe_end(run_dir: Path) -> str:
    """Describe the state of a run without live ranks."""
    status = read_status(run_dir)
    how = status.get("status", "starting")
    if how == "running" or (how == "killed" and not status.get("reason")):
        return f"{run_dir}: no heartbeat of the run: it was killed, its host is down, or it is restarting"
    return f"{run_dir}: {how}" + (f": {status['reason']}" if status.get("reason") else "")


def _format_speed(rank: Beat, micro_batch_size: int) -> tuple[str, str]:
    """Return the columns "compute" and "samples/s"; "" if they are not known yet."""
    num = rank.num_micro_batches
    compute_s = rank.spent_s.get("forward", 0.0) + rank.spent_s.get("backward", 0.0)
    total_s = sum(rank.spent_s.values()) - rank.spent_s.get("starting", 0.0)
    if not num or total_s <= 0:
        return "", ""
    return f"{1000 * compute_s / num:.1f} ms", f"{num * micro_batch_size / total_s:,.0f}"


def format_rows(ranks: Sequence[Beat], micro_batch_size: int) -> list[Sequence[str]]:
    """Return a row of `HEADER` per rank."""
    rows: list[Sequence[str]] = []
    for rank in ranks:
        notes = ["silent"] if rank.is_silent else []
        if not rank.is_silent and rank.for_s > POLL_S:
            notes.append(f"waits in {rank.waits_in}" if rank.waits_in else rank.line)
        if not rank.is_silent and rank.age_s > OLD_S:
            notes.append(f"{rank.age_s:.1f} s ago")
        rows.append(
            (
                str(rank.rank),
                rank.host,
                str(rank.step),
                rank.phase,
                format_time(round(rank.for_s + (rank.age_s if rank.is_silent else 0.0))),
                *_format_speed(rank, micro_batch_size),
                ", ".join(filter(None, notes)),
            )
        )
    return rows


def _print_ranks(run_dir: Path, states: RankStates) -> None:
    age_s = time.time() - states.time_s
    heals = read_rows(run_dir / HEALS)
    title = format_count(len(states.ranks), "rank")
    title += f", {format_count(len(heals), 'heal')}, the last in step {heals[-1]['step']}" if heals else ""
    title += f", {format_time(round(age_s))} ago" if age_s > 2 * POLL_S else ""
    numbers = read_or_empty(run_dir / RECORD).get("numbers", {})
    print_table(title, HEADER, format_rows(states.ranks, numbers.get("micro_batch_size", 1)))
