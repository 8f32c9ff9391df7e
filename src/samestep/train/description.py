"""Describes a start of a run for its record and its trackers: the script's commit, versions, device, data."""

import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.files import read_bytes
from samestep.hashing import hash_bytes
from samestep.processes import run_captured
from samestep.snapshot.run_record import StartOptions
from samestep.train.context import RunContext
from samestep.version import __version__
from samestep.watch.trackers import TrackerInfo

GIT_TIMEOUT_S = 5.0


def read_commit() -> dict[str, Any]:
    """Return the git commit of the script's work tree, and whether tracked files differ from it.

    Returns:
        {"commit": "3f2a...", "is_dirty": False}; {} outside of a work tree, without git, or if git fails.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    directory = Path(script).absolute().parent if script else Path.cwd()
    if not any((parent / ".git").exists() for parent in (directory, *directory.parents)):
        return {}
    # No locks and no monitor: this must not write to the work tree or start programs that it names.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(directory), "status"]
    command += ["--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty"]
    try:
        done = run_captured(command, limit_s=GIT_TIMEOUT_S)
    except OSError:
        return {}
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if not commits or commits[0] == "(initial)":
        return {}
    return {"commit": commits[0], "is_dirty": any(not line.startswith("#") for line in lines)}


def describe_script() -> dict[str, Any]:
    """Return the file of the script, the start of its sha256, and its arguments; {} in a notebook.

    Returns:
        {"file": "train.py", "sha256": "9f86d081884c7d65", "arguments": ["--lr", "0.1"]}
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    with suppress(OSError):
        if file is not None:
            content = read_bytes(Path(file), is_given=True)
            sha256 = hash_bytes(content)[:16]
            return {"file": Path(file).name, "sha256": sha256, "arguments": sys.argv[1:]}
    return {}


def describe_run(context: RunContext, machine: Mapping[str, Any], options: StartOptions) -> TrackerInfo:
    """Return the description of a run that trackers get at its start.

    Args:
        machine: see `describe_machine`.
        options: the options of this start.
    """
    directory = context.location.path
    environment = {"samestep": __version__, "python": platform.python_version(), "torch": machine["torch"]}
    environment |= {"device": machine["device"], "world_size": context.world_size}
    return TrackerInfo(
        "" if directory is None else directory.name,
        directory,
        context.script_config,
        0,
        options=context.config.identity(),
        environment=environment,
        git_commit=options.git.get("commit", ""),
        git_is_dirty=options.git.get("is_dirty", False),
        data=tuple(options.samples),
    )
