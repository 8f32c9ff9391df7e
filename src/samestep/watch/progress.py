"""The progress display of rank 0: lines of text."""

import os
import sys
from collections.abc import Mapping
from time import monotonic
from typing import Any, TextIO

from samestep.console import escape, format_time, read_terminal
from samestep.watch.trackers import to_number
from samestep.world.environment import drop_output

# Between two lines: a share of the loop's time so far, so that a long run does not print millions of them.
LEAST_S, MOST_S = 2.0, 60.0
SHARE = 0.01


class Progress:
    """The display of one rank. Validations have a line each; other numbers are shown at intervals.

    Each loop calls `begin`, `step` after each step, `log` for new numbers, and `end`.

    Args:
        is_shown: False: shows nothing until `take_over`.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._stream: TextIO | None = None  # that of `print`
        self._where = ""  # where the newest numbers were measured
        self._news: dict[str, Any] = {}  # these numbers
        self._shown_s = float("-inf")
        self.begin(total_steps=None, has_epochs=False)

    def begin(self, *, total_steps: int | None, has_epochs: bool) -> None:
        """Start a loop. `total_steps`: the last step; None if there is no end."""
        self._total_steps = total_steps
        self._has_epochs = has_epochs
        self._news = {}
        self._number = self._epoch = self._num_samples = 0
        self._stepped_s = 0.0
        self._began_s = monotonic()
        self._mark: tuple[float, int, int] | None = None  # time, steps and samples from which the speed is measured

    def step(self, number: int, num_samples: int, epoch: int) -> None:
        """Report `number` completed steps, the last with `num_samples` samples of epoch `epoch`."""
        self._number = number
        self._epoch = epoch
        self._num_samples += num_samples
        self._stepped_s = monotonic()
        if self._mark is None:  # at the end of the first step, which compiles and warms up
            self._set_mark()

    def log(self, values: Mapping[str, Any], number: int) -> None:
        """Show numbers: those named "validation/..." on a line each time, others on a line at intervals.

        Args:
            number: number of steps when they were measured, which may include the current one.
        """
        if not self._is_shown:
            return
        total = "" if self._total_steps is None else f"/{self._total_steps}"
        where = f"step {number}{total}" + (f"  epoch {self._epoch}" if self._has_epochs else "")
        if where != self._where:  # a line must not mix steps
            self._where = where
            self._news = {}
        validation = {name: value for name, value in values.items() if name.startswith("validation/")}
        self._news |= {name: value for name, value in values.items() if name not in validation}
        now_s = monotonic()
        wait_s = min(max(SHARE * (now_s - self._began_s), LEAST_S), MOST_S)
        if validation or now_s >= self._shown_s + wait_s:
            self.close()
        if validation:
            self.print("  ".join([where, *_texts(validation)]))
            self._mark = None  # its time does not count

    def take_over(self) -> None:
        """Show the loop from now on, on a rank that has become rank 0. Its standard output may not be shown."""
        self._is_shown = True
        self._stream = os.fdopen(read_terminal(), "w", closefd=False)

    def print(self, *args: Any, **kw: Any) -> None:
        """Print like the builtin."""
        if not self._is_shown:
            return
        try:
            print(*args, **{"flush": True, "file": self._stream, **kw})
        except BrokenPipeError:  # the reader, such as tee, has ended: continue the run
            drop_output(sys.stdout.fileno())
        except OSError:  # a full disk or a closed terminal: drop the line
            pass

    def say(self, sentence: str) -> None:
        """Print a message of samestep, with control characters escaped."""
        self.print(f"samestep: {escape(sentence)}")

    def end(self, rows: Mapping[str, Any]) -> None:
        """End the run: print `rows` in two columns."""
        self.close()
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            self.print(f"{name:<{width}}  {_format(value)}")

    def close(self) -> None:
        """Show the newest numbers, also after an error. Can be called at any time and repeatedly."""
        if self._news:
            self.print("  ".join([self._where, *_texts(self._news), *self._describe_speed()]))
            self._news = {}
            self._shown_s = monotonic()
            if self._mark is not None:
                self._set_mark()

    def _set_mark(self) -> None:
        self._mark = (self._stepped_s, self._number, self._num_samples)

    def _describe_speed(self) -> list[str]:
        """Return texts such as ["812 samples/s", "eta 0:31"], without what is not known yet."""
        since_s, number, num_samples = self._mark or (self._stepped_s, 0, 0)
        elapsed_s = self._stepped_s - since_s
        if elapsed_s <= 0:
            return []
        texts = [f"{_format((self._num_samples - num_samples) / elapsed_s)} samples/s"]
        if self._total_steps is not None:
            left_s = (self._total_steps - self._number) * elapsed_s / (self._number - number)
            texts.append(f"eta {format_time(round(left_s))}")
        return texts


def _texts(values: Mapping[str, Any]) -> list[str]:
    """Format values, such as ["loss 0.1234", "lr 3.00e-04"]."""
    texts = []
    for full_name, value in values.items():
        name = full_name.removeprefix("train/")
        text = _format(value)
        if name.startswith(("learning rate", "learning_rate")):
            name = "lr" + name.partition("rate")[2]  # "learning rate/1" belongs to the second group
            text = f"{value:.2e}" if isinstance(value, float) else text
        texts.append(f"{name} {text}")
    return texts


def _format(value: Any) -> str:
    """Format a number, such as 0.1234, 12.35 or 1,235; other values with str."""
    number = to_number(value)
    if number is None:
        return str(value)
    return f"{number:,.0f}" if isinstance(number, int) or 1000 <= abs(number) < 1e9 else f"{number:.4g}"
