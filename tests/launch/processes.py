"""Run the samestep command as from a shell, and find its processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import psutil
from support.commands import Popen
from support.hosts import Host
from support.waiting import DEADLINE_S, wait_until


class Command:
    """Starts `samestep` in a directory, and finds all its processes.

    Attributes:
        python: the interpreter.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.python = directory, sys.executable
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP", "OMP"))}
        self.started: list[Popen] = []

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def words(self, *arguments: str, program: str = "samestep") -> list[str]:
        """The command line of `start`."""
        return [self.python, "-m", program, *arguments] if program else [self.python, *arguments]

    def start(
        self,
        *arguments: str,
        program: str = "samestep",
        stdout: int | IO[str] = subprocess.PIPE,
        host: Host | None = None,
        real: bool = False,
    ) -> Popen:
        """Start it in its own process group, as a shell does. `host`: on another host. `real`: in a new interpreter."""
        words = self.words(*arguments, program=program)
        process = Popen(
            words,
            host=host,
            real=real,
            cwd=self.directory,
            env=self.variables,
            stdout=stdout,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            process_group=0,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, program: str = "samestep", real: bool = False) -> subprocess.CompletedProcess[str]:
        return self.finish(self.start(*arguments, program=program, real=real))

    def finish(self, process: Popen) -> subprocess.CompletedProcess[str]:
        out, err = process.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def processes(self) -> list[psutil.Process]:
        """Return the live processes of this command, including children of the ranks."""
        return [process for started in self.started for process in started.processes()]

    def wait_for(self, *names: str) -> None:
        """Wait until the ranks have created these files."""
        wait_until(lambda: all((self.directory / name).exists() for name in names), f"files {names}")

    def assert_nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), "no process left")

    def assert_no_files_left(self) -> None:
        assert list(Path(self.variables["TMPDIR"]).glob("samestep-*")) == []

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self.assert_nothing_left()


@contextmanager
def open_command(directory: Path) -> Iterator[Command]:
    """A command in an empty directory. Kills all its processes at the end."""
    command = Command(directory / "here")
    command.directory.mkdir()
    # Not in pytest's directory: data loaders open sockets here, and the path of a socket is limited to 107 bytes.
    with TemporaryDirectory(prefix="t-", dir="/tmp") as temporary:
        command.variables["TMPDIR"] = temporary
        try:
            yield command
        finally:
            command.close()
