"""`samestep verify --plain`: finds mistakes of distributed training in a script that does not use samestep."""

import json
import os
import shlex
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.console import print_result, say, show_activity
from samestep.errors import Error
from samestep.files import read_tail, replace_file
from samestep.launch.target import Target
from samestep.tools.traced_script import exiting_on_sigterm, start
from samestep.tools.verify.plain_checks import (
    MISTAKE,
    NOTE,
    OK,
    UNSEEN,
    CheckResult,
    Rank,
    ResumedRun,
    check_evaluation,
    check_gradient,
    check_losses,
    check_order,
    check_replicas,
    check_restart,
    check_samples,
    describe_end,
    read_ranks,
)
from samestep.tools.verify.trials import LEAST_DEADLINE_S, SHOWN_LINES, STUCK, make_empty
from samestep.units import format_ranks
from samestep.world.environment import HOOK, child_variables
from samestep.world.workdir import WorkDir

RECORDER = "samestep.tools.verify.plain_recorder"
# of an entry of the working directory that is copied for a trial
MAX_FILES = 10_000
MAX_BYTES = 1 << 30
ROW = "  {:<11} {:<13} {}"
COLOURS = {OK: "green", UNSEEN: "yellow", NOTE: "yellow", MISTAKE: "red"}

# Python runs a module of this name, if one is on its path, at the start of each process. Nothing is imported until the
# process imports torch. A sitecustomize that would have run without this one runs as well.
SITECUSTOMIZE = f"""\
import importlib, importlib.util, json, os, sys
from importlib.machinery import PathFinder

class AfterTorch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(AfterTorch)
        spec = importlib.util.find_spec("torch")
        execute = spec.loader.exec_module
        def execute_and_begin(module):
            execute(module)
            hook, options = json.loads(os.environ["{HOOK}"])
            importlib.import_module(hook).begin(options)
        spec.loader.exec_module = execute_and_begin
        return spec

if "{HOOK}" in os.environ:
    sys.meta_path.insert(0, AfterTorch)
here = os.path.dirname(os.path.abspath(__file__))
other = PathFinder.find_spec("sitecustomize", [each for each in sys.path if os.path.abspath(each) != here])
if other is not None:
    sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(other)
    other.loader.exec_module(module)
"""


@dataclass(frozen=True)
class PlainOptions:
    """The options of `samestep verify --plain`, as in `command.FLAGS`."""

    steps: int = 100
    world_sizes: str = "1,2"
    resume_after: int = 1
    resume_args: str = ""
    launcher: str = ""
    link: str = ""
    json: bool = False
    keep_runs: str | None = None


def run_plain(target: Target, options: PlainOptions, world_sizes: Sequence[int]) -> bool:
    """Run the script at several numbers of ranks, print a line per check, and return whether no mistake was found.

    Raises:
        Error: the script fails on the first number of ranks, or makes no step there.
    """
    if options.steps < 1 or options.resume_after < 0:
        raise Error(
            "verify --plain needs at least one step, and --resume-after of at least 0 steps (0: no restart)",
            code="SS101",
        )
    try:
        words = shlex.split(options.launcher)
        shlex.split(options.resume_args)
    except ValueError as error:
        raise Error(
            f"--launcher or --resume-args has an open quote or a trailing backslash: {error}", code="SS101"
        ) from error
    if words and "{n}" not in options.launcher:
        raise Error(
            "--launcher has no {n} for the number of ranks: write 'torchrun --nproc-per-node {n}', for example",
            code="SS101",
        )
    if target.kind == "recipe":
        raise Error(
            f"--plain is for scripts without samestep, and {target.name} is a recipe: leave --plain out", code="SS104"
        )
    if words and shutil.which(words[0]) is None:
        raise Error(
            f"--launcher starts with {words[0]}, which is not a program on the PATH: install it, or correct it",
            code="SS107",
        )
    with exiting_on_sigterm(), WorkDir("verify-") as temporary:
        home = temporary.path if options.keep_runs is None else Path(options.keep_runs).resolve()
        entries = _sort_entries([each for each in options.link.split(",") if each], home)
        if options.keep_runs is not None:
            make_empty(Path(options.keep_runs))
        trials = _PlainTrials(target, options, entries, home, temporary.lock.fileno())
        if not options.json:
            print(f"samestep verify --plain {shlex.join(target.to_words())}", flush=True)
        results = _compare(trials, options, world_sizes)
    has_mistake = any(result.verdict == MISTAKE for result in results)
    if options.json:
        checks = {result.check: {"verdict": result.verdict, "text": result.text} for result in results}
        print(json.dumps({"runs": trials.rows, "checks": checks, "mistakes": has_mistake}, indent=2))
        return not has_mistake
    for result in results:
        line = ROW.format(result.check, result.verdict, result.text)
        print_result(line, result.verdict, COLOURS[result.verdict])
    num_unseen = sum(result.verdict == UNSEEN for result in results)
    rest = f"; {num_unseen} of {len(results)} checks could not be made: not observed" if num_unseen else ""
    print(f"{'mistakes' if has_mistake else 'no mistakes'} were found{rest}")
    return not has_mistake


