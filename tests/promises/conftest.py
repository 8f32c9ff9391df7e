"""What the tests of crashes and stops share, and the table of what they did, at the end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import wrap

import pytest
from promises.trial import Outcome, Strike, Trial, read_outcome

import samestep

STRIKES = pytest.StashKey[list[Strike]]()
STALLS = pytest.StashKey[list[tuple[str, bool, float]]]()  # what stood still, whether it was judged rightly, seconds


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STRIKES] = []
    config.stash[STALLS] = []


@pytest.fixture
def trial(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trial]:
    """A run that is about to suffer. Afterwards no process of it is left."""
    made = Trial(tmp_path / "run", request.config.stash[STRIKES])
    yield made
    made.close()


@pytest.fixture
def note_stall(request: pytest.FixtureRequest) -> Callable[[str, bool, float], None]:
    """Writes down how a run that stands still, or seems to, was judged."""

    def note(what: str, is_hit: bool, seconds: float) -> None:
        request.config.stash[STALLS].append((what, is_hit, seconds))

    return note


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
    crashes = [strike for strike in strikes if strike.fault.startswith(("kill", "raise"))]
    stops = [strike for strike in strikes if strike not in crashes]
    for what, of_kind in (("crashes", crashes), ("stops", stops)):
        if of_kind:
            terminalreporter.section(f"{what}, by the moment; each run then came to the same end", sep="-")
            for line in format_table(of_kind):
                terminalreporter.write_line(line)
    stalls = config.stash.get(STALLS, [])
    if stalls:
        num_hits = sum(is_hit for _, is_hit, _ in stalls)
        terminalreporter.section(f"stuck or only slow: {num_hits} of {len(stalls)} judged rightly", sep="-")
        for what, is_hit, seconds in stalls:
            terminalreporter.write_line(f"{what:<24}{'hit' if is_hit else 'MISS':<6}{seconds:.1f} s")


def format_table(strikes: list[Strike]) -> list[str]:
    """How often each fault struck at each moment, and the longest that everything took to end then."""

    def count(moment: str, there: list[Strike]) -> list[str]:
        counts = [str(sum(strike.fault == kind for strike in there) or "") for kind in kinds]
        return [moment, *counts, f"{max(strike.ended_s for strike in there):.1f} s"]

    kinds = sorted({strike.fault for strike in strikes})
    heads = [["", "moment"], *(wrap(kind, 12) for kind in kinds), ["slowest", "end"]]
    rows = [[head[line] if line < len(head) else "" for head in heads] for line in range(max(map(len, heads)))]
    for moment in dict.fromkeys(strike.moment for strike in strikes):
        rows.append(count(moment, [strike for strike in strikes if strike.moment == moment]))
    rows.append(count(f"all {len(strikes)}", strikes))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
