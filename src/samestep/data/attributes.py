"""Detects changes of a data set during a loop, which do not reach the copies in DataLoader workers."""

from collections.abc import Iterator
from typing import Any

from samestep.data.spec import DataSpec


def walk_attributes(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a data set and of the data sets that it wraps (`dataset.dataset`), with their paths."""
    inside = ""
    thing = dataset
    while thing is not None and len(inside) < 80:  # Subset and similar wrappers, a few layers deep
        own = getattr(thing, "__dict__", {})
        yield from ((inside + name, value) for name, value in own.items() if name != "dataset")
        inside = f"{inside}dataset."
        thing = own.get("dataset")


class Attributes:
    """The plain attributes (int, float, str, bool) of a data set and of those that it wraps, when its workers start."""

    def __init__(self, spec: DataSpec) -> None:
        self._dataset = spec.dataset
        self._known = self._read() if spec.num_workers else {}

    def _read(self) -> dict[str, str]:
        return {k: repr(v) for k, v in walk_attributes(self._dataset) if type(v) in (int, float, str, bool)}

    def find_change(self) -> str | None:
        """Return a message about the first attribute that has changed, once."""
        now = self._read() if self._known else {}
        for name, value in self._known.items():
            if now.get(name, value) != value:
                self._known = {}
                return (
                    f"the data set's {name} has become {now[name]}, but is still {value} in the loader workers, which "
                    "live as long as the loop: draw from torch, numpy or random, which are seeded for each "
                    "micro-batch, or use num_workers=0"
                )
        return None
