"""What ranks print, through C and child processes too: shown on the terminal, and taken down in a log of each rank.

A rank's stdout and stderr are pipes (where they are shown on a terminal: one of its own, so that a bar is still drawn),
read by the `Recorder`: a process beside the ranks, so that what a rank has printed is not lost when it is killed, and
that neither a disk that is full nor a terminal that nobody reads can fail a rank. The log is a file of the launcher's
until the rank's run says, by `start_log`, where it is to be.
"""

import fcntl
import json
import os
import re
import select
import selectors
import shutil
import signal
import socket
import termios
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from samestep.console import escape
from samestep.files import open_regular
from samestep.world.environment import LOG, TERMINAL, read_log_pipe

READ_BYTES = 1 << 16
EARLY_BYTES = 1 << 26  # kept of what is shown anyway, for a log that may come
HELD_BYTES = 1 << 16  # of a line of a terminal
LEFT_BYTES = 1 << 20  # read of a rank that has ended: what it has left behind may write on for ever
DRAIN_S = 2.0  # for the terminal to take the last words of ranks that were killed

_DRESS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")  # colours, and moves of the cursor


def start_log(rank: int, path: Path) -> None:
    """Has what this rank prints, and has printed so far, written to `path`; without a launcher of ours, it is not."""
    pipe = read_log_pipe()
    if pipe is not None:
        with suppress(OSError):  # the recorder is gone
            os.write(pipe, (json.dumps({"rank": rank, "path": str(path.absolute())}) + "\n").encode())


@dataclass(frozen=True)
class Stream:
    """Where a rank writes, by one or both of its files 1 and 2.

    Attributes:
        inner, outer: the rank's end, and the recorder's.
        target: where it is shown; None: nowhere.
        is_terminal: a bar may be drawn on it.
    """

    rank: int
    files: tuple[int, ...]
    inner: int
    outer: int
    target: int | None
    is_terminal: bool = False


def open_streams(rank: int, out: int | None, err: int | None) -> list[Stream]:
    """The streams of a rank that is shown on the files `out` and `err`; None: it is not."""
    targets: list[tuple[tuple[int, ...], int | None]] = [((1,), out), ((2,), err)]
    if out is None or err is None:
        targets = [((1, 2), None)]
    elif os.path.sameopenfile(out, err):  # in one stream, they stay in order
        targets = [((1, 2), out)]
    streams = []
    for files, target in targets:
        if target is not None and os.isatty(target):
            with suppress(OSError):  # there is no terminal to be had: a pipe then
                outer, inner = os.openpty()
                settings = termios.tcgetattr(inner)
                settings[1] &= ~termios.OPOST  # the true one does that
                termios.tcsetattr(inner, termios.TCSANOW, settings)
                _copy_size(target, outer)
                streams.append(Stream(rank, files, inner, outer, target, is_terminal=True))
                continue
        outer, inner = os.pipe()
        streams.append(Stream(rank, files, inner, outer, target))
    return streams


def _copy_size(source: int, target: int) -> None:
    with suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(8))
        if size != fcntl.ioctl(target, termios.TIOCGWINSZ, bytes(8)):
            fcntl.ioctl(target, termios.TIOCSWINSZ, size)


