"""Captures the output of the ranks, also that of C code and child processes: shows it, and writes a log per rank.

The stdout and stderr of a rank are pipes. A process beside the ranks, the recorder, reads them. So a rank that is
killed loses no output, and a full disk stops no rank. A log is a file of the launcher until the rank calls `start_log`
with its path in the run's directory.
"""

import json
import os
import select
import selectors
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from samestep.console import escape
from samestep.decoding import decode
from samestep.files import open_regular, replacing
from samestep.processes import wait_or_kill
from samestep.world.environment import LOG, TERMINAL, read_log_pipe

READ_BYTES = 1 << 16  # the capacity of a pipe
LEFT_BYTES = 1 << 20  # limit after the end of a rank, because a child process that survives it can write forever
DRAIN_S = 2.0  # limit for a terminal to accept the last output of killed ranks


def start_log(rank: int, path: Path) -> None:
    """Write the past and future output of this rank to `path`. Does nothing under another launcher."""
    pipe = read_log_pipe()
    if pipe is not None:
        with suppress(OSError):  # the recorder has ended
            os.write(pipe, json.dumps([rank, str(path.absolute())]).encode() + b"\n")


@dataclass(frozen=True)
class Stream:
    """A pipe that replaces stdout, stderr or both in a rank.

    Attributes:
        files: the file descriptors that it replaces.
        target: the file descriptor that shows the output; None: not shown.
        outer, inner: the ends of the recorder and of the rank.
    """

    rank: int
    files: tuple[int, ...]
    target: int | None
    outer: int
    inner: int


def open_streams(rank: int, is_shown: bool, out: int, err: int) -> list[Stream]:
    """Open the streams of a rank."""
    if not is_shown:
        return [Stream(rank, (1, 2), None, *os.pipe())]
    if os.path.sameopenfile(out, err):  # one stream keeps the order
        return [Stream(rank, (1, 2), out, *os.pipe())]
    return [Stream(rank, (1,), out, *os.pipe()), Stream(rank, (2,), err, *os.pipe())]


