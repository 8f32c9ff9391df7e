"""The table of the faults that runs recovered from in the tests."""

from dataclasses import astuple, dataclass
from textwrap import wrap
from typing import Any

CRASHES = ("kill", "freeze", "raise", "exit", "exhaust", "pull")
DISKS = ("fill", "protect", "forbid", "remove", "backdate", "damage")
KEY = "strike"  # of a test's user properties, which pytest-xdist brings from its workers


@dataclass(frozen=True)
class Strike:
    """A fault of a run that was then resumed: its kind, its moment, and how long all processes took to end."""

    fault: str
    moment: str
    ended_s: float

    def to_property(self) -> tuple[str, object]:
        return KEY, list(astuple(self))


def read_strikes(properties: list[tuple[str, Any]]) -> list[Strike]:
    """Return the faults among a report's user properties."""
    return [Strike(*value) for key, value in properties if key == KEY]


def format_tables(strikes: list[Strike]) -> list[tuple[str, list[str]]]:
    """Return a title and lines for each kind of fault."""
    tables: dict[str, list[Strike]] = {"crashes": [], "disks, directories and clocks": [], "stops": []}
    for strike in strikes:
        kinds = {"crashes": CRASHES, "disks, directories and clocks": DISKS}
        what = next((name for name, starts in kinds.items() if strike.fault.startswith(starts)), "stops")
        tables[what].append(strike)
    return [(what, format_table(of_kind)) for what, of_kind in tables.items() if of_kind]


def format_table(strikes: list[Strike]) -> list[str]:
    """Return how often each fault occurred at each moment, and the longest time until all processes had ended."""

    def count(moment: str, there: list[Strike]) -> list[str]:
        counts = [str(sum(strike.fault == kind for strike in there) or "") for kind in kinds]
        return [moment, *counts, f"{max(strike.ended_s for strike in there):.1f} s"]

    kinds = sorted({strike.fault for strike in strikes})
    heads = [["", "", "moment"], *(wrap(kind, 8) for kind in kinds), ["slowest", "end"]]
    rows = [[head[line] if line < len(head) else "" for head in heads] for line in range(max(map(len, heads)))]
    for moment in dict.fromkeys(strike.moment for strike in strikes):
        rows.append(count(moment, [strike for strike in strikes if strike.moment == moment]))
    rows.append(count(f"all {len(strikes)}", strikes))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
