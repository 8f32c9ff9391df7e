"""`samestep bisect`: finds the commit at which a script's bits, or a metric, changed. Does not import torch."""

import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from samestep.config import Option, to_variables
from samestep.console import escape, say, show_activity
from samestep.errors import Error
from samestep.files import read_tail
from samestep.launch.flags import FLAGS as LAUNCH_FLAGS
from samestep.launch.launcher import check_target
from samestep.launch.script_command import ScriptCommand
from samestep.launch.target import Target
from samestep.processes import run_captured
from samestep.snapshot.ledger_file import count_records
from samestep.tools.compare import find_first_difference, read_last_values
from samestep.tools.traced_script import exiting_on_sigterm, find_errors, start
from samestep.watch.records import LEDGER, RECORD, read_or_empty
from samestep.world.environment import child_variables
from samestep.world.workdir import WorkDir

FLAGS: dict[str, Option] = {
    "steps": Option(int, "K", "steps to train at each commit; default: 5"),
    "nproc_per_node": Option(int, "N", "number of ranks; default: 1"),
    "metric": Option(str, "NAME", "compare the last value of this metric instead of bits, such as train/loss"),
    "tolerance": Option(float, "X", "with --metric: the largest difference that counts as equal; default: 0"),
    "device": LAUNCH_FLAGS["device"],
    "json": Option(bool, "", "print one JSON object"),
}
COMMITS = ("at the good commit", "at this one")
NUM_STEPS = 5
# names of the scratch directory and of the work tree in it
SCRATCH = "bisect-"
TREE = "tree"


@dataclass(frozen=True)
class CommitOutcome:
    """A run at one commit.

    Attributes:
        differs_in: what differs from the run at the good commit; empty if nothing does.
        step: the first step that differs; None for a metric.
        failure: why the script failed; "" if it did not.
    """

    differs_in: tuple[str, ...] = ()
    step: int | None = None
    failure: str = ""

    def __str__(self) -> str:
        if self.failure:
            return f"fails, skipped ({self.failure})"
        return f"differs ({self.difference})" if self.differs_in else "same"

    @property
    def difference(self) -> str:
        """The difference in words."""
        return ("" if self.step is None else f"step {self.step}: ") + "; ".join(self.differs_in)


@click.command("bisect", cls=ScriptCommand, flags=FLAGS, words="GOOD BAD")
def run_bisect(good: str, bad: str, target: Target, values: Mapping[str, Any]) -> int:
    """Finds the commit after GOOD, up to BAD, at which the first steps of a run of SCRIPT changed.

    What changes is the samples, the bits of a loss or of a gradient, or with --metric the last value of a metric by
    more than --tolerance. GOOD and BAD are commits of the script's git repository, or run directories, which stand for
    the commit that they recorded. Searches by bisection along first parents, and trains a few steps at each commit that
    it tries. Works in a temporary work tree: your files and HEAD are not touched. Commits at which the script fails are
    skipped.
    Exit code: 0 if the commit was found; 2 if the two ends do not differ, or cannot be run.
    """
    if target.kind != "script":
        raise Error(
            f"bisect runs a script in a git repository, and {target.name} is not one: name its file", code="SS707"
        )
    check_target(target)
    if values.get("steps", NUM_STEPS) < 1 or values.get("nproc_per_node", 1) < 1:
        raise Error("--steps and --nproc-per-node are counted from 1", code="SS101")
    if not 0 <= values.get("tolerance", 0) < math.inf or ("tolerance" in values and "metric" not in values):
        raise Error("--tolerance is a number from 0 on, and goes with --metric: bits are equal or not", code="SS101")
    repository = _Repository(Path(target.name).resolve())
    commits = repository.list_commits(good, bad)
    if repository.try_git("status", "--porcelain", "--untracked-files=no"):
        say("uncommitted changes are ignored: bisect runs what is committed")
    with exiting_on_sigterm(), WorkDir(SCRATCH) as scratch, repository.open_tree(scratch.path, commits[0]) as tree:
        search = _Search(repository, tree, commits, target, values, scratch)
        candidates, outcome = search.run()
    differs = values.get("metric", "the bits")
    named = [repository.describe_commit(commit) for commit in candidates]
    if values.get("json"):
        found = {
            "first": candidates[0] if len(candidates) == 1 else None,
            "candidates": candidates,
            "subjects": named,
            "step": outcome.step,
            "differs_in": outcome.differs_in,
            "tried": search.tried,
        }
        print(json.dumps(found, indent=1))
        return 0
    which = named[0]
    hint = ""
    if len(named) > 1:
        which = f"one of {', '.join(named)}"
        hint = " (the script fails at all of them but the last)"
    print(escape(f"{which} is the first commit that changed {differs}{hint}: {outcome.difference}"))
    return 0


