"""A person's script as a tool has it train: in a process group of its own, its output in a file, traced."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def start(
    command: Sequence[str], variables: Mapping[str, str], output: Path, inherited: Sequence[int] = ()
) -> "subprocess.Popen[bytes]":
    """Starts it. What it prints, on either stream, goes to `output`. `inherited`: descriptors that it is given."""
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
    """What a rank's trace holds so far; of a rank that is killed, or still writes, the last line may not be whole."""
    lines = []
    with suppress(FileNotFoundError, ValueError):
        for line in path.read_text().splitlines():
            lines.append(json.loads(line))
    return lines
