"""Captures the output of the ranks, also that of C code and child processes: shows it, and writes a log per rank.

The stdout and stderr of a rank are pipes, or pseudo-terminals if they are shown on a terminal, so that progress bars
work. The recorder, a process beside the ranks, reads them. So a rank that is killed loses no output, and neither a
full disk nor a blocked terminal can stop a rank. A log is a file of the launcher until the rank calls `start_log` with
its path in the run's directory.
"""

import fcntl
import json
import os
import re
import select
import selectors
import shutil
import socket
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from msgspec import Struct
from msgspec.structs import asdict

from samestep.console import escape
from samestep.decoding import decode
from samestep.files import open_regular, replacing
from samestep.processes import wait_or_kill
from samestep.waiting import wait_until
from samestep.world.environment import LOG, TERMINAL, read_log_pipe

READ_BYTES = 1 << 16  # the capacity of a pipe
EARLY_BYTES = 1 << 26  # kept of a shown rank's output before `start_log`
HELD_BYTES = 1 << 16  # of an incomplete line of a terminal
LEFT_BYTES = 1 << 20  # limit after the end of a rank, because a child process that survives it can write forever
READ_S = 2.0  # limit for the recorder to read a request
DRAIN_S = 2.0  # limit for a terminal to accept the last output of killed ranks

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")  # colours and cursor movements


class _Request(Struct):
    """What a rank asks of the recorder.

    Attributes:
        path: where its log continues; "" for a request to show the rank.
        gone: ranks that have died.
    """

    rank: int
    path: str = ""
    gone: list[int] = []

    def encode(self) -> bytes:
        """Return a line."""
        return json.dumps(asdict(self)).encode() + b"\n"


def start_log(rank: int, path: Path) -> None:
    """Write the past and future output of this rank to `path`. Does nothing under another launcher."""
    pipe = read_log_pipe()
    if pipe is not None:
        with suppress(OSError):  # the recorder has ended
            os.write(pipe, _Request(rank, str(path.absolute())).encode())


def show_instead(rank: int, gone: Sequence[int]) -> None:
    """Show the future output of this rank, if that of a rank was shown which has died. As `start_log` otherwise.

    If such a rank was on another host, it is shown on the terminal of this one.

    Returns when the recorder has read the request: it would not show what it reads together with it.
    """
    pipe = read_log_pipe()
    if pipe is not None:
        with suppress(OSError):
            os.write(pipe, _Request(rank, gone=[*gone]).encode())
            wait_until(lambda: not _count_unread(pipe), READ_S, every_s=0.001)


