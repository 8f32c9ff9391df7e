"""Run's arguments, after what a launcher said and after they were checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import Error
from samestep.plan.schedule import check_numbers, default_micro_batch_size
from samestep.snapshot.policy import Every, parse_every
from samestep.world.environment import Overrides


@dataclass(frozen=True)
class Settings:
    """What a run is to do, as numbers. `run_dir` None: nothing on disk. `resume` None: never."""

    run_dir: Path | None
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
    log_every: int
    max_steps: int | None
    deterministic: bool
    bucket_cap_bytes: int

    def numbers(self) -> dict[str, Any]:
        """The part of them that is the run's identity: with other ones, it is another run."""
        names = ("seed", "batch_size", "micro_batch_size", "threads", "precision")
        return {name: getattr(self, name) for name in names}


def build_settings(overrides: Overrides, world_size: int, **arguments: Any) -> Settings:
    """Run's arguments with the launcher's overrides put over them.

    Raises:
        Error: numbers that make no run.
    """
    for name in arguments:
        said = getattr(overrides, name, None)
        if said is not None:
            arguments[name] = said
    run_dir, batch_size = arguments.pop("run_dir"), arguments["batch_size"]
    if arguments["micro_batch_size"] is None:
        arguments["micro_batch_size"] = default_micro_batch_size(batch_size)
    check_numbers(batch_size, arguments["micro_batch_size"], world_size)
    for name in ("seed", "threads", "keep", "log_every", "max_steps"):
        least = 0 if name == "seed" else 1
        value = arguments[name]
        if value is None and name == "max_steps":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise Error(f"{name} must be a whole number of at least {least}, not {value!r}")
    if arguments["reduction"] not in ("exact", "fast"):
        raise Error(f"reduction must be exact or fast, not {arguments['reduction']!r}")
    bucket_cap_mb = arguments.pop("bucket_cap_mb")
    if not bucket_cap_mb > 0:
        raise Error(f"bucket_cap_mb must be above 0, not {bucket_cap_mb!r}")
    arguments["snapshot_every"] = parse_every(arguments["snapshot_every"])
    arguments["resume"] = _parse_resume(arguments["resume"])
    return Settings(
        run_dir=None if run_dir is None else Path(run_dir),
        bucket_cap_bytes=int(bucket_cap_mb * 2**20),
        **arguments,
    )


def _parse_resume(resume: str | int | bool | None) -> str | int | None:
    if resume is None or resume is False or resume == "never":
        return None
    if resume is True:
        return "latest"
    if isinstance(resume, str) and resume.isdecimal():
        return int(resume)
    return resume
