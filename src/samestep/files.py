"""Files in a directory that others may have written to: opened safely, parsed strictly, replaced whole.

Nothing here follows a symbolic link in the last part of a path, and nothing waits for a FIFO or a device.
"""

import errno
import json
import math
import os
import stat
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20  # of a file that is parsed whole
MOST_DEPTH = 100  # of nested JSON: far below Python's limit of recursion


def open_regular(path: "os.PathLike[str] | str", flags: int) -> int:
    """As `os.open`, for regular files alone; `open(path, "rb", opener=open_regular)`.

    Raises:
        OSError: also where it is a symbolic link, a directory, a FIFO, a socket or a device.
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


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """What a regular file of at most `most` bytes holds. Raises OSError."""
    with open(path, "rb", opener=open_regular) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
    return data


def replace_file(path: Path, content: bytes | memoryview, *, sync: bool = False) -> None:
    """Puts a file with this content in the place of whatever has that name, whole or not at all.

    Args:
        sync: waits until the content is on the disk.

    Raises:
        OSError: that cannot be done; what was there stands.
    """
    partial = path.with_name(f".{path.name}")
    try:
        partial.unlink(missing_ok=True)
        with open(partial, "xb", opener=open_regular) as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):  # the file system may be read-only by now
            partial.unlink(missing_ok=True)
        raise


# --- JSON -------------------------------------------------------------------------------------------------------------


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text: numbers are finite, and nesting is at most `MOST_DEPTH` deep.

    Raises:
        ValueError: it is no such text.
    """
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_parse_float)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [inner for each in level if isinstance(each, dict | list) for inner in _list_inner(each)]
        if not level:
            return value
    raise ValueError("the JSON is nested too deeply")


def _list_inner(value: dict[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def fits(value: Any, shape: Any) -> bool:
    """Whether a JSON value has a shape.

    A shape is a predicate; `[shape]` for a list of any length; or a dict of shapes by key, where a key that ends with
    "?" may be missing. Other keys are not looked at.

    Example:
        >>> fits({"step": 3}, {"step": is_count, "name?": is_text})
        True
    """
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(each, shape[0]) for each in value)
    if not isinstance(shape, dict):
        return bool(shape(value))
    if not isinstance(value, dict):
        return False
    for key, inner in shape.items():
        name = key.removesuffix("?")
        if not (fits(value[name], inner) if name in value else name != key):
            return False
    return True


def is_count(value: Any) -> bool:
    """A whole number from 0 that 63 bits hold."""
    return type(value) is int and 0 <= value < 1 << 63


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_time(value: Any) -> bool:
    """A time in ISO 8601 with its offset from UTC."""
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False
