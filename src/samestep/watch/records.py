"""The files in a run's directory that say how it stands, for people and tools beside it."""

import json
from pathlib import Path
from typing import Any

RANKS = "ranks.json"  # what every rank is at, written by rank 0 while the run goes on
STATUS = "status.json"  # whether it runs, and how it ended


def read_or_empty(path: Path) -> dict[str, Any]:
    """What one of them holds; empty where it is not there, as before the first step."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