class Recording:
    """The recorder of one start of ranks, for the process that forks it and them.

    Args:
        shown: rank -> whether it is shown.
        out, err: the launcher's stdout and stderr; closed by `begin`.
        directory: takes `rank<N>.log`: all that a rank has printed, or a link to the log of its run.
        private: what the recorder is to close: files that only this process needs.
    """

    def __init__(
        self, shown: Mapping[int, bool], out: int, err: int, directory: str, private: Iterable[socket.socket]
    ) -> None:
        self._streams = [
            stream
            for rank, is_shown in shown.items()
            for stream in open_streams(rank, *((out, err) if is_shown else (None, None)))
        ]
        self._files = [out, err]
        self._read, self._tell = os.pipe()
        self._socket, theirs = socket.socketpair()
        self._received = b""
        self._pid = os.fork()
        if self._pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                for mine in (*private, self._socket):
                    mine.close()
                for file in [self._tell, *(stream.inner for stream in self._streams)]:
                    os.close(file)
                Recorder(self._streams, self._read, theirs, err, directory, [r for r in shown if shown[r]]).run()
            finally:
                os._exit(1)
        theirs.close()
        os.close(self._read)
        for stream in self._streams:
            os.close(stream.outer)

    def enter(self, rank: int) -> dict[str, str]:
        """In the process that is to be `rank`: puts its streams into place. Returns variables for it."""
        self._socket.close()
        for stream in self._streams:
            for file in stream.files if stream.rank == rank else ():
                os.dup2(stream.inner, file)
            os.close(stream.inner)
        out, err = self._files
        os.close(out)
        os.set_inheritable(err, False)
        return {TERMINAL: f"{os.getpid()}:{err}", LOG: f"{os.getpid()}:{self._tell}"}

    def begin(self) -> None:
        """All ranks are forked: what only they and the recorder need is closed here."""
        for file in [*self._files, self._tell, *(stream.inner for stream in self._streams)]:
            os.close(file)

    def finish(self, rank: int) -> None:
        """A rank has ended: `receive` will say when what it has printed is shown and written."""
        with suppress(OSError):  # as `receive` will find
            self._socket.sendall((json.dumps({"ended": rank}) + "\n").encode())

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def receive(self) -> list[int] | None:
        """The ranks of which all has been taken down; None when the recorder is gone."""
        try:
            data = self._socket.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [int(line) for line in lines]

    def close(self) -> None:
        """Ends the recorder. It has `DRAIN_S` for what it still holds."""
        self._socket.close()
        deadline_s = time.monotonic() + DRAIN_S
        with suppress(ChildProcessError):
            while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline_s:
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
                    break
                time.sleep(0.001)


class Log:
    """The file that takes what one rank prints.

    Args:
        early: a path of the launcher's: the file itself until there is another, then a link to that one.
        is_shown: it is on the terminal as well, so that this file need not stand in for it.
    """

    def __init__(self, rank: int, early: str, is_shown: bool) -> None:
        self.rank = rank
        self._early, self._is_shown = early, is_shown
        self._path = early
        self._num_bytes = 0
        self._file: int | None = None
        with suppress(OSError):
            self._file = _open(early)

    def move(self, path: str) -> str:
        """From now on `path` takes it, and what came before as well. Returns what is wrong with it, if anything."""
        file = None
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = _open(path)
            if self._path == self._early and self._file is not None:
                with open(self._early, "rb") as source, open(file, "ab", closefd=False) as target:
                    shutil.copyfileobj(source, target)
            link = f"{self._early}.link"
            os.symlink(path, link)
            os.replace(link, self._early)
        except OSError as error:
            if file is not None:
                os.close(file)
            return self._describe(path, error)
        if self._file is not None:
            os.close(self._file)
        self._file, self._path = file, path
        return ""

    def write(self, data: bytes) -> str:
        """Adds to it. Returns what is wrong with it, if anything."""
        if self._file is None:
            return ""
        try:
            write_all(self._file, data)
        except OSError as error:
            failed, self._path = self._path, self._early
            os.close(self._file)
            self._file = None
            if not self._is_shown and failed != self._early:  # its last words must be somewhere
                with suppress(OSError):
                    os.unlink(self._early)
                    self._file = _open(self._early)
            return self._describe(failed, error)
        if self._is_shown and self._path == self._early:
            self._num_bytes += len(data)
            if self._num_bytes > EARLY_BYTES:
                os.ftruncate(self._file, 0)
                self._num_bytes = 0
        return ""

    def _describe(self, path: str, error: OSError) -> str:
        return f"rank {self.rank}'s log {path} cannot be written ({error.strerror}): it ends here, the run goes on"


