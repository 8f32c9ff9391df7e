"""The state of all processes of a test, for one that hangs: which thread waits for what."""

import os
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

LIMIT_S = 30.0  # for gdb, for each process


def format_stacks(processes: Iterable[psutil.Process]) -> str:
    """Return the kernel's state of each thread, and its native stack where gdb is installed."""
    return "\n".join(_format_process(process) for process in processes)


def _format_process(process: psutil.Process) -> str:
    with suppress(psutil.Error, OSError):
        lines = [f"--- {process.pid} (of {process.ppid()}) {process.status()} {' '.join(process.cmdline()[:4])[:200]}"]
        tasks = Path(f"/proc/{process.pid}/task")
        for task in sorted(tasks.iterdir()):
            state = [_read(task / name) for name in ("comm", "wchan", "syscall")]
            lines.append(f"{task.name} {' | '.join(state)}")
        return "\n".join([*lines, _read_native(process.pid)])
    return f"--- {process.pid} has ended"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        return os.strerror(error.errno or 0)


def _read_native(pid: int) -> str:
    if not shutil.which("gdb"):
        return "(gdb is not installed)"
    words = ["gdb", "-nx", "-batch", "-p", str(pid), "-ex", "thread apply all backtrace 25"]
    with suppress(subprocess.TimeoutExpired):
        found = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False).stdout
        return "\n".join(line for line in found.splitlines() if line.startswith(("#", "Thread")))
    return "(gdb did not answer)"
