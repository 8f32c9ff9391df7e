"""`run.json`: the identity of the run in a directory, and its changes by each start; and where a start continues."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.config import is_url
from samestep.console import hide_secrets, say
from samestep.decoding import Json, as_json
from samestep.errors import Error, RunDirectoryError, explain
from samestep.files import read_bytes
from samestep.snapshot.manifest import Snapshot
from samestep.snapshot.store import SNAPSHOTS, Store
from samestep.version import __version__
from samestep.watch.records import RECORD, parse_record

FORMAT = 1
OVERRIDE = "override: "
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class StartOptions:
    """The run, its settings of optimizers and schedules, and its data, as one start has them.

    Attributes:
        in_force: the settings with which the run began, or those that have replaced them since.
        asked: the script's settings that differ from `in_force`, and are not used.
        overridden: a description of the settings that this start replaces, beginning with `OVERRIDE`; "" for none.
        samples: hashes of a few samples of the data set.
        git: commit of the script's work tree, and whether files differ from it; {} outside a work tree.
        script: the script's file, hash and arguments; {} if unknown.
        numbers, machine: the run's identity, and everything else on which its bits depend.
        config: the `config` argument of `Run`.
    """

    in_force: Json  # "optimizer.lr" -> 0.1; a list if parameter groups differ
    asked: Json = field(default_factory=dict)
    overridden: str = ""
    samples: Sequence[str] = ()
    git: Json = field(default_factory=dict)
    script: Json = field(default_factory=dict)
    numbers: Json = field(default_factory=dict)
    machine: Json = field(default_factory=dict)
    config: Json = field(default_factory=dict)


@dataclass(frozen=True)
class ResumePoint:
    """The point at which a run begins or continues, the same on all ranks.

    Attributes:
        step: number of completed steps.
        meta: the `meta` in the snapshot's manifest; None if the run begins.
        snapshot: for `Location.open`; None if the run begins.
        rewinds: the steps to which the run has gone back although there were later snapshots. If this start goes back,
            its step is the last of them.
        num_recorded: number of steps in the ledger before this start, in the copy that has most. Those after `step` are
            lost.
    """

    step: int = 0
    meta: Json | None = None
    snapshot: Snapshot | None = None
    rewinds: Sequence[int] = ()
    num_recorded: int = 0

    @property
    def is_beginning(self) -> bool:
        """Return whether the run begins, because nothing is saved. A snapshot can also be of step 0."""
        return self.meta is None

    @property
    def metrics_bytes(self) -> int:
        """Return how many bytes of the rows of metrics belong to the completed steps."""
        return 0 if self.meta is None else self.meta["metrics_bytes"]


@dataclass(frozen=True)
class CopyContent:
    """The content of one copy of a run at a start.

    Attributes:
        newest_step: the step of the newest snapshot, damaged or not; 0 if there is none.
        num_recorded: number of steps in the ledger.
        found: the snapshot from which the run would resume, of which every byte was checked; None if there is none.
        error: why there is none, although there are snapshots or one was requested; None if the run may begin.
    """

    newest_step: int
    num_recorded: int
    found: Snapshot | None = None
    error: Error | None = None


def choose(contents: Sequence[CopyContent], rewinds: Sequence[int]) -> tuple[int, ResumePoint]:
    """Choose the newest undamaged snapshot of all copies.

    Args:
        contents: of the copies.
        rewinds: as in `ResumePoint`, before this start.

    Returns:
        The index of the first copy that has the snapshot, and the point.

    Raises:
        Error: no copy has an undamaged snapshot, although one should exist.

    Example::

        >>> choose([CopyContent(0, 0)], [])
        (0, ResumePoint(step=0, meta=None, snapshot=None, rewinds=[], num_recorded=0))
    """
    steps = [-1 if each.found is None else each.found.step for each in contents]
    source = steps.index(max(steps))
    found = contents[source].found
    num_recorded = max(each.num_recorded for each in contents)
    if found is None:
        for each in contents:
            if each.error is not None:
                raise each.error
        return source, ResumePoint(rewinds=rewinds, num_recorded=num_recorded)
    if any(each.newest_step > found.step for each in contents):
        rewinds = [*rewinds, found.step]
    return source, ResumePoint(found.step, found.manifest["meta"], found, rewinds, num_recorded)


@contextmanager
def open_run(run: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a run's directory and its `run.json` for a tool. Raises Error if the run cannot be read."""
    if is_url(run):
        raise Error(f"{run} is a URL: copy the run to a directory, and name that", code="SS416")
    try:
        yield Path(run), read_run(Path(run), run)
    except BrokenPipeError:  # the reader of the output has closed it
        raise
    except OSError as error:
        known = explain(error)
        if known is not None and known.code == "SS113":  # from writing the output, or temporary files
            raise
        raise Error(
            f"{error.filename or run} cannot be read ({error.strerror}): fix that, or name another one", code="SS416"
        ) from None