class _Repository:
    """The git repository of a script.

    Attributes:
        script: path of the script in it.
    """

    def __init__(self, script: Path) -> None:
        self._variables = {name: value for name, value in child_variables().items() if not name.startswith("GIT_")}
        self._root = script.parent
        top = self.try_git("rev-parse", "--show-toplevel")
        if not top:
            raise Error(
                f"{script} is in no git repository that can be read: git says {' '.join(self._complaint)!r}",
                code="SS707",
            )
        self._root = Path(top)
        self.script = script.relative_to(self._root)

    def try_git(self, *words: str, directory: Path | None = None) -> str | None:
        """Return the output of a git command; None if it fails. It runs no hook of the repository."""
        options = ["-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-C", str(directory or self._root)]
        try:
            done = run_captured(["git", *options, *words], variables=self._variables)
        except FileNotFoundError:
            raise Error("bisect needs git, which is not installed: install it", code="SS107") from None
        self._complaint = done.stderr.strip().splitlines()[-1:]
        return done.stdout.strip() if done.returncode == 0 else None

    def git(self, *words: str, directory: Path | None = None) -> str:
        """Return the output of a git command. Raises Error if it fails."""
        if (found := self.try_git(*words, directory=directory)) is None:
            raise Error(f"git {words[0]} failed: {' '.join(self._complaint)}", code="SS707")
        return found

    def list_commits(self, good: str, bad: str) -> list[str]:
        """Return the commits from `good` to `bad`, both included, along first parents. Raises Error."""
        first = self._find_commit(good)
        last = self._find_commit(bad)
        if first == last:
            raise Error(f"{good} and {bad} are the same commit: name two of them", code="SS707")
        if self.try_git("merge-base", "--is-ancestor", last, first) is not None:
            raise Error(
                f"{bad} is an ancestor of {good}: name the earlier commit first, {bad} {good}; it does not matter "
                "whether the change is for the better or for the worse",
                code="SS707",
            )
        if self.try_git("merge-base", "--is-ancestor", first, last) is None:
            raise Error(
                f"{good} is not an ancestor of {bad}: name a commit before it, such as their merge base", code="SS707"
            )
        for name, commit in ((good, first), (bad, last)):
            if self.try_git("cat-file", "-e", f"{commit}:{self.script.as_posix()}") is None:
                raise Error(f"{name} does not have the script {self.script}: name a commit that has it", code="SS707")
        return [first, *self.git("rev-list", "--first-parent", "--reverse", f"{first}..{last}").split()]

    def _find_commit(self, name: str) -> str:
        """Return the hash of a commit, or of the commit of a run directory."""
        if (Path(name) / RECORD).is_file():
            about = read_or_empty(Path(name) / RECORD).get("git") or {}
            if "commit" not in about:
                raise Error(f"the run {name} has recorded no commit: name the commit", code="SS707")
            if about.get("is_dirty"):
                say(f"{name} was started with uncommitted changes, which are ignored")
            name = about["commit"]
        commit = self.try_git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        if not commit:
            raise Error(f"{name} is neither a commit of the repository {self._root} nor a run directory", code="SS707")
        return commit.splitlines()[-1]

    def describe_commit(self, commit: str) -> str:
        """Return the short hash and the subject of a commit."""
        return self.git("show", "--no-patch", "--format=%h (%s)", commit)

    @contextmanager
    def open_tree(self, directory: Path, commit: str) -> Iterator[Path]:
        """Create a work tree in a directory, for the block. Removes the records of work trees of killed searches."""
        for line in self.git("worktree", "list", "--porcelain").splitlines():
            left = Path(line.removeprefix("worktree "))
            if left.name == TREE and SCRATCH in left.parent.name and not left.exists():
                self.try_git("worktree", "remove", "--force", str(left))
        tree = directory / TREE
        self.git("worktree", "add", "--quiet", "--detach", "--no-checkout", str(tree), commit)
        try:
            yield tree
        finally:
            self.try_git("worktree", "remove", "--force", str(tree))

    def check_out(self, tree: Path, commit: str) -> None:
        """Check out a commit in the work tree, without leftover files."""
        self.git("checkout", "--quiet", "--detach", "--force", commit, directory=tree)
        self.git("clean", "-ffdxq", directory=tree)

    def move(self, paths: Iterable[Path], tree: Path) -> list[Path]:
        """Return the paths in the work tree that correspond to paths in the repository. Drops all others."""
        own = [path.resolve() for path in paths]
        return [tree / path.relative_to(self._root) for path in own if path.is_relative_to(self._root)]


