"""The progress display of rank 0: a bar on a terminal, plain lines elsewhere."""

import io
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import IO, TYPE_CHECKING, Any, cast

from samestep.console import escape
from samestep.world.environment import drop_output

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

DRAW_EVERY_S = 0.1
LINE_EVERY_S = 2.0
WINDOW_S = 20.0
LOSSES = ("train/loss", "loss")
LEAST_BAR = 12  # minimum width of the bar and its gaps, in columns; the fields share the rest


class Progress:
    """The display of one rank. Each loop calls `begin`, `step` after each step, `log` for new numbers, and `end`.

    This class shows nothing: it is the display of ranks other than 0.
    """

    def begin(self, *, total_steps: int | None, done_steps: int, epochs: int | None) -> None:
        """Start a loop.

        Args:
            total_steps: the last step; None if there is no end.
            done_steps: number of steps completed before this start of the run.
            epochs: number of epochs; None for a loop without epochs.
        """

    def step(self, number: int, num_samples: int, epoch: int) -> None:
        """Report `number` completed steps, the last with `num_samples` samples of epoch `epoch`."""

    def log(self, values: Mapping[str, Any], number: int | None = None) -> None:
        """Show numbers: those named "validation/..." on a line each time, others in the bar or on a line at intervals.

        Args:
            number: number of steps when they were measured, which may include the current one; None: as in `step`.
        """

    def print(self, *args: Any, **kw: Any) -> None:
        """Print above the bar, like the builtin."""

    def end(self, rows: Mapping[str, Any]) -> None:
        """End the run: close the bar and print `rows` as a table of two columns."""

    def close(self) -> None:
        """Close the bar without a table, as after an error. Can be called at any time and repeatedly."""

    def take_over(self, done_steps: int) -> None:
        """Show the loop from now on, on a rank that has become rank 0."""


def build_progress(*, rank: int, terminal: bool | None = None, stands_by: bool = False) -> Progress:
    """Return the display of this rank: on rank 0 a bar on a terminal, or plain lines elsewhere; on other ranks none.

    Args:
        terminal: whether to draw a bar; None: if both standard output and standard error are terminals.
        stands_by: whether another rank can take the place of rank 0.
    """
    if rank != 0:
        return Lines(is_shown=False) if stands_by else Progress()
    if terminal is None:
        terminal = sys.stdout.isatty() and sys.stderr.isatty()
    if terminal:
        bar = Bar()
        if not bar.console.is_dumb_terminal:
            return bar
    return Lines()


def say_above(progress: Progress, sentence: str) -> None:
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
        self._next_mark = now + DRAW_EVERY_S
        marks = self._marks
        marks.append((now, number, self.num_samples))
        while len(marks) > 2 and marks[1][0] < now - WINDOW_S:
            marks.popleft()
        return True

    def begin_at(self, number: int) -> None:
        """Measure from here on, after `number` steps."""
        self.number = number

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
            texts.append(f"eta {_duration((self.total_steps - self.number) * elapsed_s / num_steps)}")
        return texts

    def place(self, number: int | None = None) -> str:
        """Return the position, or the position after `number` steps, such as "step 120/720 epoch 4"."""
        total = "" if self.total_steps is None else f"/{self.total_steps}"
        epoch = f"  epoch {self.epoch}" if self._has_epochs and self.epoch is not None else ""
        return f"step {self.number if number is None else number}{total}{epoch}"


