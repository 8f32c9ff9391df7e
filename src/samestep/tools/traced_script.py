"""Runs a user's script for a tool: in a new process group, traced, with its output in a file."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def start(
    command: Sequence[str], variables: Mapping[str, str], output: Path, inherited: Sequence[int] = ()
) -> "subprocess.Popen[bytes]":
    """Start a command. Its standard output and error go to `output`. `inherited`: file descriptors to pass on."""
    with open(output, "w") as file:
        return subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=inherited,
        )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a rank's trace so far. The rank may still be writing, or may have been killed."""
    lines = []
    with suppress(FileNotFoundError, ValueError):
        for line in path.read_text().splitlines():
            lines.append(json.loads(line))
    return lines
