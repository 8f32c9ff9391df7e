"""Every option of a run, declared once.

The fields of `RunConfig` give each option its type, default, check and help text. The checks of `samestep.Run`, the
`SAMESTEP_*` variables, the command-line options, the identity of a run in `run.json` and the table in
`docs/options.md` follow from this declaration. Imports nothing slow.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from samestep.console import join_words
from samestep.errors import InvalidType, InvalidValue

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Shard = Literal["optimizer", "fsdp2"]
ExchangeDtype = Literal["bf16"]

PREFIX = "SAMESTEP_"
MAX_THREADS = 1 << 12

Overrides = Mapping[str, Any]  # Options that were set outside the script, by name.
Check = Callable[[str, Any], Any]

_INTERVAL = re.compile(r"(\d+)\s*(?:(step|epoch)s?|(s|min|h))?")
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")
_URL_AS_PATH = re.compile(r"[a-z][a-z0-9+.-]+:/")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def _accept(name: str, value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Option:
    """A command-line option.

    Attributes:
        type: type of the value: str, int, bool (the option takes no value) or list (it may be repeated).
        metavar: name of the value in `--help`.
        help: what the option sets.
        check: maps the option's name and a value to the value to use. Raises Error.
        is_identity: each run directory has one value of the option; a start with a different value is an error.
        is_shared: the value must be the same on all ranks.
        interceptor: "module:class" of the interceptor that a run installs if the option is set; "" for none.
    """

    type: type
    metavar: str
    help: str
    check: Check = _accept
    is_identity: bool = False
    is_shared: bool = True
    interceptor: str = ""

    def parse(self, name: str, text: str) -> Any:
        """Convert the text of a command line or an environment variable to the option's type.

        Args:
            name: the option as the user wrote it, such as "--seed" or "SAMESTEP_SEED", for the message.

        Raises:
            Error: the text is not of this type.
        """
        if self.type is bool:
            if text.lower() not in (*_TRUE, *_FALSE):
                raise InvalidValue(f"{name} must be 1 or 0, not {text!r}", code="SS101")
            return text.lower() in _TRUE
        return parse_whole(name, text) if self.type is int else text


def parse_whole(name: str, text: str) -> int:
    """Convert the text of an option or variable to an integer. Raises Error if it is none."""
    try:
        return int(text)
    except ValueError:
        raise InvalidValue(f"{name} must be a whole number, not {text!r}", code="SS101") from None


@dataclass(frozen=True)
class Interval:
    """An interval of some "steps", "epochs" or seconds ("s")."""

    count: int
    unit: str = "steps"

    def __str__(self) -> str:
        """Return the interval as a user writes it: "10", "2epochs" or "30s"."""
        return f"{self.count}{self.unit}".removesuffix("steps")

    def is_due(self, step: int, epochs_done: int | None = None) -> bool:
        """Return whether the interval ends at this position. One in seconds never does; see `has_passed`.

        Args:
            step: number of completed steps.
            epochs_done: number of completed epochs; None except at the end of an epoch.
        """
        done = {"steps": step, "epochs": epochs_done}.get(self.unit)
        return bool(done and done % self.count == 0)

    def has_passed(self, elapsed_s: float) -> bool:
        """Return whether this is an interval in seconds of at most `elapsed_s`."""
        return self.unit == "s" and elapsed_s >= self.count


# What an option with an interval may take -> an example for its message.
_EXAMPLES = {
    "steps": "a number of steps such as 10",
    "epochs": "of epochs such as 2epochs",
    "s": "a time such as 30min",
    "never": "never",
}


def parse_interval(name: str, value: Any, *, allowed: Collection[str] = tuple(_EXAMPLES)) -> Interval | None:
    """Parse an interval.

    10, "10" and "10steps" are steps, "2epochs" is epochs, "30min" (s, min, h) is a time; None and "never" give None.

    Args:
        name: name of the option, for the message.
        allowed: units of `Interval`, and "never".

    Raises:
        Error: the value is none of these.
    """
    if value in (None, "never") and "never" in allowed:
        return None
    match = None if isinstance(value, bool) else _INTERVAL.fullmatch(str(value).strip())
    if match is not None and int(match[1]) > 0:
        unit = match[2] or match[3] or "step"
        interval = Interval(int(match[1]) * _SECONDS.get(unit, 1), "s" if unit in _SECONDS else f"{unit}s")
        if interval.unit in allowed:
            return interval
    *others, last = [_EXAMPLES[each] for each in allowed]
    raise InvalidValue(f"{name} is {value!r}: give {', '.join(others)}, or {last}", code="SS101")


def is_url(run_dir: object) -> bool:
    """Return whether a run directory is given as a URL for fsspec."""
    return isinstance(run_dir, str) and _URL.match(run_dir) is not None


def whole(least: int, most: float = math.inf, *, optional: bool = False) -> Check:
    """Return the check of an option that is a whole number."""

    def check(name: str, value: Any) -> Any:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            span = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            raise InvalidValue(f"{name} must be a whole number {span}, not {value!r}", code="SS101")
        return value

    return check


def choice(*values: Any) -> Check:
    """Return the check of an option that has one of some values. "none" means None, if that is one of them."""

    def check(name: str, value: Any) -> Any:
        given = None if value == "none" and None in values else value
        if type(given) not in map(type, values) or given not in values:
            words = ["none" if each is None else str(each) for each in values]
            raise InvalidValue(f"{name} must be {join_words(words, 'or')}, not {value!r}", code="SS101")
        return given

    return check


def _check_device(name: str, value: Any) -> Any:
    if value is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", str(value)):
        raise InvalidValue(f"{name} must be cpu, cuda or one GPU such as cuda:1, not {str(value)!r}", code="SS101")
    return None if value is None else str(value)


def _check_run_dir(name: str, value: Any) -> Any:
    if value is None or is_url(value):
        return value
    if isinstance(value, PathLike) and _URL_AS_PATH.match(str(value)):
        raise InvalidValue(
            f"{name} is a path made of a URL, {value}, which has lost a slash: give the URL as a string", code="SS101"
        )
    if not isinstance(value, str | PathLike) or not str(value) or "\0" in str(value):
        raise InvalidValue(
            f"{name} must be the path of a directory, or None for a run that leaves no files, not {value!r}",
            code="SS101",
        )
    return Path(value).expanduser()


def _check_resume(name: str, value: Any) -> Any:
    if value is None or value is False or value == "never":
        return None
    if value is True:
        return "latest"
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if not isinstance(value, str | int) or value == "" or (isinstance(value, int) and value < 0):
        raise InvalidValue(
            f"{name} must be latest, a step, a snapshot's name such as best, or never, not {value!r}", code="SS101"
        )
    return value


def _check_source(name: str, value: Any) -> Any:
    if value is not None and (not isinstance(value, str | PathLike) or not str(value)):
        raise InvalidValue(f"{name} must be the directory of a run, not {value!r}", code="SS101")
    return None if value is None else str(value)


def find_trackers() -> "dict[str, EntryPoint]":
    """Return the trackers of installed packages: name -> entry point in the group `samestep.trackers`."""
    from importlib.metadata import entry_points  # slow

    return {each.name: each for each in entry_points(group="samestep.trackers")}


def is_tracker(thing: Any) -> bool:
    """Return whether an object has the methods of `samestep.Tracker`. A class is not a tracker."""
    methods = (getattr(thing, method, None) for method in ("start", "log", "finish"))
    return not isinstance(thing, type) and all(map(callable, methods))


def _check_trackers(name: str, value: Any) -> Any:
    """Return trackers and names of trackers as a tuple, from a sequence of them or from comma-separated names."""
    if isinstance(value, str):
        value = [word for word in map(str.strip, value.split(",")) if word and value != "none"]
    elif not isinstance(value, Sequence):
        raise InvalidType(f"{name} must be a list such as [samestep.TensorBoard()], not {value!r}", code="SS102")
    for each in value:
        if isinstance(each, str) and each not in (known := find_trackers()):
            there = ", ".join(sorted(known)) or "none: install samestep again"
            raise InvalidValue(f"{name} names {each!r}, which is not a tracker; there are {there}", code="SS807")
        if not isinstance(each, str) and not is_tracker(each):
            raise InvalidType(
                f"{name} has {each!r}, which is not a tracker: pass objects such as samestep.TensorBoard()",
                code="SS102",
            )
    return tuple(value)


def _declare(
    kind: type, metavar: str, text: str, check: Check = _accept, *, default: Any = MISSING, **settings: Any
) -> Any:
    """Return a field of `RunConfig` with its `Option`."""
    return field(default=default, metadata={"option": Option(kind, metavar, text, check, **settings)})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The options of one run, checked. Built by `samestep.train.context.build_config`.

    Those without a default here are arguments of `samestep.Run`, which has their defaults. The others are set outside
    the script only.
    """

    run_dir: Path | str | None = _declare(
        str,
        "DIR",
        "directory of the run (snapshots, metrics, ledger), or a URL such as s3://bucket/run",
        _check_run_dir,
        is_shared=False,
    )
    local_dir: str | None = _declare(
        str,
        "DIR",
        "directory for the working copies of runs at URLs; default: ~/.cache/samestep/runs",
        default=None,
        is_shared=False,
    )
    batch_size: int = _declare(
        int, "N", "samples per optimizer step, over all ranks (not per device)", is_identity=True
    )
    micro_batch_size: int = _declare(
        int, "N", "samples per forward and backward pass; must divide the batch size", is_identity=True
    )
    seed: int = _declare(int, "N", "seed of the run", whole(0), is_identity=True)
    num_threads: int = _declare(
        int,
        "N",
        "CPU threads per rank, which change the bits",
        whole(1, MAX_THREADS),
        is_identity=True,
    )
    precision: Precision = _declare(
        str,
        "P",
        "fp32, bf16 or fp16: the type that run.autocast() uses; tf32: fp32 with TF32 kernels on a GPU",
        choice(*get_args(Precision)),
        is_identity=True,
    )
    shard: Shard | None = _declare(
        str,
        "S",
        "optimizer: divide the optimizers' state among the ranks; fsdp2: also parameters and gradients; none: "
        "every rank keeps all of it",
        choice(*get_args(Shard), None),
    )
    shard_copies: int = _declare(
        int,
        "N",
        "how many ranks hold each part of the optimizers' state that shard divides; --heal needs 2",
        whole(1, 2),
    )
    pipeline: int | None = _declare(
        int,
        "P",
        "number of stages of the model, which can be on different ranks; see docs/pipeline.md",
        whole(1, optional=True),
        is_identity=True,
    )
    pipeline_ranks: int | None = _declare(
        int,
        "N",
        "number of ranks that have the stages of a pipeline together; default: as many as possible",
        whole(1, optional=True),
        default=None,
    )
    workers: int | None = _declare(
        int,
        "K",
        "number of workers, each of which makes inner steps of its own in every step; see docs/diloco.md",
        whole(1, optional=True),
        is_identity=True,
    )
    inner_steps: int | None = _declare(
        int,
        "H",
        "number of inner steps of a worker in every step",
        whole(1, optional=True),
        is_identity=True,
    )
    exchange_dtype: ExchangeDtype | None = _declare(
        str,
        "T",
        "bf16: exchange gradients in bfloat16, at half the bytes; none: exchange them as they are",
        choice("bf16", None),
        is_identity=True,
    )
    device: str | None = _declare(
        str, "D", "cpu, cuda or one GPU such as cuda:1; default: cuda if there is one", _check_device, is_shared=False
    )
    backend: Literal["gloo", "nccl"] | None = _declare(
        str,
        "B",
        "gloo: exchange gradients through host memory, so ranks can share a GPU; default: nccl on GPUs",
        choice("gloo", "nccl", None),
        default=None,
    )
    deterministic: bool = _declare(
        bool, "", "use deterministic kernels only, even if the script says otherwise", choice(True, False)
    )
    snapshot_every: Interval | None = _declare(
        str, "E", "interval of snapshots: 10 (steps), 2epochs, 30min, or never", parse_interval
    )
    keep_last: int = _declare(int, "N", "how many numbered snapshots to keep", whole(1))
    resume: str | int | None = _declare(
        str,
        "R",
        "snapshot to resume from: latest, a step, a name such as best, or never",
        _check_resume,
        is_shared=False,
    )
    fresh: bool = _declare(
        bool,
        "",
        "start from step 0 in a new directory beside the run's directory",
        choice(True, False),
        default=False,
        is_shared=False,
    )
    continue_from: str | None = _declare(
        str,
        "RUN",
        "begin a new run with the state of this one; RUN@400 or RUN@best for a snapshot that is not its newest",
        _check_source,
        default=None,
        is_shared=False,
    )
    override: bool = _declare(
        bool,
        "",
        "resume with the script's optimizer and scheduler settings and its data",
        choice(True, False),
        default=False,
    )
    max_steps: int | None = _declare(int, "N", "stop after this many steps in total", whole(1, optional=True))
    log_every: Interval = _declare(
        str,
        "E",
        "interval of rows in metrics.jsonl: 10 (steps) or 1epochs",
        partial(parse_interval, allowed=("steps", "epochs")),
    )
    compare_every: Interval | None = _declare(
        str,
        "E",
        "interval of replica checks (comparing the ranks' models): 100 (steps), 1epochs or never",
        partial(parse_interval, allowed=("steps", "epochs", "never")),
    )
    # Checked steps load further samples, so they are planned ahead.
    check_compute_every: Interval | None = _declare(
        str,
        "N",
        "every N steps, recompute a micro-batch of each rank on another rank, and compare the bits; default: never",
        partial(parse_interval, allowed=("steps", "never")),
        interceptor="samestep.second_opinion:SecondOpinion",
    )
    trackers: tuple[Any, ...] = _declare(
        str,
        "T,T",
        "where else to log metrics: none, or tensorboard, wandb, mlflow, other installed ones",
        _check_trackers,
        is_shared=False,
    )
    stuck_after_s: int | None = _declare(
        int,
        "S",
        "stop a run without progress for this long; 0: never; default: learned, at least 300; first steps: 1800",
        whole(0, optional=True),
        default=None,
        is_shared=False,
    )

    @property
    def divides_state(self) -> bool:
        """Whether the ranks divide the optimizers' state, so that they hold other parts of it."""
        return self.shard is not None or self.workers is not None

    def identity(self) -> dict[str, Any]:
        """Return the options that identify the run: a run directory belongs to one value of each."""
        return {name: getattr(self, name) for name, option in OPTIONS.items() if option.is_identity}

    def shared(self) -> dict[str, Any]:
        """Return the options that must be the same on all ranks. (For directories, rank 0's values are used.)"""
        values = {name: getattr(self, name) for name, option in OPTIONS.items() if option.is_shared}
        return {name: str(value) if isinstance(value, Interval) else value for name, value in values.items()}


