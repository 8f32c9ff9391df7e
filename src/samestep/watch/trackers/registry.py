"""Trackers by name."""

from collections.abc import Sequence

from samestep.config import find_trackers, is_tracker
from samestep.errors import InvalidType
from samestep.watch.trackers.protocol import Tracker


def build_trackers(given: Sequence[Tracker | str]) -> list[Tracker]:
    """Return the trackers. For a name, its entry point builds the tracker, without arguments.

    Args:
        given: trackers and names, as checked by the option `trackers`.

    Raises:
        InvalidType: an entry point does not build a tracker.
    """
    return [_build(each) if isinstance(each, str) else each for each in given]


def _build(name: str) -> Tracker:
    tracker: Tracker = find_trackers()[name].load()()
    if not is_tracker(tracker):
        raise InvalidType(
            f"the entry point of the tracker {name} builds {tracker!r}, not a tracker: repair it", code="SS807"
        )
    return tracker
