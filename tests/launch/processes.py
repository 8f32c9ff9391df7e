"""Run the samestep command as from a shell, and find its processes."""

import subprocess
import sys
from pathlib import Path
from typing import IO

import psutil
from support.commands import Popen
from support.runs import clean_variables
from support.waiting import DEADLINE_S, wait_until


class Command:
    """Starts `samestep` in a directory, and finds all its processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.variables = clean_variables()
        self.started: list[Popen] = []

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def start(
        self,
        *arguments: str,
        program: str = "samestep",
        stdout: int | IO[str] = subprocess.PIPE,
        real: bool = False,
    ) -> Popen:
        """Start it in its own process group, as a shell does. `real`: in a new interpreter."""
        process = Popen(
            [sys.executable, *(["-m", program] if program else []), *arguments],
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

    def run(self, *arguments: str, program: str = "samestep") -> subprocess.CompletedProcess[str]:
        return self.finish(self.start(*arguments, program=program))

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
            with process:  # waits for its end, and closes its streams
                process.kill()
        self.assert_nothing_left()
