"""Tables and values as the tools print them."""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from samestep.console import escape as escape_text


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table: drawn by rich on a terminal, plain columns elsewhere. Control characters are escaped."""
    rows = [[escape_text(cell).replace("\n", "\\n") for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(*header, title=escape(title), title_justify="left")
        for row in rows:
            table.add_row(*map(escape, row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(title)
    for row in (header, *rows):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def list_values(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The plain values of nested dicts, with their paths: {"a": {"b": 1}} gives ("a.b", "1")."""
    rows = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += list_values(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, to_text(value)))
    return rows


def to_text(value: Any) -> str:
    """A string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def describe_size(size_bytes: float) -> str:
    """Such as "12.3 MB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.4g} TB"


def describe_age(time: str | None) -> str:
    """How long ago a time of ISO 8601 was, such as "5 min"; "?" where it is not known."""
    try:
        age_s = max((datetime.now(UTC) - datetime.fromisoformat(time or "")).total_seconds(), 0.0)
    except (TypeError, ValueError):
        return "?"
    for unit, seconds in (("days", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"
