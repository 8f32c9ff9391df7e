"""Small file systems, which fill up."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A small separate file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self._mount("-t", "tmpfs", "-o", "size=1m", "tmpfs")

    def _mount(self, *words: str) -> None:
        done = subprocess.run(["mount", *words, self.path], capture_output=True, text=True)
        if done.returncode:
            self.path.rmdir() if not any(self.path.iterdir()) else None
            pytest.skip(f"mount is not permitted: {done.stderr.strip()}")

    def remount(self, options: str) -> None:
        self._mount("-o", f"remount,{options}")

    @property
    def is_full(self) -> bool:
        return os.statvfs(self.path).f_bavail == 0

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", self.path], check=True, capture_output=True)


@contextmanager
def open_disk(path: Path) -> Iterator[Disk]:
    """Mount a small file system on a new directory. The test is skipped if that is not permitted."""
    if os.name != "posix" or sys.platform != "linux":
        pytest.skip("mounts a file system, as on Linux")
    made = Disk(path)
    try:
        yield made
    finally:
        made.close()
