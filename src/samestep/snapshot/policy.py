"""When a snapshot is due."""

import re
from dataclasses import dataclass

from samestep.errors import Error

_EVERY = re.compile(r"(\d+)\s*(steps?|epochs?|s|min|h)?")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True)
class Every:
    """A snapshot every so many steps, or epochs, or seconds: two of the three are None."""

    steps: int | None = None
    epochs: int | None = None
    seconds: int | None = None

    def is_due(self, step: int, epochs_done: int | None = None) -> bool:
        """Whether a snapshot is due by what has been done. (No rank knows of itself what time it is for all.)

        Args:
            step: the number of steps done.
            epochs_done: the number of epochs done; None anywhere but at an epoch's end.
        """
        if self.steps is not None:
            return step > 0 and step % self.steps == 0
        return bool(self.epochs and epochs_done and epochs_done % self.epochs == 0)


def parse_every(value: int | str | None) -> Every | None:
    """10, "10" and "10steps" mean steps, "2epochs" epochs, "30min" (s, min, h) a time; None and "never" mean None.

    Raises:
        Error: anything else.
    """
    if value is None or value == "never":
        return None
    match = None if isinstance(value, bool) else _EVERY.fullmatch(str(value).strip())
    if match is None or int(match[1]) == 0:
        raise Error(
            f"snapshot_every is {value!r}: give a number of steps such as 10, one of epochs such as 2epochs, a time "
            "such as 30min, or never"
        )
    count = int(match[1])
    if match[2] in _SECONDS:
        return Every(seconds=count * _SECONDS[match[2]])
    return Every(epochs=count) if (match[2] or "").startswith("epoch") else Every(steps=count)