def _compare(trials: "_PlainTrials", options: PlainOptions, world_sizes: Sequence[int]) -> list[CheckResult]:
    runs: dict[int, list[Rank]] = {}
    faults = []
    for size in world_sizes:
        code, ranks, output = trials.run(size)
        if not runs and (code or not ranks):
            raise Error(
                f"{trials.name} {describe_end(code)} on {format_ranks(size)} after "
                f"{len(ranks[0].updates) if ranks else 0} steps of a torch optimizer, before anything can be compared: "
                f"its last lines are: {output}",
                code="SS711",
            )
        if ranks and ranks[0].updates[0, 0]["before"]["num_states"]:
            raise Error(
                f"{trials.name} resumes from files of an earlier run: start in a directory without them",
                code="SS712",
            )
        runs[size] = ranks
        if code and not any(rank.is_cut for rank in ranks):
            num_steps = min((len(rank.updates) for rank in ranks), default=0)
            faults.append(f"on {format_ranks(size)} it {describe_end(code)} after {num_steps} steps")
    checks = (check_samples, check_order, check_gradient, check_replicas, check_evaluation)
    results = [CheckResult("run", MISTAKE, "; ".join(faults))] if faults else []
    results += [check(runs) for check in checks]
    results += check_losses(runs)
    size = max(world_sizes)
    if options.resume_after and not faults:
        _, interrupted, _ = trials.run(size, kill_after=options.resume_after)
        code, resumed, _ = trials.run(size, is_resumed=True) if interrupted else (0, [], "")
        results += check_restart(ResumedRun(runs[size], interrupted, resumed, code, bool(options.resume_args)))
    return results


class _PlainTrials:
    """Starts the script, each time in a copy of the working directory, and reads what its ranks recorded.

    Attributes:
        rows: the number of ranks, steps, seconds and exit code of each start.
    """

    def __init__(
        self, target: Target, options: PlainOptions, entries: Mapping[Path, bool], home: Path, lock: int
    ) -> None:
        self._options = options
        self._entries = entries
        self._home = home
        self._lock = lock
        path = Path(os.path.abspath(target.name))  # the copy's script, and not the original, if it is in this directory
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        self._target = replace(target, name=str(path)) if target.kind == "script" else target
        self._deadline_s: float | None = None
        self.rows: list[dict[str, Any]] = []
        self.name = target.name
        (home / "path").mkdir()
        replace_file(home / "path" / "sitecustomize.py", SITECUSTOMIZE.encode())

    def build_command(self, size: int, more: Sequence[str] = ()) -> list[str]:
        """Return the command of a start, from the interpreter or the launcher on."""
        target = replace(self._target, arguments=[*self._target.arguments, *more])
        if not self._options.launcher:
            return target.to_full_command(size)
        words = [*shlex.split(self._options.launcher), *target.to_plain_command()[1:]]
        return [word.replace("{n}", str(size)) for word in words]

    def run(self, size: int, *, kill_after: int | None = None, is_resumed: bool = False) -> tuple[int, list[Rank], str]:
        """Start the script and wait for its end.

        Args:
            size: number of ranks.
            kill_after: kill it in the first step after a save, and after so many steps.
            is_resumed: start in the directory of the last trial.

        Returns:
            The exit code, the records of the ranks, and the end of the output.
        """
        place = self._home / f"{len(self.rows) + 1:02}-{size}-ranks"
        place.mkdir()
        where = self._home / f"{len(self.rows):02}-{size}-ranks" / "copy" if is_resumed else place / "copy"
        if not is_resumed:
            _copy_entries(self._entries, where)
        show_activity(f"{self.name} on {size} ranks ...")
        options = {"dir": str(place), "steps": self._options.steps, "kill_after": kill_after}
        inherited = child_variables()
        path = [str(self._home / "path"), *filter(None, [inherited.get("PYTHONPATH", "")])]
        ours = {HOOK: json.dumps([RECORDER, options]), "PYTHONPATH": os.pathsep.join(path), "WANDB_MODE": "disabled"}
        command = self.build_command(size, shlex.split(self._options.resume_args) if is_resumed else ())
        began_s = time.monotonic()
        variables = {"PYTHONHASHSEED": "0"} | inherited | ours
        with start(command, variables, place / "output", (self._lock,), where) as process:
            code = process.wait_for(self._deadline_s)
        if code is None:
            code = STUCK
        seconds = time.monotonic() - began_s
        ranks = read_ranks(place)
        self._deadline_s = self._deadline_s or max(LEAST_DEADLINE_S, 10 * seconds)
        num_steps = min((len(rank.updates) for rank in ranks), default=0)
        self.rows.append({"ranks": size, "steps": num_steps, "seconds": round(seconds, 1), "exit_code": code})
        output = read_tail(place / "output").splitlines()
        return code, ranks, "\n".join(output[-SHOWN_LINES:])


def _sort_entries(linked: Collection[str], home: Path) -> dict[Path, bool]:
    """Return what the trials find of the working directory: path -> whether it is linked, not copied.

    Names what is left out because it is too large.

    Args:
        linked: what `--link` names.
        home: the directory of the trials.

    Raises:
        Error: `linked` names what is not directly in the working directory.
    """
    names = {os.path.abspath(each) for each in linked}
    entries = [path for path in sorted(Path.cwd().iterdir()) if path not in (home, *home.parents)]
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
