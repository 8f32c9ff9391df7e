"""Run commands as from a shell, and read the files of their runs."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.cli import main
from support.commands import Popen

# Variables that would change the runs of tests.
FOREIGN = (
    "SAMESTEP_", "OMP_", "MKL_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM",
)  # fmt: skip

JSON_ROW = re.compile(r"^\| `([\w -]+)` \| (`.*) \|$", re.M)
DOCUMENTED = {  # command -> the entries of its object with --json
    command: {*re.findall(r"`(\w+)`", entries)}
    for command, entries in JSON_ROW.findall((Path(__file__).parents[2] / "docs/run-directories.md").read_text())
}


def clean_variables(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment, without variables of launchers and of other runs, and with `extra`."""
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)} | dict(extra or {})


def find_tests() -> str:
    """Return the PYTHONPATH of a program that imports modules of these tests."""
    return os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])


def run_command(
    *command: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 120, real: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end in `cwd`. Stdout and stderr are returned as text.

    Args:
        env: variables to add.
        real: start a new interpreter, see `commands.Popen`.
        timeout: seconds; past it the program and all that it has started are killed.

    Raises:
        TimeoutExpired: it took longer.
    """
    process = Popen(
        command,
        real=real,
        cwd=cwd,
        env=clean_variables(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        process.kill_all()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def samestep_command(
    *args: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `samestep ARGS` in `cwd`, as `run_command`. The caller checks the exit code."""
    return run_command(sys.executable, "-m", "samestep", *args, cwd=cwd, env=env, timeout=timeout)


def check(done: subprocess.CompletedProcess[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    """Return the argument if its exit code is `code`; else fail with its output."""
    assert done.returncode == code, (
        f"{done.args} ended with {done.returncode}, not {code}\n"
        f"--- stdout\n{done.stdout[-4000:]}\n--- stderr\n{done.stderr[-4000:]}"
    )
    return done


def ask(*arguments: str | Path, code: int = 0) -> str:
    """Return what `samestep ARGUMENTS` prints. It must end with this exit code."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([str(argument) for argument in arguments]) == code, printed.getvalue()
    return printed.getvalue()


def refuse(*arguments: str | Path) -> str:
    """Return the sentence with which `samestep ARGUMENTS` ends. It must print nothing else."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert ask(*arguments, code=2) == ""
    assert said.getvalue().startswith("samestep: error: ")
    assert said.getvalue().count("\n") == 1
    return said.getvalue()


def read_facts(command: str, printed: str) -> Any:
    """Return the object that a command has printed with --json. Its entries must be those of docs/run-directories.md.

    Args:
        command: its words in the table there.
    """
    facts = json.loads(printed)
    assert {*facts} == DOCUMENTED[command]
    return facts


def digest(run_dir: Path, step: int | str | None = None) -> str:
    """Return what `samestep inspect RUN --digest` prints: the sha256 of a run's whole state."""
    which = [] if step is None else ["--snapshot", str(step)]
    printed = ask("inspect", run_dir, "--digest", *which).strip()
    assert len(printed) == 64, printed
    return printed


def read_bits(run_dir: Path) -> tuple[str, bytes, bytes]:
    """Return what must be the same in all modes: the digest, the metrics and the ledger."""
    return digest(run_dir), (run_dir / "metrics.jsonl").read_bytes(), (run_dir / "ledger.bin").read_bytes()


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
