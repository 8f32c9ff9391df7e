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
Names = dict[str, tuple[int, bool]]  # in a directory -> inode, and whether it is a directory
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
        self._names: dict[int, Names] = {}  # inode of a directory -> its synced names
        _disks[:] = [self]

    def close(self) -> None:
        """Remove it."""
        _disks.clear()
        shutil.rmtree(self.root, ignore_errors=True)

    def has(self, path: object) -> bool:
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
        if task is None or not self.has(arguments[0]) or not self._scheduler.is_current(task.process):
            return
        path = os.fspath(arguments[0])
        task.process.point(f"{event} {path[len(self._prefix) :]}")
        is_new = event == "open" and isinstance(arguments[2], int) and arguments[2] & _CREATING
        if event == "os.mkdir" or (is_new and not os.path.exists(path)):
            self.check_space(task.process)

    def sync(self, descriptor: int) -> None:
        """Keep what a file or a directory has now."""
        self._keep(f"/proc/self/fd/{descriptor}")

    def _keep(self, path: "Path | str") -> None:
        inode = os.stat(path).st_ino
        if os.path.isdir(path):
            self._names[inode] = _list_names(path)
        else:
            with io.FileIO(path) as file:
                self._contents[inode] = file.readall()

    def cut_power(self, choose: random.Random) -> list[str]:
        """Lose what was not synced: of each file all, the beginning, or nothing; of each directory all changes or none.

        Returns:
            The paths of the files that are left.
        """
        if not self.run_dir.exists():
            return []
        before = self.run_dir.rename(self.root / "before")
        paths = [before, *before.rglob("*")]
        directories = {path.stat().st_ino: _list_names(path) for path in paths if path.is_dir()}
        contents = {path.stat().st_ino: path.read_bytes() for path in paths if path.is_file()}
        self._restore(before.stat().st_ino, self.run_dir, directories, contents, choose)
        shutil.rmtree(before)
        left = [self.run_dir, *sorted(self.run_dir.rglob("*"))]
        for path in left:
            self._keep(path)
        return [str(path.relative_to(self.root)) for path in left if path.is_file()]

    def _restore(
        self, inode: int, path: Path, directories: dict[int, Names], contents: dict[int, bytes], choose: random.Random
    ) -> None:
        """Create a directory. `directories`, `contents`: inode -> last names in a directory, last bytes of a file."""
        synced = self._names.get(inode, {})
        names = directories.get(inode, synced)
        directories[inode] = synced  # if it has moved, and is in its old directory, too, it is there as it was
        if names != synced and choose.random() < 0.5:
            for name, (inner, _) in synced.items():
                if name not in names:  # later changes in it are lost, too
                    directories[inner] = self._names.get(inner, {})
            names = synced
        path.mkdir()
        for name, (inner, is_directory) in sorted(names.items()):
            if is_directory:
                self._restore(inner, path / name, directories, contents, choose)
            else:
                (path / name).write_bytes(self._choose_content(inner, contents, choose))

    def _choose_content(self, inode: int, contents: dict[int, bytes], choose: random.Random) -> bytes:
        synced = self._contents.get(inode, b"")
        now = contents.get(inode, synced)
        if now == synced:
            return synced
        beginning = now[: choose.randint(len(synced), len(now))] if now.startswith(synced) else synced
        return choose.choice([synced, now, beginning])

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


def _list_names(directory: "Path | str") -> Names:
    with os.scandir(directory) as entries:
        return {each.name: (each.inode(), each.is_dir()) for each in entries}


def build_open(get_process: Callable[[], Process], get_disk: Callable[[], Disk]) -> Callable[..., Any]:
    """Build the `open` of a simulated process, whose writes to the run are points, and can fail."""

    class File(io.FileIO):
        """A file of the run that is written to."""

        def write(self, data: Any) -> int:
            process = get_process()
            process.point("write")
            get_disk().check_space(process)
            return super().write(data)

        def truncate(self, size: int | None = None) -> int:
            get_process().point("truncate")
            return super().truncate(size)

    def open_file(
        file: Any, mode: str = "r", buffering: int = -1, *args: Any, opener: Any = None, **options: Any
    ) -> Any:
        if not get_disk().has(file) or not set(mode) & set("wxa+"):
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
