"""`samestep watch`: shows the live state of every rank of a running job."""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.config import is_url
from samestep.console import build_table, escape, print_table
from samestep.errors import Error
from samestep.snapshot.object_store import ObjectStore, find_copy, read_run
from samestep.tools.inspect import CommandParser
from samestep.watch.records import RANKS, STATUS, read_or_empty
from samestep.watch.stall_diagnosis import describe_seconds
from samestep.world.environment import read_host, read_overrides

POLL_S = 1.0
WINDOW_S = 10.0
STALE_S = 30.0  # a run without news for this long counts as dead
RESTART_S = 5.0  # for a launcher to restart a failed run
HEADER = ("rank", "host", "step", "phase", "in it for", "compute/step", "samples/s", "where")

DESCRIPTION = f"""\
Shows the live state of every rank of a running job, until the run ends; once, if the output is not a terminal. The
columns of the table, one row per rank:

  rank, host    the rank and its machine
  step          completed steps, over all restarts
  phase         starting, loading (data), forward, backward, reducing (summing gradients over the ranks, including the
                wait for them), updating, saving, validating, script (code between two steps), left or ended
  in it for     time in this phase or micro-batch, in seconds; from 10 minutes on in minutes
  compute/step  milliseconds of forward and backward per step, without waits for data or other ranks
  samples/s     samples per second of this rank, over all phases
  where         for a rank in one phase for over {POLL_S:g} s: the collective that it waits in, or the line of the
                script; silent: no heartbeat arrives

compute/step and samples/s cover the last {WINDOW_S:g} s; in a single output, the time since the last start.
"""


def run_watch(args: list[str]) -> int:
    """Run the command with the arguments after its name. Returns the exit code.

    Raises:
        Error: there is no run.
    """
    parser = CommandParser(
        prog="samestep watch",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="the run's directory; or its URL, on the machine of rank 0")
    parser.add_argument("--local-dir", metavar="DIR", help="for a run at a URL: the run's --local-dir")
    options = parser.parse_args(args)
    run_dir = find_directory(options.run, options.local_dir or read_overrides().get("local_dir"))
    read_run(run_dir, str(run_dir))
    if sys.stdout.isatty():
        return _follow(run_dir)
    record = read_or_empty(run_dir / RANKS)
    is_running = read_or_empty(run_dir / STATUS).get("status", "running") == "running"
    if not record or not is_running or time.time() - record["time_s"] > STALE_S:
        print(escape(describe_end(run_dir)))
        return 0
    print_table(_name_table(record), *format_rows(record, None))
    return 0


def find_directory(run: str, local_dir: str | None) -> Path:
    """Return the directory with ranks.json: the run's, or for a URL the working copy on rank 0's machine.

    Raises:
        Error: the working copy is on another machine, or the URL cannot be read.
    """
    if not is_url(run):
        return Path(run)
    remote = ObjectStore(run)
    holder, number = remote.read_lock()
    if not number:
        raise Error(f"there is no run at {run}: name a run's URL or directory")
    copy = find_copy(remote.url, number, local_dir)
    if copy.is_dir() and (f" on {read_host()} since " in holder or (copy / RANKS).exists()):
        return copy
    raise Error(
        f"the state of the ranks of {run} is in its working copy, and {copy} is not that of {holder}: watch it on that "
        "machine, with the run's --local-dir if it has one"
    )


def _follow(run_dir: Path) -> int:
    from rich.live import Live
    from rich.text import Text

    records: list[dict[str, Any]] = []
    with Live(Text("the run is starting"), auto_refresh=False, transient=False) as live:
        while (record := read_or_empty(run_dir / RANKS)) or not has_ended(run_dir):
            if record and (not records or record["time_s"] != records[-1]["time_s"]):
                records = [old for old in records if record["time_s"] - old["time_s"] < WINDOW_S] + [record]
                styles = [_choose_style(rank) for rank in record["ranks"]]
                table = build_table(_name_table(record), *format_rows(record, records[0]), styles)
                live.update(table, refresh=True)
            elif record and time.time() - record["time_s"] > RESTART_S and has_ended(run_dir):
                break
            time.sleep(POLL_S)
    print(escape(describe_end(run_dir)))
    return 0