class Log:
    """The log of one rank. `early` is a path in the launcher's directory: the log until `move`, then a link to it."""

    def __init__(self, early: str) -> None:
        self.path = early
        self._early = early
        self._file = _open(early)

    def move(self, path: str) -> None:
        """Continue the log in `path`, with its content so far. Raises OSError."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = _open(path)
        if self.path == self._early:
            with open(self._early, "rb", opener=open_regular) as source, open(file, "ab", closefd=False) as target:
                shutil.copyfileobj(source, target)
        with replacing(Path(self._early)) as link:
            os.symlink(path, link)
        os.close(self._file)
        self._file = file
        self.path = path

    def write(self, data: bytes) -> None:
        """Append. Raises OSError."""
        write_all(self._file, data)

    def end(self) -> None:
        """End the log early, and forget it: what it holds is not the last output of the rank."""
        os.close(self._file)
        with suppress(OSError):
            os.unlink(self._early)


class Recording:
    """Records the output of one set of ranks, in a process beside them: the recorder.

    The process that forks both creates it. The recorder reads until `finish`, or the end of that process.

    Args:
        shown: rank -> whether it is shown.
        out, err: the launcher's stdout and stderr; `begin` closes them.
        directory: receives `rank<N>.log`: the output of a rank, or a link to the log in the run's directory.
        fork: forks a process that calls a function; returns its pid.
    """

    def __init__(
        self, shown: Mapping[int, bool], out: int, err: int, directory: str, fork: Callable[[Callable[[], None]], int]
    ) -> None:
        self._streams = [each for rank, is_shown in shown.items() for each in open_streams(rank, is_shown, out, err)]
        self._files = [out, err]
        self._paths, self._path_writer = os.pipe()  # on which ranks send the paths of their logs
        self._socket, self._control = socket.socketpair()
        self._pid = fork(partial(self._record, [*shown], directory))
        self._control.close()
        os.close(self._paths)
        for stream in self._streams:
            os.close(stream.outer)

    def enter(self, rank: int) -> dict[str, str]:
        """In the process of `rank`: install its streams. Returns environment variables for it."""
        self._socket.close()
        out, err = self._files
        variables = {TERMINAL: f"{os.getpid()}:{err}", LOG: f"{os.getpid()}:{self._path_writer}"}
        for stream in self._streams:
            for file in stream.files if stream.rank == rank else ():
                os.dup2(stream.inner, file)
            os.close(stream.inner)
        os.close(out)
        os.set_inheritable(err, False)
        return variables

    def begin(self) -> None:
        """After the fork of all ranks: close the files that only they and the recorder use."""
        for file in [*self._files, self._path_writer, *(stream.inner for stream in self._streams)]:
            os.close(file)

    def finish(self) -> None:
        """After the end of all ranks: make the recorder write its buffered output and end."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_WR)

    def fileno(self) -> int:
        """The file descriptor that becomes readable when the recorder has ended, for select."""
        return self._socket.fileno()

    def close(self) -> None:
        """Wait for the end of the recorder, which may take `DRAIN_S` to write its buffered output."""
        self._socket.close()
        wait_or_kill(self._pid, DRAIN_S)

    # --- in the recorder --------------------------------------------------------------------------------------------

    def _record(self, ranks: list[int], directory: str) -> NoReturn:
        self._socket.close()
        for file in [self._path_writer, *(stream.inner for stream in self._streams)]:
            os.close(file)
        self._logs = {rank: Log(f"{directory}/rank{rank}.log") for rank in ranks}
        self._has_warned = False
        self._request = b""  # the beginning of one
        self._selector = selectors.DefaultSelector()
        for stream in self._streams:
            self._selector.register(stream.outer, selectors.EVENT_READ, stream)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._paths, selectors.EVENT_READ)
        is_needed = True
        while is_needed:
            ready = [key for key, _ in self._selector.select()]
            for key in ready:
                if key.data is not None:
                    self._read(key.data)
            for key in ready:  # after the output that was written before
                if key.fd == self._paths:
                    self._move_logs()
                elif key.fileobj is self._control:
                    is_needed = False
        for stream in [*self._streams]:
            self._drain(stream)
        os._exit(0)

    def _move_logs(self) -> None:
        data = os.read(self._paths, READ_BYTES)
        if not data:  # all ranks have ended
            self._selector.unregister(self._paths)
        *lines, self._request = (self._request + data).split(b"\n")
        for line in lines:
            rank, path = decode(line, tuple[int, str])
            if rank in self._logs:
                try:
                    self._logs[rank].move(path)
                except OSError as error:
                    self._end_log(rank, path, error)

    def _read(self, stream: Stream) -> int:
        """Read a stream once, show it and write it. Returns the number of bytes."""
        try:
            data = os.read(stream.outer, READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._selector.unregister(stream.outer)
            self._streams.remove(stream)
            return 0
        if stream.target is not None:
            with suppress(OSError):  # the terminal has closed: continue the run and its log
                write_all(stream.target, data)
        if (log := self._logs.get(stream.rank)) is not None:
            try:
                log.write(data)
            except OSError as error:
                self._end_log(stream.rank, log.path, error)
        return len(data)

    def _drain(self, stream: Stream) -> None:
        """Read the remaining output of a rank that has ended, but not all that surviving child processes write."""
        left = LEFT_BYTES
        os.set_blocking(stream.outer, False)
        while left > 0 and (num_bytes := self._read(stream)):
            left -= num_bytes

    def _end_log(self, rank: int, path: str, error: OSError) -> None:
        """End a log early. Says so once: most others have the same cause."""
        self._logs.pop(rank).end()
        if not self._has_warned:
            self._has_warned = True
            why = f"rank {rank}'s log {path} cannot be written ({error.strerror})"
            with suppress(OSError):
                os.write(self._files[1], f"samestep: {escape(why)}: it ends here; the run continues\n".encode())


def _open(path: str) -> int:
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def write_all(file: int, data: bytes) -> None:
    """`os.write` until everything is written. Raises OSError."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(file, view) :]
        except BlockingIOError:  # another process has made the file non-blocking
            select.select([], [file], [])
