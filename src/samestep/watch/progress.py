"""The progress display of rank 0: a bar on a terminal, plain lines elsewhere."""

import os
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import Any, TextIO

from samestep.console import escape
from samestep.units import format_time
from samestep.world.environment import drop_output, find_bar_terminal, read_terminal

DRAW_EVERY_S = 0.1
LINE_EVERY_S = 2.0
WINDOW_S = 20.0
CLEAR = "\r\x1b[2K"  # the line of a terminal


def build_progress(*, rank: int, has_bar: bool = True) -> "Progress":
    """Return the display of rank 0, a bar on a terminal if `has_bar`, else plain lines; on other ranks none."""
    terminal = find_bar_terminal() if rank == 0 and has_bar else None
    return Progress(is_shown=rank == 0) if terminal is None else Bar(terminal)


def say_above(progress: "Progress", sentence: str) -> None:
    """Print a message of samestep, with control characters escaped."""
    progress.print(f"samestep: {escape(sentence)}")


class Pace:
    """Position and speed of a loop over the last `WINDOW_S` seconds, and the estimated time to its end.

    Measures from the end of the first step, which compiles and warms up.
    """

    def __init__(self, *, total_steps: int | None = None, done_steps: int = 0, epochs: int | None = None) -> None:
        self.total_steps = total_steps
        self.number = done_steps
        self.epoch: int | None = None
        self.num_samples = 0
        self._has_epochs = epochs is not None
        self._now = self._next_mark = float("-inf")
        self._marks: deque[tuple[float, int, int]] = deque()

    def step(self, number: int, num_samples: int, epoch: int) -> bool:
        """Count a step. Returns whether to redraw. Called in every step."""
        self._now = now = monotonic()
        self.number = number
        self.epoch = epoch
        self.num_samples += num_samples
        if now < self._next_mark:
            return False
        self.wait()
        marks = self._marks
        marks.append((now, number, self.num_samples))
        while len(marks) > 2 and marks[1][0] < now - WINDOW_S:
            marks.popleft()
        return True

    def wait(self) -> None:
        """Let no further step be drawn for a moment."""
        self._next_mark = monotonic() + DRAW_EVERY_S

    def texts(self) -> list[str]:
        """Return texts such as ["812 samples/s", "eta 0:31"], leaving out what is not known yet."""
        if not self._marks:
            return []
        # Up to the last step, not to now: a validation would look like a slow step.
        time, number, num_samples = self._marks[0]
        elapsed_s = self._now - time
        num_steps = self.number - number
        if num_steps <= 0 or elapsed_s <= 0:
            return []
        texts = [f"{_number((self.num_samples - num_samples) / elapsed_s)} samples/s"]
        if self.total_steps is not None:
            texts.append(f"eta {format_time(round((self.total_steps - self.number) * elapsed_s / num_steps))}")
        return texts

    def place(self, number: int | None = None) -> str:
        """Return the position, or the position after `number` steps, such as "step 120/720 epoch 4"."""
        total = "" if self.total_steps is None else f"/{self.total_steps}"
        epoch = f"  epoch {self.epoch}" if self._has_epochs and self.epoch is not None else ""
        return f"step {self.number if number is None else number}{total}{epoch}"


