"""Files in a directory that other programs may have written to: opened safely, replaced atomically.

No function follows a symbolic link in the last part of a path, or blocks on a FIFO or a device.
"""

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_BYTES = 64 << 20  # of a file that is parsed whole
CHUNK_BYTES = 1 << 16


def open_regular(path: "os.PathLike[str] | str", flags: int) -> int:
    """`os.open` for regular files only. Use as `open(path, "rb", opener=open_regular)`.

    Raises:
        OSError: as `os.open`, and if the path is a symbolic link, a directory, a FIFO, a socket or a device.
    """
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, f"{os.path.basename(path)} is a symbolic link", os.fspath(path)) from None
        raise
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        raise OSError(errno.EINVAL, f"{os.path.basename(path)} is not a regular file", os.fspath(path))
    return file


def read_bytes(path: Path, most: int = MAX_BYTES, *, is_given: bool = False) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises OSError.

    Args:
        is_given: the user has given this path, so it may also be a link, a pipe or a device.
    """
    with open(path, "rb", opener=None if is_given else open_regular) as file:
        data = bytearray()
        # In chunks, because /proc/sys allocates as much memory as a read requests.
        while len(data) <= most and (chunk := file.read(CHUNK_BYTES)):
            data += chunk
    if len(data) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
    return bytes(data)


def read_text(path: Path, *, is_given: bool = False) -> str:
    """`read_bytes`, as text. Bytes that are no UTF-8 become U+FFFD."""
    return read_bytes(path, is_given=is_given).decode(errors="replace")


def read_tail(path: Path) -> str:
    """`read_last_bytes`, the last MB, as text. Bytes that are no UTF-8 become U+FFFD."""
    return read_last_bytes(path, 1 << 20).decode(errors="replace")


def read_last_bytes(path: Path, most: int) -> bytes:
    """Return the last bytes of a regular file, at most `most`. Raises OSError."""
    with open(path, "rb", opener=open_regular) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)


def copy_file(source: "os.PathLike[str] | str", target: "os.PathLike[str] | str", *, may_link: bool = False) -> None:
    """Copy a regular file to a new one. Raises OSError.

    Args:
        may_link: the content is never changed, so a hard link will do.
    """
    with open(source, "rb", opener=open_regular) as old:
        with suppress(OSError):  # the file system has no links
            if may_link:
                os.link(source, target, follow_symlinks=False)
                return
        try:
            with open(target, "xb", opener=open_regular) as new:
                shutil.copyfileobj(old, new)
        except OSError as error:
            raise OSError(error.errno, error.strerror, error.filename or os.fspath(target)) from None


def replace_file(path: Path, content: bytes | memoryview, *, sync: bool = False) -> None:
    """Replace a file atomically, or create it.

    Args:
        sync: whether to wait until the content and the name are on the disk.

    Raises:
        OSError: it could not be written; the old file is unchanged.
    """
    with replacing(path, sync=sync) as partial, open(partial, "xb", opener=open_regular) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, *, sync: bool = False, by_many: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`. The file or link that the block creates there replaces `path` atomically.

    If the block raises, the temporary file is removed and `path` is unchanged.

    Args:
        sync: as in `replace_file`.
        by_many: other processes may replace the same file at this moment. The temporary file then has a name of its
            own, which a killed process leaves behind. Else it has one name, and the next call removes it.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex if by_many else 'partial'}")
    try:
        partial.unlink(missing_ok=True)
        yield partial
        if sync:
            with open(partial, "rb", opener=open_regular) as file:
                os.fsync(file.fileno())
        os.replace(partial, path)
        if sync:
            sync_directory(path.parent)
    except BaseException:
        with suppress(OSError):  # the file system may be read-only by now
            partial.unlink(missing_ok=True)
        raise


def move_directory(source: Path, target: Path) -> None:
    """Rename a directory, or a link to one, atomically. Raises OSError if `target` exists and is not empty."""
    os.rename(source, target)


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk, if this user may read it. Raises OSError."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # some directories let users create files and not list them
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
