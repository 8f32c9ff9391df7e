"""`run.json`: the identity of the run in a directory, and the changes by its starts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.console import hide_secrets
from samestep.decoding import as_json
from samestep.errors import RunDirectoryError
from samestep.files import read_bytes
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

    in_force: Mapping[str, Any]  # "optimizer.lr" -> 0.1; a list if parameter groups differ
    asked: Mapping[str, Any] = field(default_factory=dict)
    overridden: str = ""
    samples: Sequence[str] = ()
    git: Mapping[str, Any] = field(default_factory=dict)
    script: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def read_record(run_dir: Path, called: object, remedy: str = "repair it") -> dict[str, Any]:
    """Read `run.json`.

    Args:
        called: the run's directory as the user gave it, for messages.
        remedy: what to do about a damaged file, for the message.

    Raises:
        FileNotFoundError: there is none.
        RunDirectoryError: it cannot be read, or a newer samestep wrote it.
    """
    try:
        text = read_bytes(run_dir / RECORD)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunDirectoryError(
            f"{called}/{RECORD} cannot be read ({error.strerror}): repair it", code="SS408"
        ) from None
    return parse_run_record(text, called, remedy)


def parse_run_record(text: bytes, called: object, remedy: str = "repair it") -> dict[str, Any]:
    """Parse the content of `run.json`. Arguments and errors as for `read_record`."""
    try:
        record = parse_record(RECORD, text)
    except ValueError as error:
        raise RunDirectoryError(f"{called}/{RECORD} cannot be read as JSON ({error}): {remedy}", code="SS408") from None
    if record.get("format") != FORMAT:
        raise RunDirectoryError(
            f"{called}/{RECORD} has format {record.get('format')}, this samestep reads {FORMAT}: update samestep",
            code="SS409",
        )
    return record


def build_record(
    before: Mapping[str, Any], options: StartOptions, *, step: int, rewinds: Sequence[int]
) -> tuple[dict[str, Any], list[str]]:
    """Return the record of a start, and warnings about what changed since the run began.

    Args:
        before: the record of the previous start; {} for the first.
        step: number of completed steps.
        rewinds: the steps to which the run went back although there were later snapshots.
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
    # An override at this very step belongs to a start that this one replaces.
    rows = [row for row in before.get("changes", []) if row["after_step"] < step + (OVERRIDE not in row["changed"])]
    git = before.get("git") or dict(options.git)
    found["git"] = describe_changes(git, options.git) if options.git else ""  # recorded without a warning
    rows += [{"after_step": step, "changed": changed} for changed in found.values() if changed and step]
    record = {"format": FORMAT, "samestep": __version__, "numbers": dict(numbers), "machine": dict(machine)}
    record |= {"settings": dict(options.in_force), "asked": dict(options.asked), "samples": samples}
    record |= {"config": config, "rewinds": [*rewinds], "changes": rows, "loops": before.get("loops", [])}
    record |= {"git": git} if git else {}
    record |= {"continues": before["continues"]} if "continues" in before else {}
    record |= {"script": script} if (script := dict(options.script) or before.get("script")) else {}
    return record, warnings


def list_loops(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the numbers of each loop of a run, for `LoopPlan.from_numbers`."""
    numbers = record.get("numbers", {})
    of_all = {name: value for name, value in numbers.items() if name not in ("num_lanes", "epoch_length", "shards")}
    return [numbers, *(of_all | loop for loop in record.get("loops", []))]


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a text such as "optimizer.lr 0.1 -> 0.01"; "" if nothing changed."""
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {_shorten(before.get(name))} -> {_shorten(now.get(name))}" for name in names)


def find_different(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Describe the numbers that both runs have and that differ; "" if none do."""
    differing = [(name, there[name], here[name]) for name in here if name in there and there[name] != here[name]]
    return "; ".join(
        f"{each} {_quote(was)} there, {_quote(now)} here"
        for name, before, after in differing
        for each, was, now in _split(name, before, after)
    )


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
