"""Detects files that a data set holds open while its workers are forked, and that the workers read."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import IOBase
from itertools import islice
from multiprocessing.synchronize import Lock, RLock
from typing import Any

MAX_DEPTH = 3
MAX_OBJECTS = 1000
MAX_VALUES = 100  # of one object


class SharedFiles:
    """The files that a data set holds when its workers are forked. All processes share one position in each.

    A worker that reads at that position finds what another one has left. Reading by `os.pread` or `mmap` does not move
    it, nor does a file that each worker opens again. A data set that holds a lock is left out: its workers may take
    turns.
    """

    def __init__(self, dataset: Any) -> None:
        held = [*islice(_walk(dataset), MAX_OBJECTS)]
        is_locked = any(isinstance(each, Lock | RLock) for each in held)
        self._files: list[tuple[str, IOBase, int]] = []
        for each in () if is_locked else held:
            if isinstance(each, IOBase) and (position := _find_position(each)) is not None:
                self._files.append((str(getattr(each, "name", "")), each, position))

    def find_moved(self) -> str:
        """Return the name of a file whose position has changed since the fork, once for all files; else ""."""
        for name, file, position in self._files:
            if _find_position(file) not in (position, None):
                self._files.clear()
                return name
        return ""


def _walk(dataset: Any) -> Iterator[Any]:
    things = [(dataset, 0)]
    seen = set()
    for thing, depth in things:  # grows during the loop
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing
        if depth == MAX_DEPTH or isinstance(thing, IOBase | type):
            continue
        values: Iterable[Any] = ()
        if type(thing) in (list, tuple):
            values = thing
        elif type(thing) is dict:
            values = thing.values()
        else:
            with suppress(Exception):  # of a `__getattribute__` of the script
                values = vars(thing).values()
        things += [(value, depth + 1) for value in islice(values, MAX_VALUES)]


def _find_position(file: IOBase) -> int | None:
    """Return the position that a regular file's descriptor has; None without one, such as if the file is closed."""
    with suppress(OSError, ValueError):
        number = file.fileno()
        if stat.S_ISREG(os.fstat(number).st_mode):
            return os.lseek(number, 0, os.SEEK_CUR)
    return None
