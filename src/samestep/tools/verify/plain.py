"""`samestep verify --plain`: finds mistakes of distributed training in a script that does not use samestep."""

import json
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from samestep.cli import print_json
from samestep.console import format_count, print_result, show_activity
from samestep.errors import Error
from samestep.files import read_tail
from samestep.launch.target import Target, Values
from samestep.processes import running
from samestep.tools.traced_script import SHOWN_LINES, open_workdir
from samestep.tools.verify.plain_checks import MISTAKE, OK, UNSEEN, Finding, PlainRank, check_all, read_ranks
from samestep.world.environment import HOOK, child_variables

RECORDER = "samestep.tools.verify.plain_recorder"
LEAST_DEADLINE_S = 120.0  # of a start; another one than the first may take ten times as long as that
# of the copy of the working directory
MAX_FILES = 10_000
MAX_BYTES = 1 << 30
ROW = "  {:<11} {:<13} {}"
COLOURS = {OK: "green", UNSEEN: "yellow", MISTAKE: "red"}


def run_plain(target: Target, values: Values, world_sizes: Sequence[int]) -> int:
    """Run the script at several numbers of ranks, and print a line per check. Returns the exit code.

    Raises:
        Error: the script fails on the first number of ranks, or makes no step there.
    """
    here = Path.cwd()
    if target.kind == "script":  # the copy's script, and not the original, if it is in this directory
        path = Path(os.path.abspath(target.name))
        target = replace(target, name=str(path.relative_to(here) if path.is_relative_to(here) else path))
    if "json" not in values:
        print(f"samestep verify --plain {shlex.join(target.to_words())}", flush=True)
    runs: dict[int, list[PlainRank]] = {}
    rows: list[dict[str, Any]] = []
    results: dict[str, Finding] = {}
    deadline_s: float | None = None
    with open_workdir("verify") as home:
        for size in world_sizes:
            where = format_count(size, "rank")
            show_activity(f"{target.name} on {where} ...")
            directory = home / f"{size}"
            directory.mkdir()
            copy_directory(here, directory / "copy", home)
            began_s = time.monotonic()
            code = _start(target, size, directory, values.get("steps", 100), deadline_s)
            seconds = time.monotonic() - began_s
            deadline_s = deadline_s or max(LEAST_DEADLINE_S, 10 * seconds)
            ranks = runs[size] = read_ranks(directory)
            num_steps = min((rank.num_steps for rank in ranks), default=0)
            rows.append({"ranks": size, "steps": num_steps, "seconds": round(seconds, 1), "exit_code": code})
            how = "does not end" if code is None else f"ends with exit code {code}"
            if len(runs) == 1 and (code or not ranks):
                output = "\n".join(read_tail(directory / "output").splitlines()[-SHOWN_LINES:])
                raise Error(
                    f"{target.name} {how} on {where} after {num_steps} steps of a torch optimizer, before anything can "
                    f"be compared: its last lines are: {output}",
                    code="SS711",
                )
            if code != 0 and not any(rank.is_cut for rank in ranks):
                results["run"] = MISTAKE, f"on {where} it {how} after {num_steps} steps"
    results |= check_all(runs)
    verdicts = [verdict for verdict, _ in results.values()]
    has_mistake = MISTAKE in verdicts
    if "json" in values:
        checks = {name: {"verdict": verdict, "text": text} for name, (verdict, text) in results.items()}
        print_json({"runs": rows, "checks": checks, "mistakes": has_mistake})
        return int(has_mistake)
    for name, (verdict, text) in results.items():
        print_result(ROW.format(name, verdict, text), verdict, COLOURS[verdict])
    num_unseen = verdicts.count(UNSEEN)
    rest = f"; {num_unseen} of {len(results)} checks could not be made: not observed" if num_unseen else ""
    print(f"{'mistakes' if has_mistake else 'no mistakes'} were found{rest}")
    return int(has_mistake)


def _start(target: Target, size: int, directory: Path, num_steps: int, deadline_s: float | None) -> int | None:
    """Start the script in the copy, with records in `directory`. Returns the exit code; None: it did not end."""
    variables = {"PYTHONHASHSEED": "0"} | child_variables() | {"WANDB_MODE": "disabled"}
    variables[HOOK] = json.dumps([RECORDER, {"dir": str(directory), "steps": num_steps}])
    command = target.to_full_command(size)
    with running(command, variables, directory / "output", directory / "copy") as process, suppress(TimeoutExpired):
        return process.wait(deadline_s)
    return None


def copy_directory(source: Path, target: Path, home: Path) -> None:
    """Copy a directory without its hidden files, so that a script cannot change what is there.

    Args:
        home: the directory of the trials, which may be in `source`.

    Raises:
        Error: the copy would be too large.
    """
    num_files = num_bytes = 0

    def leave_out(directory: str, names: list[str]) -> set[str]:
        nonlocal num_files, num_bytes
        kept = set()
        for path in (Path(directory, name) for name in names):
            if path == home or (path.parent == source and path.name.startswith(".")):
                continue
            if path.is_file():
                num_files += 1
                num_bytes += path.stat().st_size
            elif not path.is_dir():  # a socket or pipe
                continue
            kept.add(path.name)
            if num_files > MAX_FILES or num_bytes > MAX_BYTES:  # also ends a circle of links
                raise Error(
                    f"the working directory is too large to be copied for each start, at {path}: move large data, and "
                    "give the script the full path",
                    code="SS712",
                )
        return {*names} - kept

    shutil.copytree(source, target, ignore=leave_out)  # noqa: TID251 the user's own files, which may be links
    target.chmod(0o700)  # the source may be read-only