def _count_unread(pipe: int) -> int:
    """Return the number of bytes in a pipe, given either end of it."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


@dataclass
class Stream:
    """A pipe or pseudo-terminal that replaces stdout, stderr or both in a rank.

    Attributes:
        files: the file descriptors that it replaces.
        inner, outer: the ends of the rank and of the recorder.
        target: the file descriptor that shows the output; None: not shown.
        held: the incomplete last line of a terminal.
    """

    rank: int
    files: tuple[int, ...]
    inner: int
    outer: int
    target: int | None
    is_terminal: bool = False
    held: bytes = b""


def open_stream(rank: int, files: tuple[int, ...], target: int | None) -> Stream:
    """Open a stream that is shown on `target`: a pseudo-terminal if that is a terminal, else a pipe."""
    if target is not None and os.isatty(target):
        with suppress(OSError):  # no pseudo-terminal is available: use a pipe
            outer, inner = os.openpty()
            settings = termios.tcgetattr(inner)
            settings[1] &= ~termios.OPOST  # the real terminal does that
            termios.tcsetattr(inner, termios.TCSANOW, settings)
            _copy_size(target, outer)
            return Stream(rank, files, inner, outer, target, is_terminal=True)
    outer, inner = os.pipe()
    return Stream(rank, files, inner, outer, target)


def open_streams(rank: int, is_shown: bool, out: int, err: int) -> list[Stream]:
    """Open the streams of a rank."""
    if not is_shown:
        return [open_stream(rank, (1, 2), None)]
    if os.path.sameopenfile(out, err):  # one stream keeps the order
        return [open_stream(rank, (1, 2), out)]
    return [open_stream(rank, (1,), out), open_stream(rank, (2,), err)]


def _copy_size(source: int, target: int) -> None:
    with suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(8))
        if size != fcntl.ioctl(target, termios.TIOCGWINSZ, bytes(8)):
            fcntl.ioctl(target, termios.TIOCSWINSZ, size)


class Log:
    """The log of one rank.

    `early` is a path in the launcher's directory: the log itself until `move`, then a link to it. If `is_shown`, the
    output is also on the terminal, so that `early` need not keep it after an error.
    """

    def __init__(self, rank: int, early: str, is_shown: bool) -> None:
        self.rank = rank
        self._early = early
        self._is_shown = is_shown
        self._path = early
        self._num_bytes = 0
        self._file: int | None = None
        with suppress(OSError):
            self._file = _open(early)

    def move(self, path: str) -> str:
        """Continue the log in `path`, with its content so far. Returns the problem, if any."""
        file = None
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = _open(path)
            if self._path == self._early and self._file is not None:
                with open(self._early, "rb", opener=open_regular) as source, open(file, "ab", closefd=False) as target:
                    shutil.copyfileobj(source, target)
            with replacing(Path(self._early)) as link:
                os.symlink(path, link)
        except OSError as error:
            if file is not None:
                os.close(file)
            return self._describe(path, error)
        if self._file is not None:
            os.close(self._file)
        self._file = file
        self._path = path
        return ""

    def write(self, data: bytes) -> str:
        """Append. Returns the problem, if any."""
        if self._file is None:
            return ""
        try:
            write_all(self._file, data)
        except OSError as error:
            failed = self._path
            self._path = self._early
            os.close(self._file)
            self._file = None
            if not self._is_shown and failed != self._early:  # the launcher shows the last lines of a failed rank
                with suppress(OSError):
                    os.unlink(self._early)
                    self._file = _open(self._early)
                    write_all(self._file, data)
            return self._describe(failed, error)
        if self._is_shown and self._path == self._early:
            self._num_bytes += len(data)
            if self._num_bytes > EARLY_BYTES:
                os.ftruncate(self._file, 0)
                self._num_bytes = 0
        return ""

    def _describe(self, path: str, error: OSError) -> str:
        return f"rank {self.rank}'s log {path} cannot be written ({error.strerror}): it ends here; the run continues"


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
        self._paths, self._path_writer = os.pipe()  # on which ranks send the paths of their logs, and what to show
        self._socket, self._control = socket.socketpair()
        self._pid = fork(partial(self._record, shown, directory))
        self._control.close()
        os.close(self._paths)
        for stream in self._streams:
            os.close(stream.outer)

    def enter(self, rank: int) -> dict[str, str]:
        """In the process of `rank`: install its streams. Returns environment variables for it."""
        for stream in self._streams:
            for file in stream.files if stream.rank == rank else ():
                os.dup2(stream.inner, file)
            os.close(stream.inner)
        out, err = self._files
        os.close(out)
        os.set_inheritable(err, False)
        return {TERMINAL: f"{os.getpid()}:{err}", LOG: f"{os.getpid()}:{self._path_writer}"}

    def leave(self) -> None:
        """In the process of a rank: close what only the process that has forked it uses."""
        self._socket.close()

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

    def _record(self, shown: Mapping[int, bool], directory: str) -> NoReturn:
        self._socket.close()
        for file in [self._path_writer, *(stream.inner for stream in self._streams)]:
            os.close(file)
        self._logs = {rank: Log(rank, f"{directory}/rank{rank}.log", is_shown) for rank, is_shown in shown.items()}
        self._shown = {rank for rank, is_shown in shown.items() if is_shown}
        self._cut: list[int] = []  # the ranks whose logs end early
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
        for rank in self._logs:
            self._drain(rank)
        if len(self._cut) > 1:
            others = ", ".join(map(str, sorted(self._cut[1:])))
            self._print(f"the logs of {len(self._cut) - 1} other ranks of this start end early as well: {others}")
        os._exit(0)

    def _move_logs(self) -> None:
        data = os.read(self._paths, READ_BYTES)
        if not data:  # all ranks have ended
            self._selector.unregister(self._paths)
        *lines, self._request = (self._request + data).split(b"\n")
        for line in lines:
            request = decode(line, _Request)
            if request.path:
                self._warn(request.rank, self._logs[request.rank].move(request.path))
            else:
                self._show(request.rank, request.gone)

    def _show(self, rank: int, gone: Sequence[int]) -> None:
        if any(other in self._shown or other not in self._logs for other in gone):  # the second: it was on another host
            self._shown.add(rank)
            for stream in self._streams:
                if stream.rank == rank and stream.target is None:
                    stream.target = self._files[0]

    def _read(self, stream: Stream) -> int:
        """Read a stream once, show it and write it. Returns the number of bytes."""
        try:
            data = os.read(stream.outer, READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:  # a terminal whose other side is closed
            data = b""
        if not data:
            self._selector.unregister(stream.outer)
            self._streams.remove(stream)
            self._end_line(stream)
            os.close(stream.outer)
            return 0
        if stream.target is not None:
            if stream.is_terminal:
                _copy_size(stream.target, stream.outer)
            try:
                write_all(stream.target, data)
            except OSError:  # the terminal has closed: continue the run and its log
                stream.target = None
        self._write(stream, data)
        return len(data)

    def _write(self, stream: Stream, data: bytes) -> None:
        if stream.is_terminal:
            *lines, held = (stream.held + data).split(b"\n")
            data = b"".join(_end_line(line) + b"\n" for line in lines)
            stream.held = held[held.rfind(b"\r", 0, -1) + 1 :]
            if len(stream.held) > HELD_BYTES:
                data = data + stream.held
                stream.held = b""
        if data:
            self._warn(stream.rank, self._logs[stream.rank].write(data))

    def _end_line(self, stream: Stream) -> None:
        held = stream.held
        stream.held = b""
        if held:
            self._warn(stream.rank, self._logs[stream.rank].write(_end_line(held)))

    def _drain(self, rank: int) -> None:
        """Read the remaining output of a rank that has ended, but not all that surviving child processes write."""
        for stream in [stream for stream in self._streams if stream.rank == rank]:
            left = LEFT_BYTES
            os.set_blocking(stream.outer, False)
            while left > 0 and (num_bytes := self._read(stream)):
                left -= num_bytes
            self._end_line(stream)

    def _warn(self, rank: int, problem: str) -> None:
        """Print the first problem at once. Most others have the same cause and are printed together at the end."""
        if problem and rank not in self._cut:
            self._cut.append(rank)
            if len(self._cut) == 1:
                self._print(problem)

    def _print(self, sentence: str) -> None:
        with suppress(OSError):
            os.write(self._files[1], f"samestep: {escape(sentence)}\n".encode())


def _end_line(line: bytes) -> bytes:
    """Return the final content of a terminal line that was drawn repeatedly."""
    return _ESCAPES.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])


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
