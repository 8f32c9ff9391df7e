"""Runs a user's script for a tool: traced, with its output in a file."""

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from samestep.config import NO_INTERCEPTORS, Overrides, to_variables
from samestep.files import open_regular
from samestep.processes import running
from samestep.world.environment import TRACE, child_variables

# Options of the runs that a tool starts.
OF_RUN = ("batch_size", "micro_batch_size", "seed", "num_threads", "precision", "device", "backend")
SHOWN_LINES = 30  # of the end of a script's output


@contextmanager
def open_workdir(name: str) -> Iterator[Path]:
    """Create a temporary directory for scripts, with `name` in its name, and remove it at the end of the block.

    SIGTERM raises SystemExit in the block, so that the script ends too.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with TemporaryDirectory(prefix=f"samestep-{name}-", ignore_cleanup_errors=True) as path:
            yield Path(path)
    finally:
        signal.signal(signal.SIGTERM, before)


def run_traced(
    command: Sequence[str],
    directory: Path,
    interceptor: str,
    overrides: Overrides,
    *,
    hash_seed: str = "0",
    **options: Any,
) -> int:
    """Run a script whose ranks write traces into a directory, beside the file `output`. Returns the exit code.

    Args:
        command: starts the script.
        interceptor: "module:class"; a `Tracer` writes the traces.
        overrides: options of `Run` that replace those of the script.
        hash_seed: PYTHONHASHSEED, unless it is set for this process.
        options: of the interceptor.
    """
    variables = {"PYTHONHASHSEED": hash_seed} | child_variables() | to_variables({**overrides, **NO_INTERCEPTORS})
    variables |= {
        "WANDB_MODE": "disabled",
        TRACE: json.dumps({"interceptor": interceptor, "dir": str(directory), **options}),
    }
    with running(command, variables, directory / "output") as process:
        return process.wait()


def find_errors(output: str) -> list[str]:
    """Return the messages of samestep's errors in the output of a script."""
    begin = "samestep: error: "
    return [line.removeprefix(begin) for line in map(str.strip, output.splitlines()) if line.startswith(begin)]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a rank's trace. The rank may have been killed in the last one."""
    with suppress(FileNotFoundError, ValueError), open(path, opener=open_regular) as file:
        for line in file:
            yield json.loads(line)  # noqa: TID251 lines of our own trace
