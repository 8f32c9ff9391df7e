"""Text for people: lines and tables for a terminal, numbers in words, and no control characters or secrets.

A unit of bytes is a power of 1000.
"""

import io
import json
import re
import select
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from threading import Timer
from typing import Any, TextIO

# C0 except tab and newline, DEL, C1, marks that change the direction of text, surrogates.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_terminal = 2  # the launcher's standard error; without a launcher, that of this process

COLOURS = {"green": "\x1b[32m", "yellow": "\x1b[33m", "red": "\x1b[1;31m"}
_CLEAR_LINE = "\r\x1b[2K"

_SECRET = re.compile(
    r"token|.*(access|api|auth|bearer|bot|github|hf|hub|refresh|session|wandb)[_-]?token"
    r"|.*(password|passwd|passphrase|secret|credentials?)|.*(access|api|auth|private|secret)[_-]?key(_id)?",
    re.IGNORECASE,
)

_SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("B", 1.0))
_DURATIONS = (("days", 172800, 86400.0), ("h", 7200, 3600.0), ("min", 600, 60.0), ("s", 1, 1.0), ("ms", 1e-3, 1e-3))


def escape(text: str) -> str:
    r"""Escape control characters, such as `\x1b`, except tabs and newlines."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def set_terminal(file: int) -> None:
    """Set the file descriptor of the terminal, in a rank whose own output may not be shown."""
    global _terminal
    _terminal = file


def read_terminal() -> int:
    """Return the file descriptor of the terminal."""
    return _terminal


def say(sentence: str) -> None:
    """Print one line on standard error, in one write: ranks that share an unbuffered file do not mix their lines."""
    _write_error(f"samestep: {_to_line(sentence)}\n", sys.stderr)


def warn(say: Callable[[str], None], sentence: str, *, start: str) -> None:
    """Print a warning about the script, as the filters of Python's `warnings` decide.

    Args:
        say: prints a message.
        start: the beginning of the sentence, the same in all warnings of this kind. The printed line names the filter.
    """
    with warnings.catch_warnings(record=True) as shown:
        warnings.warn(sentence, stacklevel=2)
    if shown:
        say(f'{sentence} (to hide this: PYTHONWARNINGS="ignore:{start}")')


@contextmanager
def saying_when_slow(sentence: str, after_s: float) -> Iterator[None]:
    """`say` a sentence if the block takes longer than `after_s`. No thread is left after the block."""
    timer = Timer(after_s, say, (sentence,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def print_error(text: str, *, original: bool = False) -> None:
    """Print a text of any length on standard error.

    Args:
        original: print on that of the process, also where `sys.stderr` has been replaced.
    """
    _write_error(f"{escape(text)}\n", sys.__stderr__ if original else sys.stderr)


def _write_error(text: str, stream: TextIO | None) -> None:
    """Write a text on standard error. It is lost if that cannot be written, as on a full disk: no run ends for that.

    It passes no buffer: Python would try again to write what is left in one, and end with exit code 120. And without a
    buffer (python -u), `print` loses the rest of a long text if a signal interrupts the write to a pipe.
    """
    if stream is None:
        return
    with suppress(OSError):
        stream.flush()
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)
        if not isinstance(raw, io.FileIO):  # such as a notebook's
            print(text, end="", file=stream, flush=True)
            return
        data = memoryview(text.encode(errors="backslashreplace"))
        while data:
            written = raw.write(data)
            if written is None:  # another process has made the file non-blocking
                select.select([], [raw], [])
            data = data[written or 0 :]


def show_activity(text: str) -> None:
    """Show what is being done, on a terminal, in a line that the next `print_result` replaces."""
    if sys.stdout.isatty():
        print(f"{_CLEAR_LINE}{escape(text)}", end="", flush=True)


def print_result(text: str, word: str, colour: str) -> None:
    """Print a line in place of the activity. On a terminal, `word` has a colour of `COLOURS`."""
    text = escape(text)
    if sys.stdout.isatty():
        text = _CLEAR_LINE + text.replace(word, f"{COLOURS[colour]}{word}\x1b[0m", 1)
    print(text, flush=True)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as plain columns. Escapes control characters."""
    rows = [[_to_line(text) for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(title)
    for row in (header, *rows):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _to_line(text: str) -> str:
    return escape(text).replace("\n", "\\n")


def list_values(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return the leaves of nested dicts with their paths: {"a": {"b": 1}} gives ("a.b", "1")."""
    rows = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += list_values(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, to_text(value)))
    return rows


def to_text(value: Any) -> str:
    """Return a string unchanged, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def build_cells(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> list[list[str]]:
    """Return the cells of a table of `columns`. What a row lacks is empty.

    Example::

        >>> build_cells([{"step": 3, "rank": None}], ("step", "rank", "time"))
        [['3', '', '']]
    """
    return [["" if row.get(name) is None else str(row[name]) for name in columns] for row in rows]


def describe_ranks(ranks: Sequence[int]) -> str:
    """Name ranks; of many, only the first.

    Example::

        >>> describe_ranks([3]), describe_ranks([5, 1, 2])
        ('rank 3', 'ranks 1, 2 and 5')
    """
    names = [*map(str, sorted(ranks))]
    if len(names) > 8:
        return f"{len(names)} ranks ({', '.join(names[:6])} ...)"
    return f"rank{'s' if len(names) > 1 else ''} {join_words(names)}"


def join_words(words: Sequence[str], last: str = "and") -> str:
    """Return some words as a list in a sentence.

    Example::

        >>> join_words(["a"]), join_words(["a", "b", "c"], "or")
        ('a', 'a, b or c')
    """
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def hide_secrets(value: Any, name: str = "") -> Any:
    """Return a value in which the texts whose names are those of secrets are replaced by "(hidden)".

    Args:
        value: a setting, or a mapping or list of settings; at any depth.
        name: the setting's name.

    Example::

        >>> hide_secrets({"api_key": "x7", "pad_token": "<pad>", "db": {"password": "y", "port": 1}})
        {'api_key': '(hidden)', 'pad_token': '<pad>', 'db': {'password': '(hidden)', 'port': 1}}
    """
    if isinstance(value, Mapping):
        return {key: hide_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        hidden = [hide_secrets(inner, name) for inner in value]
        return hidden if isinstance(value, list) else tuple(hidden)
    return "(hidden)" if isinstance(value, str | bytes) and value and _SECRET.fullmatch(name) else value


# --- numbers in words ------------------------------------------------------------------------------------------------


def format_bytes(num_bytes: float) -> str:
    """Format a size, such as "512 MB" or "1.5 GB".

    Example::

        >>> format_bytes(1.5e9), format_bytes(100)
        ('1.5 GB', '100 B')
    """
    unit, length = next((each for each in _SIZES if num_bytes >= each[1]), _SIZES[-1])
    return f"{_round(num_bytes / length)} {unit}"


def format_time(seconds: float) -> str:
    """Format a duration, such as "21 us", "3.4 ms", "300 s" or "12 min".

    Example::

        >>> format_time(0.0034), format_time(300), format_time(5400)
        ('3.4 ms', '300 s', '90 min')
    """
    unit, _, length_s = next((each for each in _DURATIONS if seconds >= each[1]), ("us", 0, 1e-6))
    return f"{_round(seconds / length_s)} {unit}" if seconds else "0 s"


def format_age(time: str | None) -> str:
    """Format the age of a time in ISO 8601; "?" if it is unknown."""
    try:
        age_s = (datetime.now(UTC) - datetime.fromisoformat(time or "")).total_seconds()
    except (TypeError, ValueError):
        return "?"
    return format_time(max(round(age_s), 0))


def format_count(number: float, what: str) -> str:
    """Format a number of things, such as "2 ranks"."""
    return f"{number:g} {what}{'s' if number != 1 else ''}"


def _round(number: float) -> str:
    """Return a number of at least two digits."""
    return f"{number:.1f}".removesuffix(".0") if number < 9.95 else f"{number:.0f}"
