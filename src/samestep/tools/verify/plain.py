"""`samestep verify --plain`: finds mistakes of distributed training in a script that does not use samestep."""

import json
import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.command_line import print_json
from samestep.console import print_result, show_activity
from samestep.errors import Error
from samestep.files import read_tail
from samestep.launch.target import Target
from samestep.tools.traced_script import exiting_on_sigterm, start
from samestep.tools.verify.plain_checks import (
    MISTAKE,
    OK,
    UNSEEN,
    CheckResult,
    Rank,
    check_all,
    read_ranks,
)
from samestep.tools.verify.trials import LEAST_DEADLINE_S, SHOWN_LINES
from samestep.units import format_ranks
from samestep.world.environment import HOOK, child_variables
from samestep.world.workdir import open_workdir

RECORDER = "samestep.tools.verify.plain_recorder"
# of the copy of the working directory
MAX_FILES = 10_000
MAX_BYTES = 1 << 30
ROW = "  {:<11} {:<13} {}"
COLOURS = {OK: "green", UNSEEN: "yellow", MISTAKE: "red"}


def run_plain(target: Target, values: Mapping[str, Any], world_sizes: Sequence[int]) -> int:
    """Run the script at several numbers of ranks, and print a line per check. Returns the exit code.

    Raises:
        Error: the script fails on the first number of ranks, or makes no step there.
    """
    with exiting_on_sigterm(), open_workdir("verify-") as temporary:
        copier = _Copier([each for each in values.get("link", "").split(",") if each], temporary)
        trials = _PlainTrials(target, values.get("steps", 100), copier, temporary)
        if "json" not in values:
            print(f"samestep verify --plain {shlex.join(target.to_words())}", flush=True)
        runs = {size: trials.run(size) for size in world_sizes}
    results = [*trials.faults, *check_all(runs)]
    has_mistake = any(result.verdict == MISTAKE for result in results)
    if "json" in values:
        found = {result.check: {"verdict": result.verdict, "text": result.text} for result in results}
        print_json({"runs": trials.rows, "checks": found, "mistakes": has_mistake})
        return int(has_mistake)
    for result in results:
        line = ROW.format(result.check, result.verdict, result.text)
        print_result(line, result.verdict, COLOURS[result.verdict])
    num_unseen = sum(result.verdict == UNSEEN for result in results)
    rest = f"; {num_unseen} of {len(results)} checks could not be made: not observed" if num_unseen else ""
    print(f"{'mistakes' if has_mistake else 'no mistakes'} were found{rest}")
    return int(has_mistake)


class _PlainTrials:
    """Starts the script, each time in a copy of the working directory, and reads what its ranks recorded.

    Attributes:
        rows: the number of ranks, steps, seconds and exit code of each start.
        faults: the starts after the first one that have failed.
    """

    def __init__(self, target: Target, num_steps: int, copier: "_Copier", home: Path) -> None:
        self._name = target.name
        self._num_steps = num_steps
        self._copier = copier
        self._home = home
        path = Path(os.path.abspath(target.name))  # the copy's script, and not the original, if it is in this directory
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        self._target = replace(target, name=str(path)) if target.kind == "script" else target
        self._deadline_s: float | None = None
        self.rows: list[dict[str, Any]] = []
        self.faults: list[CheckResult] = []

    def run(self, size: int) -> list[Rank]:
        """Start the script on a number of ranks, and wait for its end. Returns the records of the ranks."""
        is_first = not self.rows
        place = self._home / f"{len(self.rows)}"
        place.mkdir()
        where = place / "copy"
        self._copier.copy_to(where)
        show_activity(f"{self._name} on {size} ranks ...")
        command = self._target.to_full_command(size)
        options = {"dir": str(place), "steps": self._num_steps}
        ours = {HOOK: json.dumps([RECORDER, options]), "WANDB_MODE": "disabled"}
        variables = {"PYTHONHASHSEED": "0"} | child_variables() | ours
        began_s = time.monotonic()
        with start(command, variables, place / "output", where) as process:
            code = process.wait_for(self._deadline_s)
        seconds = time.monotonic() - began_s
        self._deadline_s = self._deadline_s or max(LEAST_DEADLINE_S, 10 * seconds)
        ranks = read_ranks(place)
        num_steps = min((rank.num_steps for rank in ranks), default=0)
        self.rows.append({"ranks": size, "steps": num_steps, "seconds": round(seconds, 1), "exit_code": code})
        end = "does not end" if code is None else f"ends with exit code {code}"
        if is_first and (code or not ranks):
            output = "\n".join(read_tail(place / "output").splitlines()[-SHOWN_LINES:])
            raise Error(
                f"{self._name} {end} on {format_ranks(size)} after {num_steps} steps of a torch optimizer, before "
                f"anything can be compared: its last lines are: {output}",
                code="SS711",
            )
        if code != 0 and not any(rank.is_cut for rank in ranks):
            text = f"on {format_ranks(size)} it {end} after {num_steps} steps"
            self.faults.append(CheckResult("run", MISTAKE, text))
        return ranks


class _Copier:
    """Copies the working directory without hidden files, so that a script cannot change what is there.

    Args:
        linked: what `--link` names: entries of the working directory to link, not copy.
        home: the directory of the trials, which may be in the working directory.

    Raises:
        Error: `linked` names something else.
    """

    def __init__(self, linked: Sequence[str], home: Path) -> None:
        self._linked = {Path(os.path.abspath(each)) for each in linked}
        self._home = home
        self._num_files = self._num_bytes = 0
        if wrong := sorted(map(str, self._linked - {*Path.cwd().iterdir()})):
            raise Error(
                f"--link names {', '.join(wrong)}, which is not in the working directory: name files and directories "
                "that are directly in it",
                code="SS101",
            )

    def copy_to(self, target: Path) -> None:
        """Create the copy. Raises Error if it would be too large."""
        self._num_files = self._num_bytes = 0
        target.mkdir()
        for path in sorted(Path.cwd().iterdir()):
            to = target / path.name
            if path in self._linked:
                to.symlink_to(path)
            elif path.name.startswith(".") or path in (self._home, *self._home.parents):
                continue
            elif path.is_dir():
                shutil.copytree(path, to, copy_function=self._copy_file, ignore_dangling_symlinks=True)  # noqa: TID251
            else:
                self._copy_file(path, to)

    def _copy_file(self, source: str | Path, target: str | Path) -> None:
        if not os.path.isfile(source):
            return  # a socket or a pipe
        self._num_files += 1
        self._num_bytes += os.path.getsize(source)
        if self._num_files > MAX_FILES or self._num_bytes > MAX_BYTES:  # also ends a circle of links
            raise Error(
                f"the working directory is too large to be copied for each start, at {source}: name large files and "
                "directories that the script only reads with --link",
                code="SS712",
            )
        shutil.copy2(source, target)  # noqa: TID251 the user's own files, which may be links
