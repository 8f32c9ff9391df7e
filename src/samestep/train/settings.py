"""Run's arguments, after what a launcher said and after they were checked."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from samestep.errors import Error
from samestep.plan.schedule import check_numbers, default_micro_batch_size
from samestep.snapshot.object_store import is_url
from samestep.snapshot.policy import Every, parse_every
from samestep.world.environment import Environment, advise, check_threads

_URL_AS_PATH = re.compile(r"[a-z][a-z0-9+.-]+:/")

_replaced: dict[str, str] = {}  # a launcher's directory -> the one that this process's script has given in its place


@dataclass(frozen=True)
class Settings:
    """What a run is to do, as numbers. `run_dir` None: nothing on disk. `resume` None: never."""

    run_dir: Path | str | None  # str: a URL
    local_dir: str | None
    batch_size: int
    micro_batch_size: int
    seed: int
    precision: str
    reduction: str
    threads: int
    snapshot_every: Every | None
    keep: int
    resume: str | int | None
    fresh: bool
    override: bool
    log_every: int
    compare_every: int
    max_steps: int | None
    deterministic: bool
    bucket_cap_bytes: int | None

    def numbers(self) -> dict[str, Any]:
        """The part of them that is the run's identity: with other ones, it is another run."""
        names = ("seed", "batch_size", "micro_batch_size", "threads", "precision")
        return {name: getattr(self, name) for name in names}

    def alike(self) -> dict[str, Any]:
        """The part of them that must be the same on all ranks. (Of the directories, rank 0's counts.)"""
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in ("run_dir", "local_dir", "fresh", "resume")
        }


def build_settings(environment: Environment, **arguments: Any) -> Settings:
    """Run's arguments with the launcher's overrides put over them.

    Raises:
        Error: numbers that make no run, or a launcher's one directory for runs of several.
    """
    overrides = environment.overrides
    if overrides.run_dir is not None and environment.trace is None:  # a trace is of the first run alone
        _check_one_directory(overrides.run_dir, arguments["run_dir"])
    for name in arguments:
        said = getattr(overrides, name, None)
        if said is not None:
            arguments[name] = said
    run_dir, batch_size = arguments.pop("run_dir"), arguments["batch_size"]
    if arguments["micro_batch_size"] is None:
        arguments["micro_batch_size"] = default_micro_batch_size(batch_size)
    check_numbers(batch_size, arguments["micro_batch_size"], environment.world_size, environment.spell)
    _check_kinds(arguments)
    for name in ("seed", "threads", "keep", "log_every", "compare_every", "max_steps"):
        least = 0 if name in ("seed", "compare_every") else 1
        value = arguments[name]
        if value is None and name == "max_steps":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise Error(f"{name} must be a whole number of at least {least}, not {value!r}")
    check_threads(arguments["threads"])
    if arguments["reduction"] not in ("exact", "fast"):
        raise Error(f"reduction must be exact or fast, not {arguments['reduction']!r}")
    bucket_cap_mb = arguments.pop("bucket_cap_mb")
    if bucket_cap_mb is not None and not 0 < bucket_cap_mb < math.inf:
        raise Error(f"bucket_cap_mb must be above 0, not {bucket_cap_mb!r}")
    arguments["snapshot_every"] = parse_every(arguments["snapshot_every"])
    arguments["resume"] = _parse_resume(arguments["resume"])
    return Settings(
        run_dir=_parse_run_dir(run_dir),
        bucket_cap_bytes=None if bucket_cap_mb is None else int(bucket_cap_mb * 2**20),
        **arguments,
    )


def check_extras(trackers: Any, config: Any) -> None:
    """Raises Error where what goes beside a run's settings is of the wrong kind."""
    needed = ("start", "log", "finish")
    if isinstance(trackers, str) or not isinstance(trackers, Sequence):
        raise Error(f"trackers must be a list such as [samestep.TensorBoard()], not {trackers!r}")
    for tracker in trackers:
        if isinstance(tracker, type) or not all(callable(getattr(tracker, name, None)) for name in needed):
            raise Error(f"trackers holds {tracker!r}, which is no tracker: give objects such as samestep.TensorBoard()")
    if config is not None and not isinstance(config, Mapping):
        raise Error(f"config must be a dict such as vars(args), not a {type(config).__name__}")


def check_count(what: str, count: Any) -> None:
    """Raises Error where `run.epochs` or `run.steps` was not given a number of them."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise Error(f"run.{what} needs a number of {what} of at least 1, not {count!r}")


def check_name(name: Any) -> str:
    """The name of a snapshot to be taken. Raises Error for what cannot be one."""
    usable = isinstance(name, str) and name.isascii() and name.isidentifier() and len(name) <= 64
    if not usable or name in ("latest", "never"):
        raise Error(f"a snapshot's name is letters, digits and underscores, such as best, not {name!r}")
    return str(name)


def build_never_error(place: object) -> Error:
    """That of a run with `resume` never, where there are snapshots."""
    ways = f"{advise('resume', 'latest')}, or {advise('fresh')}"
    return Error(f"{place} already has snapshots and resume is never: start with {ways}")


def _check_one_directory(said: str, given: Any) -> None:
    """Refuses a script's further runs (the folds of a cross-validation): they would find the first one at its end."""
    before = _replaced.setdefault(said, str(given))
    if before != str(given):
        raise Error(
            f"this script makes several runs, one in {before} and one in {given}, and a launcher's --run-dir (or "
            f"SAMESTEP_RUN_DIR) has them share {said}: leave it out, and the runs live where the script says"
        )


def _check_kinds(arguments: Mapping[str, Any]) -> None:
    kinds = (("precision", str, "a name"), ("bucket_cap_mb", int | float | None, "a number"),
             ("deterministic", bool, "True or False"), ("fresh", bool, "True or False"),
             ("override", bool, "True or False"))  # fmt: skip
    for name, kind, words in kinds:
        if not isinstance(arguments[name], kind):
            raise Error(f"{name} must be {words}, not {arguments[name]!r}")


def _parse_run_dir(run_dir: Any) -> Path | str | None:
    if run_dir is None or is_url(run_dir):
        return run_dir  # type: ignore[no-any-return]
    if isinstance(run_dir, PathLike) and _URL_AS_PATH.match(str(run_dir)):
        raise Error(f"run_dir is a path made of a URL, {run_dir}, which has lost a slash: give the URL as a string")
    if not isinstance(run_dir, str | PathLike) or not str(run_dir) or "\0" in str(run_dir):
        raise Error(f"run_dir must be the path of a directory, or None for a run that leaves no files, not {run_dir!r}")
    return Path(run_dir).expanduser()


def _parse_resume(resume: Any) -> str | int | None:
    if resume is None or resume is False or resume == "never":
        return None
    if resume is True:
        return "latest"
    if isinstance(resume, str) and resume.isdecimal():
        return int(resume)
    if not isinstance(resume, str | int) or resume == "" or (isinstance(resume, int) and resume < 0):
        raise Error(f"resume must be latest, a step, a snapshot's name such as best, or never, not {resume!r}")
    return resume