# The options of RunConfig by name. Launchers make their command-line options from this table.
OPTIONS: dict[str, Option] = {each.name: each.metadata["option"] for each in fields(RunConfig)}

# Options of a run that has only the interceptors of a tool.
NO_INTERCEPTORS = {name: "never" for name, option in OPTIONS.items() if option.interceptor}


def name_flag(name: str) -> str:
    """Return an option's name on the command line: keep_last -> --keep-last."""
    return f"--{name.replace('_', '-')}"


def to_flags(options: Mapping[str, Any]) -> list[str]:
    """Return command-line arguments that set options: keep_last=5, fresh=True -> ["--keep-last", "5", "--fresh"]."""
    return [
        word
        for name, value in options.items()
        for word in ([name_flag(name)] if value is True else [name_flag(name), str(value)])
    ]


def format_flags(**options: Any) -> str:
    """Return options as text for a command line: keep_last=5, fresh=True -> "--keep-last 5 --fresh"."""
    return " ".join(to_flags(options))


def to_variables(overrides: Overrides) -> dict[str, str]:
    """Return environment variables that pass options to the ranks: keep_last=5 -> SAMESTEP_KEEP_LAST: "5"."""
    return {
        PREFIX + name.upper(): str(int(value) if isinstance(value, bool) else value)
        for name, value in overrides.items()
        if value is not None
    }
