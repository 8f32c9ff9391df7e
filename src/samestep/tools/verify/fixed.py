"""Replaces the script's clock, the entropy that seeds its generators, and its rank by values that are always equal.

`samestep verify` runs this in each rank of a run that searches for a cause. Only calls from the script's own files get
the fixed values, and the calling lines are recorded. torch, samestep and other libraries need the real clock for their
time limits.
"""

import datetime
import hashlib  # noqa: TID251 random numbers of any length
import json
import os
import random
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from samestep.files import open_regular
from samestep.world.environment import intercept_reads

CLOCK, ENTROPY, HASH, RANK = "clock", "entropy", "hash", "rank"
START_S = 1_700_000_000
CLOCKS = ("time", "monotonic", "perf_counter", "process_time")  # and each with _ns
RANK_VALUES = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
PASSED_THROUGH = (
    __name__,
    intercept_reads.__module__,
    "random",
    "uuid",
    "secrets",
)  # modules that call on behalf of the script
PLACES = "sources"


class Source:
    """Counts the script's calls of one kind, and records the calling lines."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._kind, self._file = kind, directory / PLACES
        self._num_calls = 0
        self._noted: set[str] = set()

    def ask(self, name: str) -> int | None:
        """Return the number of this call; None if it does not come from the script."""
        frame: Any = sys._getframe(1)
        while frame is not None and (
            frame.f_code.co_filename.startswith("<") or frame.f_globals.get("__name__") in PASSED_THROUGH
        ):
            frame = frame.f_back
        if frame is None or not is_of_script(frame.f_code.co_filename):
            return None
        place = f"{name} in {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if place not in self._noted:
            self._noted.add(place)
            with open(self._file, "a", opener=open_regular) as file:
                print(json.dumps([self._kind, place]), file=file)
        self._num_calls += 1
        return self._num_calls

    def draw(self, name: str, num_bytes: int) -> bytes | None:
        """Return the same bytes for the n-th call in each run; None if the call does not come from the script."""
        number = self.ask(name)
        return None if number is None else hashlib.shake_128(str(number).encode()).digest(num_bytes)


def is_of_script(file: str) -> bool:
    """Return whether a source file belongs to the script, and not to Python, an installed library or samestep."""
    libraries = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]))
    return not file.startswith(libraries) and "-packages" not in file


def begin(options: dict[str, Any]) -> None:
    """Fix the sources in `options["fixed"]`, and record the calling lines in `options["dir"]`. Call first."""
    directory = Path(options["dir"])
    if CLOCK in options["fixed"]:
        _fix_clock(Source(CLOCK, directory))
    if ENTROPY in options["fixed"]:
        _fix_entropy(Source(ENTROPY, directory))
    if RANK in options["fixed"]:
        _fix_rank(Source(RANK, directory))


def _fix_clock(source: Source) -> None:
    def wrap(name: str, real: Callable[[], Any]) -> Callable[[], Any]:
        def read() -> Any:
            number = source.ask(f"time.{name}")
            if number is None:
                return real()
            ns = START_S * 10**9 + number * 10**6  # advances, because a script may wait for a time
            return ns if name.endswith("_ns") else ns / 1e9

        return read

    for name in (*CLOCKS, *(f"{name}_ns" for name in CLOCKS)):
        setattr(time, name, wrap(name, getattr(time, name)))
    real = datetime.datetime

    class Kind(type):
        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, real)

    class Fixed(real, metaclass=Kind):  # type: ignore[misc,valid-type]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            number = source.ask("datetime.now")
            return real.now(tz) if number is None else real.fromtimestamp(START_S + number / 1000, tz)

        today = now

        @classmethod
        def utcnow(cls) -> Any:
            number = source.ask("datetime.utcnow")
            return real.utcnow() if number is None else real.utcfromtimestamp(START_S + number / 1000)

    datetime.datetime = Fixed  # type: ignore[misc]


def _fix_entropy(source: Source) -> None:
    import numpy.random.bit_generator as numpy_bits

    urandom, seed, randbits = os.urandom, random.Random.seed, numpy_bits.randbits  # type: ignore[attr-defined]

    def fixed_urandom(size: int) -> bytes:
        drawn = source.draw("os.urandom", size)
        return urandom(size) if drawn is None else drawn

    def fixed_seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None and (drawn := source.draw("random.Random", 16)) is not None:
            a = drawn
        seed(self, a, version)

    def fixed_randbits(k: int) -> int:
        drawn = source.draw("numpy.random", (k + 7) // 8)
        return int(randbits(k)) if drawn is None else int.from_bytes(drawn) >> -k % 8

    os.urandom = random._urandom = fixed_urandom  # type: ignore[attr-defined]  # noqa: SLF001
    random.Random.seed = fixed_seed  # type: ignore[method-assign]
    random.seed = random._inst.seed  # noqa: SLF001
    numpy_bits.randbits = fixed_randbits  # type: ignore[attr-defined]


def _fix_rank(source: Source) -> None:
    import torch.distributed as dist

    def wrap(name: str, value: int, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **options: Any) -> Any:
            return real(*args, **options) if source.ask(name) is None else value

        return read

    def read_attribute(run: Any, name: str, value: int) -> Any:
        return vars(run)[name] if source.ask(f"run.{name}") is None else value

    def set_attribute(run: Any, own: Any, name: str) -> None:
        vars(run)[name] = own

    run = resolve_name("samestep:Run")  # as the script gets it: tools do not import train
    for name in ("rank", "local_rank", "world_size"):
        value = RANK_VALUES[name.upper()]
        setattr(
            run,
            name,
            property(partial(read_attribute, name=name, value=value), partial(set_attribute, name=name)),
        )
    for name in ("rank", "world_size"):
        function = f"get_{name}"
        setattr(
            dist, function, wrap(f"torch.distributed.{function}", RANK_VALUES[name.upper()], getattr(dist, function))
        )

    def read_variable(name: str, own: str) -> str:
        value = RANK_VALUES.get(name)
        return own if value is None or source.ask(f"os.environ[{name!r}]") is None else str(value)

    intercept_reads(read_variable)
