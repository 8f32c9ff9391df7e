"""The standard output and error of a rank: those of the launcher, or a log.

A log is a file of the launcher until the run begins, which has a directory for it (docs/dev/logs.md).
"""

import io
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.console import say, set_terminal
from samestep.files import open_regular, replacing

_early: Path | None = None  # under samestep's launcher, where it finds this rank's log, or a link to it


class Output(io.FileIO):
    """A standard file that drops what cannot be written, as on a full disk or after `| head`: no run ends for that."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def install(early: Path, terminal: int, *, is_shown: bool) -> None:
    """In the process of a rank: let file descriptors 1 and 2, if not shown, write to `early`, a file of the launcher.

    `terminal`: the launcher's standard error.
    """
    global _early
    _early = early
    set_terminal(terminal)
    if not is_shown:
        with open(early, "xb", opener=open_regular) as file:
            _replace_output(file.fileno())


def start_log(path: Path) -> None:
    """Write the past and future output of this rank to `path`, unless it is shown. Only under samestep's launcher."""
    early = _early
    if early is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_output(early):
            with open(path, "ab", opener=open_regular) as file:
                if not early.is_symlink():
                    with open(early, "rb", opener=open_regular) as source:
                        shutil.copyfileobj(source, file)
                        file.flush()
                _replace_output(file.fileno())
        with replacing(early) as link:  # by which the launcher finds the log
            os.symlink(path.absolute(), link)
    except OSError as error:
        say(f"the log {path} of this rank cannot be written ({error.strerror})")


def open_streams() -> None:
    """Let Python write each line at once and in one piece (also with PYTHONUNBUFFERED).

    So a killed rank loses no line, and the lines of several ranks do not mix.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            buffer = io.BufferedWriter(Output(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True))


def _is_output(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(1))
    return False


def _replace_output(file: int) -> None:
    for standard in (1, 2):
        os.dup2(file, standard)