def read_run(run: Path, called: object) -> dict[str, Any]:
    """Read a run's `run.json`. `called`: the run as the user gave it. Raises Error."""
    if not run.is_dir():
        raise Error(f"there is no directory {called}: name a run's directory", code="SS415")
    try:
        text = read_bytes(run / RECORD)
    except FileNotFoundError:
        raise Error(
            f"{called} is no run's directory, it has no {RECORD}: name the directory that holds {SNAPSHOTS}/",
            code="SS415",
        ) from None
    except OSError as error:
        raise RunDirectoryError(
            f"{called}/{RECORD} cannot be read ({error.strerror}): repair it", code="SS408"
        ) from None
    return parse_run_record(text, called)


def parse_run_record(text: bytes, called: object) -> dict[str, Any]:
    """Parse the content of `run.json`. Arguments and errors as for `read_run`."""
    try:
        record = parse_record(RECORD, text)
    except ValueError as error:
        raise RunDirectoryError(
            f"{called}/{RECORD} cannot be read as JSON ({error}): repair it, or name another run directory",
            code="SS408",
        ) from None
    if record.get("format") != FORMAT:
        raise RunDirectoryError(
            f"{called}/{RECORD} has format {record.get('format')}, this samestep reads {FORMAT}: update samestep",
            code="SS409",
        )
    return record


def find_snapshot(store: Store, called: str, which: int | str) -> Snapshot:
    """Find the snapshot that a tool shows or reads, see `Store.find`. `called`: the run as the user gave it.

    Raises Error if there is none.
    """
    snapshot = store.find(which, warn=say)
    if snapshot is None:
        raise Error(f"{called} has no snapshot yet", code="SS411")
    return snapshot


def build_record(before: Json, options: StartOptions, point: ResumePoint) -> tuple[dict[str, Any], list[str]]:
    """Return the record of a start at a point, and warnings about what changed since the run began.

    Args:
        before: the record of the previous start; {} for the first.
    """
    config = as_json(dict(options.config))
    numbers, machine, samples = options.numbers, options.machine, options.samples
    found = {
        "the machine, and the bits with it": describe_changes(before.get("machine", machine), machine),
        "config": describe_changes(hide_secrets(before.get("config", config)), config),
        "settings": options.overridden,
        "the data": describe_changes({"samples": before.get("samples") or samples}, {"samples": samples}),
    }
    warnings = [f"changed since the run began: {what} ({changed})" for what, changed in found.items() if changed]
    git = before.get("git") or options.git
    found["git"] = describe_changes(git, options.git) if options.git else ""  # recorded without a warning
    # An override at this very step belongs to a start that this one replaces.
    rows = [
        row for row in before.get("changes", []) if row["after_step"] < point.step + (OVERRIDE not in row["changed"])
    ]
    rows += [{"after_step": point.step, "changed": changed} for changed in found.values() if changed and point.step]
    record = {
        "format": FORMAT,
        "samestep": __version__,
        "numbers": dict(numbers),
        "machine": dict(machine),
        "settings": dict(options.in_force),
        "asked": dict(options.asked),
        "samples": samples,
        "config": config,
        "rewinds": [*point.rewinds],
        "changes": rows,
        "loops": before.get("loops", []),
        "git": dict(git),
        "script": dict(options.script or before.get("script", {})),
        "continues": before.get("continues"),
    }
    return record, warnings


def list_loops(record: Json) -> list[dict[str, Any]]:
    """Return the numbers of each loop of a run, for `LoopPlan.from_numbers`."""
    numbers = record.get("numbers", {})
    of_all = {name: value for name, value in numbers.items() if name not in ("num_lanes", "epoch_length", "shards")}
    return [numbers, *(of_all | loop for loop in record.get("loops", []))]


def describe_changes(before: Json, now: Json) -> str:
    """Return a text such as "optimizer.lr 0.1 -> 0.01"; "" if nothing changed."""
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {_shorten(before.get(name))} -> {_shorten(now.get(name))}" for name in names)


def find_different(there: Json, here: Json) -> str:
    """Describe the numbers that both runs have and that differ; "" if none do."""
    names = [name for name in here if name in there and there[name] != here[name]]
    rows = [row for name in names for row in _split(name, there[name], here[name])]
    return "; ".join(f"{name} {_quote(was)} there, {_quote(now)} here" for name, was, now in rows)


def _split(name: str, before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """Return the entries of two dicts that differ, by names such as "models.model"; other values as they are."""
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        return [(name, before, after)]
    keys = dict.fromkeys([*before, *after])
    pairs = [(f"{name}.{key}", before.get(key, "none"), after.get(key, "none")) for key in keys]
    return [(each, was, now) for each, was, now in pairs if was != now]


def _quote(value: Any) -> str:
    """Quote a text of several words, such as the description of a model."""
    return f'"{value}"' if isinstance(value, str) and " " in value else str(value)


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 4]} ..."
