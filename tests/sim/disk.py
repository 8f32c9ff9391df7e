"""A disk that loses, at a power cut, what was not synced: contents of files, and names in directories.

It is a directory in memory. Audit events make each open, rename, link, removal and new directory a point.
"""

import errno
import io
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.scheduler import Process, Scheduler

_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
_CREATING = os.O_CREAT | os.O_TRUNC
_disks: list["Disk"] = []  # an audit hook cannot be removed, so there is one


class Disk:
    """A directory in memory.

    Attributes:
        root: the directory. The run is in `root/run`; only there, calls are points.
        full_until_s: until then, it has no space.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        for left in Path("/dev/shm").glob("samestep-sim-*-*"):  # of a process that was killed
            if not Path("/proc", left.name.split("-")[2]).exists():
                shutil.rmtree(left, ignore_errors=True)
        self.root = Path(tempfile.mkdtemp(prefix=f"samestep-sim-{os.getpid()}-", dir="/dev/shm"))
        self.run_dir = self.root / "run"
        self.full_until_s = 0.0
        self._scheduler = scheduler
        self._prefix = str(self.run_dir)
        self._contents: dict[int, bytes] = {}  # inode of a file -> its synced content
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}  # of a directory -> synced name -> inode, is directory
        _disks[:] = [self]

    def close(self) -> None:
        """Remove it."""
        _disks.clear()
        shutil.rmtree(self.root, ignore_errors=True)

    def holds(self, path: object) -> bool:
        """Whether a path is in the run directory."""
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        return isinstance(text, str) and text.startswith(self._prefix)

    def check_space(self, process: Process) -> None:
        """Raise OSError if the disk is full for this process."""
        process.check()
        if self._scheduler.now_s < self.full_until_s and process.rank >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Make an audit event a point."""
        task = self._scheduler.current
        if task is None or not self.holds(arguments[0]) or not self._scheduler.is_current(task.process):
            return
        path = os.fspath(arguments[0])
        self._scheduler.point(task.process, f"{event} {path[len(self._prefix) :]}")
        is_new = event == "open" and isinstance(arguments[2], int) and arguments[2] & _CREATING
        if event == "os.mkdir" or (is_new and not os.path.exists(path)):
            self.check_space(task.process)

    def sync(self, descriptor: int) -> None:
        """Keep what a file or a directory has now."""
        path = f"/proc/self/fd/{descriptor}"
        inode = os.fstat(descriptor).st_ino
        if os.path.isdir(path):
            self._names[inode] = _list_names(path)
        else:
            with io.FileIO(path) as file:
                self._contents[inode] = file.readall()

    def cut_power(self, choose: random.Random) -> list[str]:
        """Lose what was not synced: of each file all, a part, or nothing; of each directory all changes or none.

        Returns:
            The changed paths.
        """
        changed: list[str] = []
        if self.run_dir.exists():
            self._cut_directory(self.run_dir, choose, changed)
        return changed

    def flip_byte(self, choose: random.Random) -> str:
        """Change a byte of the newest snapshot, if there is an older one. Returns the path; "" for none."""
        snapshots = sorted(self.run_dir.glob("snapshots/step-*"))
        if len(snapshots) < 2:
            return ""
        path = choose.choice(sorted(snapshots[-1].iterdir()))
        data = bytearray(path.read_bytes())
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        path.write_bytes(data)
        return str(path.relative_to(self.root))

    def _cut_directory(self, directory: Path, choose: random.Random, changed: list[str]) -> None:
        inode = directory.stat().st_ino
        now = _list_names(directory)
        synced = self._names.get(inode, {})
        if now != synced and choose.random() < 0.5:
            changed.append(f"{directory.relative_to(self.root)}/")
            self._go_back(directory, now, synced)
        for name in sorted(os.listdir(directory)):
            path = directory / name
            if path.is_dir() and not path.is_symlink():
                self._cut_directory(path, choose, changed)
            elif path.is_file() and not path.is_symlink() and self._cut_file(path, choose):
                changed.append(str(path.relative_to(self.root)))

    def _go_back(self, directory: Path, now: dict[str, tuple[int, bool]], synced: dict[str, tuple[int, bool]]) -> None:
        """Give a directory the names that were synced."""
        spare = Path(tempfile.mkdtemp(dir=self.root))
        kept = {inode: name for name, (inode, _) in now.items()}
        for name in now:
            (directory / name).rename(spare / name)
        for name, (inode, is_directory) in synced.items():
            if inode in kept:
                path = directory / name
                (spare / kept[inode]).rename(path)
                if is_directory and kept[inode] != name:  # later changes in it are lost, too
                    self._go_back(path, _list_names(path), self._names.get(inode, {}))
            else:
                self._restore(directory / name, inode, is_directory)
        shutil.rmtree(spare)

    def _restore(self, path: Path, inode: int, is_directory: bool) -> None:
        """Create again what was removed, but not for good."""
        if not is_directory:
            path.write_bytes(self._contents.get(inode, b""))
            self._contents[path.stat().st_ino] = self._contents.get(inode, b"")
            return
        path.mkdir()
        for name, (inner, is_inner_directory) in self._names.get(inode, {}).items():
            self._restore(path / name, inner, is_inner_directory)
        self._names[path.stat().st_ino] = _list_names(path)

    def _cut_file(self, path: Path, choose: random.Random) -> bool:
        now = path.read_bytes()
        synced = self._contents.get(path.stat().st_ino, b"")
        if now == synced:
            return False
        part = now[: choose.randint(len(synced), len(now))] if now.startswith(synced) else synced
        left = choose.choice([synced, now, part])
        with open(path, "r+b") as file:
            file.write(left)
            file.truncate()
        return left != now


def _list_names(directory: "Path | str") -> dict[str, tuple[int, bool]]:
    with os.scandir(directory) as entries:
        return {each.name: (each.inode(), each.is_dir(follow_symlinks=False)) for each in entries}


def build_open(get_process: Callable[[], Process], get_disk: Callable[[], Disk]) -> Callable[..., Any]:
    """Build the `open` of a simulated process, whose writes to the run are points, and can fail."""

    class File(io.FileIO):
        """A file of the run that is written to."""

        def write(self, data: Any) -> int:
            process = get_process()
            process.scheduler.point(process, "write")
            get_disk().check_space(process)
            return super().write(data)

        def truncate(self, size: int | None = None) -> int:
            process = get_process()
            process.scheduler.point(process, "truncate")
            return super().truncate(size)

    def open_file(
        file: Any, mode: str = "r", buffering: int = -1, *args: Any, opener: Any = None, **options: Any
    ) -> Any:
        if not get_disk().holds(file) or not set(mode) & set("wxa+"):
            return open(file, mode, buffering, *args, opener=opener, **options)
        raw = File(file, mode.replace("b", "").replace("t", ""), opener=opener)
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffered: Any = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **options)

    return open_file


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _disks and event in _EVENTS:
        _disks[0].see(event, arguments)


sys.addaudithook(_hook)
