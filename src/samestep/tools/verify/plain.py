"""`samestep verify --plain`: finds mistakes of distributed training in a script that does not use samestep."""

import json
import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.command_line import print_json
from samestep.console import print_result, say, show_activity
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
from samestep.world.workdir import WorkDir

RECORDER = "samestep.tools.verify.plain_recorder"
# of an entry of the working directory that is copied for a trial
MAX_FILES = 10_000
MAX_BYTES = 1 << 30
ROW = "  {:<11} {:<13} {}"
COLOURS = {OK: "green", UNSEEN: "yellow", MISTAKE: "red"}


def run_plain(target: Target, values: Mapping[str, Any], world_sizes: Sequence[int]) -> int:
    """Run the script at several numbers of ranks, and print a line per check. Returns the exit code.

    Raises:
        Error: the script fails on the first number of ranks, or makes no step there.
    """
    with exiting_on_sigterm(), WorkDir("verify-") as temporary:
        entries = _sort_entries([each for each in values.get("link", "").split(",") if each], temporary.path)
        trials = _PlainTrials(target, values.get("steps", 100), entries, temporary)
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

    Args:
        entries: what is copied or linked, see `_sort_entries`.

    Attributes:
        rows: the number of ranks, steps, seconds and exit code of each start.
        faults: the starts after the first one that have failed.
    """

    def __init__(self, target: Target, num_steps: int, entries: Mapping[Path, bool], home: WorkDir) -> None:
        self._name = target.name
        self._num_steps = num_steps
        self._entries = entries
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
        place = self._home.path / f"{len(self.rows)}"
        place.mkdir()
        where = place / "copy"
        _copy_entries(self._entries, where)
        show_activity(f"{self._name} on {size} ranks ...")
        command = self._target.to_full_command(size)
        options = {"dir": str(place), "steps": self._num_steps}
        ours = {HOOK: json.dumps([RECORDER, options]), "WANDB_MODE": "disabled"}
        variables = {"PYTHONHASHSEED": "0"} | child_variables() | ours
        began_s = time.monotonic()
        with start(command, variables, place / "output", (self._home.lock.fileno(),), where) as process:
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


def _sort_entries(linked: Sequence[str], home: Path) -> dict[Path, bool]:
    """Return what the trials find of the working directory: path -> whether it is linked, not copied.

    Names what is left out because it is too large.

    Args:
        linked: what `--link` names.
        home: the directory of the trials.

    Raises:
        Error: `linked` names what is not directly in the working directory.
    """
    names = {os.path.abspath(each) for each in linked}
    entries = sorted(path for path in Path.cwd().iterdir() if path not in (home, *home.parents))
    if wrong := sorted(names - set(map(str, entries))):
        raise Error(
            f"--link names {', '.join(wrong)}, which is not in the working directory: name files and directories that "
            "are directly in it",
            code="SS101",
        )
    wanted = [path for path in entries if not path.name.startswith(".") or str(path) in names]
    too_large = [path for path in wanted if str(path) not in names and not _is_small(path)]
    if too_large:
        say(
            f"too large to be copied for each start, and left out: {', '.join(path.name for path in too_large)}; if "
            "the script needs it and only reads it, name it with --link"
        )
    return {path: str(path) in names for path in wanted if path not in too_large}


def _copy_entries(entries: Mapping[Path, bool], to: Path) -> None:
    """Create a directory in which a script finds the entries of the working directory, and cannot change them."""
    to.mkdir()
    for path, is_linked in entries.items():
        if is_linked:
            (to / path.name).symlink_to(path)
        elif path.is_dir():
            shutil.copytree(  # noqa: TID251 the user's own files, which may be links
                path, to / path.name, copy_function=_copy_file, ignore_dangling_symlinks=True
            )
        else:
            _copy_file(path, to / path.name)


def _copy_file(source: str | Path, target: str | Path) -> None:
    if os.path.isfile(source):  # a socket or a pipe cannot be copied
        shutil.copy2(source, target)  # noqa: TID251 the user's own files, which may be links


def _is_small(path: Path) -> bool:
    """Return whether a file or directory is small enough for a copy."""
    num_files = num_bytes = 0
    # A limit also ends a circle of links.
    walk = os.walk(path, followlinks=True) if path.is_dir() else [("", [], [str(path)])]
    for directory, _, names in walk:
        num_files += len(names) + 1
        with suppress(OSError):
            num_bytes += sum(os.stat(os.path.join(directory, name)).st_size for name in names)
        if num_files > MAX_FILES or num_bytes > MAX_BYTES:
            return False
    return True
