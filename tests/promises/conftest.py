"""What the tests of crashes and stops share, and the table of what they did, at the end."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from promises.trial import Outcome, Strike, Trial, read_outcome

import samestep

STRIKES = pytest.StashKey[list[Strike]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STRIKES] = []


@pytest.fixture
def trial(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trial]:
    """A run that is about to suffer. Afterwards no process of it is left."""
    made = Trial(tmp_path / "run", request.config.stash[STRIKES])
    yield made
    made.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """What becomes of a run that nothing happens to, by the arguments of `faulty.train`."""
    from promises.faulty import train

    known: dict[str, Outcome] = {}

    def run(**arguments: object) -> Outcome:
        key = repr(sorted(arguments.items()))
        if key not in known:
            directory = tmp_path_factory.mktemp("undisturbed") / "run"
            samestep.spawn(train, 1, (directory,), arguments)
            known[key] = read_outcome(directory)
        return known[key]

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    strikes = config.stash.get(STRIKES, [])
    if not strikes:
        return
    kinds = sorted({strike.fault for strike in strikes})
    moments = list(dict.fromkeys(strike.moment for strike in strikes))
    rows = [["moment", *kinds, "slowest end"]]
    for moment in moments:
        there = [strike for strike in strikes if strike.moment == moment]
        counts = [str(sum(strike.fault == kind for strike in there) or "") for kind in kinds]
        rows.append([moment, *counts, f"{max(strike.ended_s for strike in there):.1f} s"])
    totals = [str(sum(strike.fault == kind for strike in strikes)) for kind in kinds]
    rows.append([f"all {len(strikes)}", *totals, f"{max(strike.ended_s for strike in strikes):.1f} s"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    terminalreporter.section("faults and the moments they struck at; the run then went on to the same end", sep="-")
    for row in rows:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
