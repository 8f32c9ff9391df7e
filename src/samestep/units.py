"""Numbers in words: sizes, durations and counts. A unit of bytes is a power of 1000."""

from datetime import UTC, datetime

SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("B", 1.0))
DURATIONS = (("days", 172800, 86400.0), ("h", 7200, 3600.0), ("min", 600, 60.0), ("s", 1, 1.0), ("ms", 1e-3, 1e-3))


def format_bytes(num_bytes: float) -> str:
    """Format a size, such as "512 MB" or "1.5 GB".

    Example::

        >>> format_bytes(1.5e9), format_bytes(100)
        ('1.5 GB', '100 B')
    """
    unit, length = next((each for each in SIZES if num_bytes >= each[1]), SIZES[-1])
    return f"{_round(num_bytes / length)} {unit}"


def format_time(seconds: float) -> str:
    """Format a duration, such as "21 us", "3.4 ms", "300 s" or "12 min".

    Example::

        >>> format_time(0.0034), format_time(300), format_time(5400)
        ('3.4 ms', '300 s', '90 min')
    """
    unit, _, length_s = next((each for each in DURATIONS if seconds >= each[1]), ("us", 0, 1e-6))
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


def format_ranks(number: int) -> str:
    """Return "1 rank" or "2 ranks"."""
    return format_count(number, "rank")


def _round(number: float) -> str:
    """Return a number of at least two digits."""
    return f"{number:.1f}".removesuffix(".0") if number < 9.95 else f"{number:.0f}"
