"""Tables of the results of `samestep scale`, for the commands `scale`, `plan` and `report`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

PARTS = ("data", "compute", "exchange", "waiting", "update", "other")  # of a step


def format_time(seconds: float) -> str:
    """Return a duration as text, such as "3.2 h"."""
    for unit, length_s in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.1f} s"


def build_predictions(predicted: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table of predictions, with their errors if the size was measured."""
    rows = []
    for each in predicted:
        error = each["error"]
        size = each["world_size"]
        known = ["", ""] if error is None else [f"{1e3 * each['measured_step_s']:,.1f}", f"{error:+.1%}"]
        fitted = error is not None and size <= 2 and abs(error) < 1e-6
        ms = f"{1e3 * each['step_s']:,.1f}"
        pace = f"{each['samples_per_s']:,.0f}"
        rows.append([str(size), pace, ms, known[0], "fitted" if fitted else known[1]])
    return ["ranks", "samples/s", "ms per step", "measured", "error"], rows


def build_rows(sizes: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table of measured sizes."""
    finish = [name for name in ("queue_s", "finish_s") if sizes[0].get(name) is not None]
    header = ["ranks", "batch", "samples/s", "speed-up", "efficiency", *PARTS]
    return header + [{"queue_s": "queue", "finish_s": "to finish"}[name] for name in finish], [
        [
            str(row["world_size"]),
            str(row["batch_size"]),
            f"{row['samples_per_s']:,.0f} +- {row['samples_per_s'] * row['error']:,.0f}",
            f"{row['speed_up']:.2f} +- {row['speed_up_error']:.2f}",
            f"{row['efficiency']:.0%} +- {row['efficiency_error']:.0%}",
            *_share(row["phases_s"]),
            *(format_time(row[name]) for name in finish),
        ]
        for row in sizes
    ]


def _share(phases_s: Mapping[str, float]) -> Iterator[str]:
    total_s = sum(phases_s[name] for name in PARTS)
    return (f"{max(0.0, phases_s[name] / total_s):.0%}" for name in PARTS)
