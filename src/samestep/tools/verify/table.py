"""Shows the progress of `samestep verify`: one line per run."""

import sys
from typing import Any


class Table:
    """A growing table: drawn by rich on a terminal, plain lines elsewhere."""

    HEADER = ("run", "ranks", "steps", "result", "time")

    def __init__(self, title: str) -> None:
        self._rows: list[tuple[str, ...]] = []
        self._now = ""
        self._live: Any = None
        self._title = title
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(self._draw(), refresh_per_second=4)
            self._live.start()
        else:
            print(title, flush=True)
            self._print(self.HEADER)

    def begin(self, run: str, ranks: str) -> None:
        """Show that a run has begun."""
        self._now = f"{run} on {ranks}"
        if self._live is not None:
            self._live.update(self._draw())

    def add(self, run: str, ranks: str, steps: str, result: str, seconds: float | None = None) -> None:
        """Add the row of a finished run."""
        self._now = ""
        self._rows.append((run, ranks, steps, result, "" if seconds is None else f"{seconds:.1f} s"))
        if self._live is None:
            self._print(self._rows[-1])
        else:
            self._live.update(self._draw())

    def close(self) -> None:
        """Stop drawing. The table stays on the screen."""
        if self._live is not None:
            self._live.update(self._draw())
            self._live.stop()
            self._live = None

    def _print(self, row: tuple[str, ...]) -> None:
        run, ranks, steps, result, time = row
        print(f"  {run:<24} {ranks:<10} {steps:>7}  {result:<44} {time}".rstrip(), flush=True)

    def _draw(self) -> Any:
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(title=escape(self._title), title_justify="left", caption_justify="left")
        for name in self.HEADER:
            table.add_column(name, justify="right" if name in ("steps", "time") else "left")
        for run, ranks, steps, result, time in self._rows:
            colour = (
                "green" if result == "same" else "yellow" if result.startswith(("skipped", "the reference")) else "red"
            )
            table.add_row(escape(run), ranks, steps, f"[{colour}]{escape(result)}[/]", time)
        if self._now:
            table.caption = f"{escape(self._now)} ..."
        return table
