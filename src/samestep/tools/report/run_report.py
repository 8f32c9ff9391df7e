"""`samestep report`: writes an HTML file about one or several runs. Does not import torch."""

from collections.abc import Sequence
from pathlib import Path

import click

from samestep.command_line import PATH, Command, json_option, print_json
from samestep.console import escape, show_activity
from samestep.errors import Error
from samestep.files import replace_file
from samestep.snapshot.reading import open_run, read_run
from samestep.tools.inspect import find_runs
from samestep.tools.report.page import build_page
from samestep.tools.report.run_data import RunData, read_run_data
from samestep.units import format_bytes, format_count
from samestep.watch.records import RECORD


@click.command("report", cls=Command)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path())
@click.option("-o", "--output", type=PATH, default=Path("report.html"), help="file to write; default: report.html")
@json_option
def run_report(runs: Sequence[str], output: Path, is_json: bool) -> int:
    """Writes one HTML file about one or several runs.

    It shows metrics, throughput, where the time of every rank went, restarts, snapshots, the audit of the samples, and
    the configuration. The file needs no network. A run in progress is shown in its current state. Several runs are
    drawn into the same charts. RUN is a directory of a run, or of several runs.
    """
    if output.is_symlink() or (output.exists() and not output.is_file()):
        raise Error(
            f"{output} is {'a link' if output.is_symlink() else 'not a file'}: name a file with -o", code="SS113"
        )
    if output.suffix != ".html" and any((parent / RECORD).exists() for parent in output.absolute().parents):
        raise Error(
            f"{output} is in a run's directory, where only .html is written: name another file with -o", code="SS113"
        )
    named = [*dict.fromkeys(run for name in runs for run in [*map(str, find_runs(Path(name)))] or [name])]
    found: list[RunData] = []
    for run, name in zip(named, name_runs(named), strict=True):
        show_activity(f"reading {run} ...")
        with open_run(run) as directory:
            found.append(read_run_data(directory, name, read_run(directory, run)))
    page = build_page(found).encode()
    try:
        replace_file(output, page)
    except OSError as error:
        raise Error(
            f"{output} could not be written ({error.strerror}): name another file with -o", code="SS113"
        ) from None
    show_activity("")
    if is_json:
        print_json({"file": str(output), "size_bytes": len(page), "runs": [run.name for run in found]})
        return 0
    print(escape(f"{output}: {format_count(len(found), 'run')}, {format_bytes(len(page))}"))
    return 0


def name_runs(runs: list[str]) -> list[str]:
    """Return a short name for each run: its last name, or all of it if that is not unique."""
    short = [run.rstrip("/").rpartition("/")[2] or run for run in runs]
    return [name if short.count(name) == 1 else run for name, run in zip(short, runs, strict=True)]