class Recorder:
    """Reads what ranks print, until the process that has forked them says that they have ended, or is gone.

    Args:
        told: by which ranks tell where their logs are to be.
        control: to the process that has forked the ranks.
        terminal: takes warnings.
    """

    def __init__(
        self, streams: list[Stream], told: int, control: socket.socket, terminal: int, directory: str, shown: list[int]
    ) -> None:
        self._control, self._told, self._terminal = control, told, terminal
        self._targets = {stream.outer: stream.target for stream in streams}
        self._held = dict.fromkeys(self._targets, b"")
        ranks = dict.fromkeys(stream.rank for stream in streams)
        self._logs = {rank: Log(rank, os.path.join(directory, f"rank{rank}.log"), rank in shown) for rank in ranks}
        self._open = list(streams)
        self._received = {control.fileno(): b"", told: b""}
        self._cut: list[int] = []  # the ranks whose logs end early
        self._selector = selectors.DefaultSelector()
        for stream in streams:
            self._selector.register(stream.outer, selectors.EVENT_READ, stream)
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(told, selectors.EVENT_READ)

    def run(self) -> NoReturn:
        is_needed = True
        while is_needed:
            ready = {key.fd: key.data for key, _ in self._selector.select()}
            for stream in [stream for stream in self._open if stream.outer in ready]:
                self._read(stream)
            if self._told in ready:
                self._take_paths()
            if self._control.fileno() in ready:
                is_needed = self._take_ends()
        for rank in self._logs:
            self._drain(rank)
        if len(self._cut) > 1:
            others = ", ".join(map(str, sorted(self._cut[1:])))
            self._say(f"the logs of {len(self._cut) - 1} other ranks of this start end early as well: {others}")
        os._exit(0)

    def _take(self, file: int) -> list[dict[str, Any]] | None:
        """The messages that have come; None when nobody is there any more."""
        try:
            data = os.read(file, READ_BYTES)
        except OSError:
            data = b""
        *lines, self._received[file] = (self._received[file] + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None

    def _take_paths(self) -> None:
        messages = self._take(self._told)
        if messages is None:
            self._selector.unregister(self._told)
        for message in messages or []:
            self._warn(message["rank"], self._logs[message["rank"]].move(message["path"]))

    def _take_ends(self) -> bool:
        messages = self._take(self._control.fileno())
        for message in messages or []:
            self._drain(message["ended"])
            with suppress(OSError):
                self._control.sendall(f"{message['ended']}\n".encode())
        return messages is not None

    def _read(self, stream: Stream) -> int:
        """Passes on what there is. Returns how many bytes."""
        try:
            data = os.read(stream.outer, READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:  # a terminal whose other side is closed
            data = b""
        if not data:
            self._selector.unregister(stream.outer)
            self._open.remove(stream)
            self._end_line(stream)
            os.close(stream.outer)
            return 0
        target = self._targets[stream.outer]
        if target is not None:
            if stream.is_terminal:
                _copy_size(target, stream.outer)
            try:
                write_all(target, data)
            except OSError:  # nobody reads any more: no reason to lose the run, or its log
                self._targets[stream.outer] = None
        self._write(stream, data)
        return len(data)

    def _write(self, stream: Stream, data: bytes) -> None:
        if stream.is_terminal:
            *lines, held = (self._held[stream.outer] + data).split(b"\n")
            data = b"".join(_settle(line) + b"\n" for line in lines)
            held = held[held.rfind(b"\r", 0, -1) + 1 :]
            self._held[stream.outer] = held
            if len(held) > HELD_BYTES:
                data, self._held[stream.outer] = data + held, b""
        if data:
            self._warn(stream.rank, self._logs[stream.rank].write(data))

    def _end_line(self, stream: Stream) -> None:
        held, self._held[stream.outer] = self._held[stream.outer], b""
        if held:
            self._warn(stream.rank, self._logs[stream.rank].write(_settle(held)))

    def _drain(self, rank: int) -> None:
        """All that a rank has printed that has ended; not what a process writes that it has left behind."""
        for stream in [stream for stream in self._open if stream.rank == rank]:
            left = LEFT_BYTES
            os.set_blocking(stream.outer, False)
            while left > 0 and (num_bytes := self._read(stream)):
                left -= num_bytes
            self._end_line(stream)

    def _warn(self, rank: int, problem: str) -> None:
        """Of the first at once. Where one log cannot be written, most others cannot, either: those at the end."""
        if problem and rank not in self._cut:
            self._cut.append(rank)
            if len(self._cut) == 1:
                self._say(problem)

    def _say(self, sentence: str) -> None:
        with suppress(OSError):
            os.write(self._terminal, f"samestep: {escape(sentence)}\n".encode())


def _settle(line: bytes) -> bytes:
    """What a line of a terminal shows in the end, where it was drawn over and over."""
    return _DRESS.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])


def _open(path: str) -> int:
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def write_all(file: int, data: bytes) -> None:
    """As os.write, until all is written. Raises OSError."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(file, view) :]
        except BlockingIOError:  # whoever has it, too, wants it so
            select.select([], [file], [])