def has_ended(run_dir: Path) -> bool:
    """Return whether the run has ended. False while a launcher can still restart it."""
    status = read_or_empty(run_dir / STATUS)
    if status.get("status") in ("done", "stopped"):
        return True
    newest_s = 0.0
    for name in (RANKS, STATUS):
        path = run_dir / name
        newest_s = max(newest_s, path.stat().st_mtime if path.exists() else 0.0)
    age_s = time.time() - newest_s
    if status.get("status") == "failed":
        return age_s > RESTART_S
    if status.get("host") == read_host() and os.path.isdir("/proc/self"):
        return age_s > RESTART_S and not os.path.isdir(f"/proc/{status.get('process')}")
    return age_s > STALE_S


def describe_end(run_dir: Path) -> str:
    """Describe the state of a run without live ranks."""
    status = read_or_empty(run_dir / STATUS)
    how = status.get("status", "starting")
    if how == "running":
        return f"{run_dir}: no heartbeat of the run: it was killed, its host is down, or it is restarting"
    return f"{run_dir}: {how}" + (f": {status['reason']}" if status.get("reason") else "")


def compute_rates(
    rank: Mapping[str, Any], before: Mapping[str, Any] | None, micro_batch_size: int
) -> tuple[float | None, float | None]:
    """Compute the speed of a rank since `before`; None: since the last start of the run.

    Returns:
        Seconds of computation per step, without waits for other ranks, and samples per second; None if unknown.
    """
    passed_s = dict(rank["spent_s"])
    num_steps, num_micro_batches = rank["num_steps"], rank["num_micro_batches"]
    if before is None:
        passed_s.pop("starting", None)
    else:
        passed_s = {name: seconds - before["spent_s"].get(name, 0.0) for name, seconds in passed_s.items()}
        num_steps, num_micro_batches = num_steps - before["num_steps"], num_micro_batches - before["num_micro_batches"]
    compute_s, total_s = passed_s.get("forward", 0.0) + passed_s.get("backward", 0.0), sum(passed_s.values())
    return (
        compute_s / num_steps if num_steps > 0 else None,
        num_micro_batches * micro_batch_size / total_s if total_s > 0 else None,
    )


def format_rows(
    record: Mapping[str, Any], before: Mapping[str, Any] | None
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the header and a row per rank, without the last column if it is empty."""
    then = {} if before is None or before is record else {rank["rank"]: rank for rank in before["ranks"]}
    rows = []
    for rank in record["ranks"]:
        compute_s, samples_per_s = compute_rates(rank, then.get(rank["rank"]), record["micro_batch_size"])
        note = "silent" if rank["is_silent"] else f"waits in {rank['waits_in']}" if rank["waits_in"] else rank["place"]
        rows.append(
            (
                str(rank["rank"]),
                rank["host"],
                str(rank["step"]),
                rank["phase"],
                describe_seconds(rank["for_s"] + rank["age_s"]),
                "" if compute_s is None else f"{1000 * compute_s:.1f} ms",
                "" if samples_per_s is None else f"{samples_per_s:,.0f}",
                note if rank["is_silent"] or rank["for_s"] > POLL_S else "",
            )
        )
    is_wide = any(row[-1] for row in rows)
    return (HEADER, rows) if is_wide else (HEADER[:-1], [row[:-1] for row in rows])


def _choose_style(rank: Mapping[str, Any]) -> str | None:
    return "red" if rank["is_silent"] else "yellow" if rank["for_s"] > WINDOW_S else None


def _name_table(record: Mapping[str, Any]) -> str:
    return f"{len(record['ranks'])} ranks"