class Lines(Progress):
    """Plain lines for files and pipes: validations, and every `LINE_EVERY_S` a line for each step with new numbers.

    Args:
        is_shown: False: shows nothing until `take_over`.
    """

    def __init__(self, *, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._pace = Pace()
        self._news: dict[str, Any] = {}  # not shown yet
        self._places: dict[str, str] = {}  # where each of them was measured
        self._said_at = float("-inf")

    def begin(self, *, total_steps: int | None, done_steps: int, epochs: int | None) -> None:
        self.close()
        self._pace = Pace(total_steps=total_steps, done_steps=done_steps, epochs=epochs)

    def step(self, number: int, num_samples: int, epoch: int) -> None:
        if self._is_shown:
            self._pace.step(number, num_samples, epoch)

    def log(self, values: Mapping[str, Any], number: int | None = None) -> None:
        if not self._is_shown:
            return
        line = self._take(values, number)
        if self._news and (line or monotonic() - self._said_at >= LINE_EVERY_S):
            self._say_news()
        if line:
            self.print(line)

    def _take(self, values: Mapping[str, Any], number: int | None) -> str:
        """Keep numbers to show later. Returns the line for those of validation; "" if there are none."""
        validation = {name: value for name, value in values.items() if name.startswith("validation/")}
        if news := {name: value for name, value in values.items() if name not in validation}:
            self._news = {name: value for name, value in self._news.items() if name not in news} | news
            self._places |= dict.fromkeys(news, self._pace.place(number))
        return "  ".join([self._pace.place(number), *_texts(validation)]) if validation else ""

    def take_over(self, done_steps: int) -> None:
        self._is_shown = True
        self._pace.begin_at(done_steps)

    def print(self, *args: Any, **kw: Any) -> None:
        if not self._is_shown:
            return
        try:
            print(*args, **{"flush": True, **kw})
        except BrokenPipeError:  # the reader, such as tee, has ended: continue the run
            drop_output(sys.stdout.fileno())
        except OSError:  # a full disk or a closed terminal: drop the line
            pass

    def end(self, rows: Mapping[str, Any]) -> None:
        self.close()
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            self.print(f"{name:<{width}}  {_number(value)}")

    def close(self) -> None:
        self._say_news()

    def _say_news(self) -> None:
        if self._news:
            pace = self._pace.texts()
            newest = self._places[[*self._news][-1]]
            for place in dict.fromkeys(self._places[name] for name in self._news):  # a line must not mix steps
                values = {name: value for name, value in self._news.items() if self._places[name] == place}
                self.print("  ".join([place, *_texts(values), *(pace if place == newest else ())]))
            self._news.clear()
            self._said_at = monotonic()


class Terminal:
    """Standard output beneath rich's proxy. Drops output to a closed terminal, so that the run continues."""

    @property
    def _file(self) -> IO[str]:
        return cast(IO[str], getattr(sys.stdout, "rich_proxied_file", sys.stdout))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()


class Bar(Lines):
    """A bar on a terminal, drawn by `step`: a thread would endanger the forks of data workers."""

    def __init__(self) -> None:
        from rich.console import Console  # imported here, because it is slow

        super().__init__()
        self.console = Console(force_terminal=True, file=cast(IO[str], Terminal()))
        self._place_width = 0
        self._live: RichProgress | None = None

    def begin(self, *, total_steps: int | None, done_steps: int, epochs: int | None) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        super().begin(total_steps=total_steps, done_steps=done_steps, epochs=epochs)
        self._news.clear()
        longest = "" if total_steps is None else f"{total_steps}/{total_steps}  epoch {epochs}"
        self._place_width = len(longest)
        place = Column(no_wrap=True, min_width=len(longest))
        self._live = RichProgress(
            TextColumn("{task.description}", markup=False, table_column=place),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[news]}", markup=False, table_column=Column(no_wrap=True)),
            console=self.console,
            auto_refresh=False,
            expand=True,
        )
        self._live.add_task(self._pace.place().removeprefix("step "), total=total_steps, completed=done_steps, news="")
        self._live.start()
        self.console.show_cursor(True)  # a hidden one would stay hidden if the process is killed

    def step(self, number: int, num_samples: int, epoch: int) -> None:
        if self._pace.step(number, num_samples, epoch):
            self._draw()

    def log(self, values: Mapping[str, Any], number: int | None = None) -> None:
        if line := self._take(values, number):
            self._draw()
            self.print(line)

    def print(self, *args: Any, **kw: Any) -> None:
        if self._live is None or kw.get("file") is not None:
            print(*args, **kw)
            return
        text = io.StringIO()
        print(*args, **{**kw, "file": text})
        # Not through rich's proxy for sys.stdout, which breaks long lines at the terminal's width.
        from rich.text import Text

        self.console.print(Text.from_ansi(text.getvalue().removesuffix("\n")), soft_wrap=True)

    def end(self, rows: Mapping[str, Any]) -> None:
        self.close()
        from rich.table import Table

        table = Table(show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(str(name), _number(value))
        if rows:
            self.console.print(table, markup=False, highlight=False)

    def close(self) -> None:
        if self._live is not None:
            self._draw()
            live = self._live
            self._live = None
            live.stop()

    def _draw(self) -> None:
        if self._live is not None:
            task = self._live.task_ids[0]
            place = self._pace.place().removeprefix("step ")
            losses = {name: value for name, value in self._news.items() if name in LOSSES}
            rates = {name: value for name, value in self._news.items() if _is_rate(name)}
            others = {name: value for name, value in self._news.items() if name not in losses | rates}
            loss = _texts(losses)
            rate = _texts(rates)
            rest = _texts(others)
            pace = self._pace.texts()
            width = self.console.width - max(len(place), self._place_width) - LEAST_BAR
            kept: list[str] = []  # the most important ones that fit
            for text in [*loss, *reversed(pace), *rate, *rest]:
                if len("  ".join([*kept, text])) <= width:
                    kept.append(text)
            news = "  ".join(text for text in [*loss, *rate, *pace, *rest] if text in kept)
            total = self._pace.total_steps
            self._live.update(task, completed=self._pace.number, total=total, description=place, news=news)
            self._live.refresh()


def _texts(values: Mapping[str, Any]) -> list[str]:
    """Format values, such as ["loss 0.1234", "lr 3.00e-04"]."""
    texts = []
    for full_name, value in values.items():
        name = full_name.removeprefix("train/")
        if _is_rate(name):
            label = "lr" + name.partition("rate")[2]  # "learning rate/1" belongs to the second group
            texts.append(f"{label} {value:.2e}" if isinstance(value, float) else f"{label} {_number(value)}")
        else:
            texts.append(f"{name} {_number(value)}")
    return texts


def _is_rate(name: str) -> bool:
    return name.removeprefix("train/").startswith(("learning rate", "learning_rate"))


def _number(value: Any) -> str:
    """Format a number, such as 0.1234, 12.35 or 1,235; other values with str."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    if isinstance(value, (int, str)):
        return f"{value:,}" if isinstance(value, int) else value
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e9 else f"{number:.4g}"


def _duration(seconds: float) -> str:
    """Format hours, minutes and seconds, such as 0:31 or 1:02:03."""
    minutes, seconds_left = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"