class _Search:
    """A binary search over commits. The first commit is good, the last one is not.

    Attributes:
        tried: hash -> outcome.
    """

    def __init__(
        self,
        repository: _Repository,
        tree: Path,
        commits: list[str],
        target: Target,
        values: Mapping[str, Any],
        scratch: WorkDir,
    ) -> None:
        self._repository = repository
        self._tree = tree
        self._commits = commits
        self._scratch = scratch
        self._target = replace(target, name=str(tree / repository.script))
        self._values = values
        self.tried: dict[str, str] = {}

    def run(self) -> tuple[list[str], CommitOutcome]:
        """Return the possible first commits that differ, and what differs. Raises Error if the ends do not differ."""
        low = 0
        high = len(self._commits) - 1
        skipped = set[int]()
        steps = self._values.get("steps", NUM_STEPS)
        for end in (low, high):
            if (outcome := self._try(end)).failure:
                where = self._repository.describe_commit(self._commits[end])
                raise Error(
                    f"the script fails at {where}: {outcome.failure}; files that git does not track are missing in the "
                    "temporary work tree, so name data by absolute paths",
                    code="SS711",
                )
        if not outcome.differs_in:
            what = "metric is the same" if "metric" in self._values else "bits are the same"
            raise Error(
                f"the {what} at both commits after {steps} steps: give more --steps, or other commits", code="SS707"
            )
        while left := [k for k in range(low + 1, high) if k not in skipped]:
            k = min(left, key=lambda k: abs(2 * k - low - high))
            found = self._try(k)
            if found.failure:
                skipped.add(k)
            elif found.differs_in:
                high = k
                outcome = found
            else:
                low = k
        return self._commits[low + 1 : high + 1], outcome

    def _try(self, k: int) -> CommitOutcome:
        commit = self._commits[k]
        named = self._repository.describe_commit(commit)
        number = len(self.tried) + 1
        most = 2 + (len(self._commits) - 2).bit_length()
        show_activity(f"commit {number} of about {most}: {named}")
        self._repository.check_out(self._tree, commit)
        outcome = self._train(commit)
        show_activity("")
        self.tried[commit] = str(outcome)
        say(f"commit {number} of about {most}: {named}: {outcome if k else outcome.failure or 'the reference'}")
        return outcome

    def _train(self, commit: str) -> CommitOutcome:
        """Train at a commit, and compare the run with the run at the first commit."""
        values = self._values
        run = self._scratch.path / commit
        options = {
            "run_dir": run,
            "max_steps": values.get("steps", NUM_STEPS),
            "resume": "never",
            "snapshot_every": "never",
            "log_every": 1,
            "trackers": "none",
        }
        variables = {"PYTHONHASHSEED": "0"} | child_variables() | {"PYTHONDONTWRITEBYTECODE": "1"}
        variables |= to_variables(options | {name: values[name] for name in ("device",) if name in values})
        own = sys.path if sys.flags.safe_path else sys.path[1:]  # the first one is that of this program
        path = self._repository.move([Path(path) for path in own if path], self._tree)
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, path), variables.get("PYTHONPATH", "")]))
        command = self._target.to_full_command(values.get("nproc_per_node", 1))
        output = self._scratch.path / f"{commit}.out"
        place = next((each for each in self._repository.move([Path.cwd()], self._tree) if each.is_dir()), self._tree)
        with start(command, variables, output, (self._scratch.lock.fileno(),), place) as process:
            code = process.wait()
        if code or not count_records(run / LEDGER):
            text = read_tail(output).strip()
            why = (find_errors(text) or text.splitlines() or [shlex.join(command)])[-1]
            return CommitOutcome(failure=f"exit code {code}: {why}" if code else "it has trained no step")
        return self._compare(self._scratch.path / self._commits[0], run)

    def _compare(self, good: Path, run: Path) -> CommitOutcome:
        if (name := self._values.get("metric")) is not None:
            last = read_last_values(run)
            if not isinstance(other := last.get(name, {}).get("value"), int | float):
                return CommitOutcome(failure=f"there is no metric {name}, but {', '.join(sorted(last))}")
            one = read_last_values(good)[name]["value"]
            is_same = abs(one - other) <= self._values.get("tolerance", 0) or (math.isnan(one) and math.isnan(other))
            return CommitOutcome() if is_same else CommitOutcome((f"{one!r} {COMMITS[0]} and {other!r} {COMMITS[1]}",))
        step, what = find_first_difference(good, run, COMMITS)
        if step is not None:
            return CommitOutcome(tuple(what), step)
        counts = [count_records(each / LEDGER) for each in (good, run)]
        difference = f"{counts[0]} steps {COMMITS[0]} and {counts[1]} {COMMITS[1]}"
        return CommitOutcome() if counts[0] == counts[1] else CommitOutcome((difference,))
