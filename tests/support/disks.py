"""Small file systems, which fill up."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def open_disk(path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB on a new directory. The test is skipped if that is not permitted."""
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, text=True)
    if done.returncode:
        path.rmdir()
        pytest.skip(f"mount is not permitted: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True, capture_output=True)


def fill(path: Path) -> None:
    """Write a file until its file system is full."""
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))