class Progress:
    """The display of one rank: plain lines for files and pipes. Validations have a line each, other numbers are shown
    every `LINE_EVERY_S`. Each loop calls `begin`, `step` after each step, `log` for new numbers, and `end`.

    Args:
        is_shown: False: shows nothing until `take_over`.
    """

    def __init__(self, *, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._stream: TextIO | None = None  # that of `print`
        self._pace = Pace()
        self._place = ""  # where the newest numbers were measured
        self._news: dict[str, Any] = {}  # these numbers
        self._said_at = float("-inf")

    def begin(self, *, total_steps: int | None, done_steps: int, epochs: int | None) -> None:
        """Start a loop.

        Args:
            total_steps: the last step; None if there is no end.
            done_steps: number of steps completed before this start of the run.
            epochs: number of epochs; None for a loop without epochs.
        """
        self.close()
        self._news = {}
        self._pace = Pace(total_steps=total_steps, done_steps=done_steps, epochs=epochs)

    def step(self, number: int, num_samples: int, epoch: int) -> None:
        """Report `number` completed steps, the last with `num_samples` samples of epoch `epoch`."""
        if self._is_shown:
            self._pace.step(number, num_samples, epoch)

    def log(self, values: Mapping[str, Any], number: int | None = None) -> None:
        """Show numbers: those named "validation/..." on a line each time, others in the bar or on a line at intervals.

        Args:
            number: number of steps when they were measured, which may include the current one; None: as in `step`.
        """
        if not self._is_shown:
            return
        place = self._pace.place(number)
        validation = {name: value for name, value in values.items() if name.startswith("validation/")}
        if place != self._place:  # a line must not mix steps
            self._place = place
            self._news = {}
        self._news |= {name: value for name, value in values.items() if name not in validation}
        self._show(is_due=bool(validation))
        if validation:
            self.print("  ".join([place, *_texts(validation)]))

    def take_over(self, done_steps: int) -> None:
        """Show the loop from now on, on a rank that has become rank 0. Its standard output may not be shown."""
        self._is_shown = True
        self._stream = os.fdopen(read_terminal(), "w", closefd=False)
        self._pace.number = done_steps

    def print(self, *args: Any, **kw: Any) -> None:
        """Print above the bar, like the builtin."""
        if not self._is_shown:
            return
        try:
            print(*args, **{"flush": True, "file": self._stream, **kw})
        except BrokenPipeError:  # the reader, such as tee, has ended: continue the run
            drop_output(sys.stdout.fileno())
        except OSError:  # a full disk or a closed terminal: drop the line
            pass

    def end(self, rows: Mapping[str, Any]) -> None:
        """End the run: close the bar and print `rows` in two columns."""
        self.close()
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            self.print(f"{name:<{width}}  {_number(value)}")

    def close(self) -> None:
        """End the display without rows, as after an error. Can be called at any time and repeatedly."""
        self._show(is_due=True)

    def _show(self, *, is_due: bool = False) -> None:
        """Show the newest numbers, if that is due."""
        if self._news and (is_due or monotonic() - self._said_at >= LINE_EVERY_S):
            self.print("  ".join([self._place, *_texts(self._news), *self._pace.texts()]))
            self._news = {}
            self._said_at = monotonic()


class Bar(Progress):
    """A line at the bottom of a terminal, drawn by `step`: a thread would endanger the forks of data workers.

    Other output of a rank reaches the terminal a moment later, through the launcher. So the line is cleared before it,
    and not drawn again at once.
    """

    def __init__(self, terminal: int) -> None:
        super().__init__()
        self._terminal = terminal
        self._is_open = False

    def begin(self, *, total_steps: int | None, done_steps: int, epochs: int | None) -> None:
        super().begin(total_steps=total_steps, done_steps=done_steps, epochs=epochs)
        self._is_open = True

    def step(self, number: int, num_samples: int, epoch: int) -> None:
        if self._pace.step(number, num_samples, epoch):
            self._draw_line()

    def print(self, *args: Any, **kw: Any) -> None:
        if self._is_open:
            self._draw(CLEAR)
            self._pace.wait()
        super().print(*args, **kw)

    def close(self) -> None:
        if self._is_open:
            self._draw_line()
            self._is_open = False
            self._draw("\n")

    def _show(self, *, is_due: bool = False) -> None:
        """`step` does."""

    def _draw_line(self) -> None:
        values = _texts(self._news)
        place = self._pace.place().removeprefix("step ")
        line = escape("  ".join([place, *values[:1], *self._pace.texts(), *values[1:]]))
        with suppress(OSError):
            columns = os.get_terminal_size(self._terminal).columns or 80
            line = line[: columns - 1]  # what does not fit is cut off
        self._draw(CLEAR + line)

    def _draw(self, text: str) -> None:
        with suppress(OSError):
            os.write(self._terminal, text.encode(errors="backslashreplace"))


def _texts(values: Mapping[str, Any]) -> list[str]:
    """Format values, such as ["loss 0.1234", "lr 3.00e-04"]."""
    texts = []
    for full_name, value in values.items():
        name = full_name.removeprefix("train/")
        number = _number(value)
        if name.startswith(("learning rate", "learning_rate")):
            name = "lr" + name.partition("rate")[2]  # "learning rate/1" belongs to the second group
            number = f"{value:.2e}" if isinstance(value, float) else number
        texts.append(f"{name} {number}")
    return texts


def _number(value: Any) -> str:
    """Format a number, such as 0.1234, 12.35 or 1,235; other values with str."""
    if isinstance(value, int):
        return f"{value:,}"
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    if isinstance(value, str):
        return value
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e9 else f"{number:.4g}"
