"""What the tests of crashes and stops share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from promises.trial import Outcome, Trial, read_outcome
from support.disks import Disk, open_disk
from support.strikes import Strike

import samestep


@pytest.fixture
def trial(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trial]:
    """A run to which a test applies faults. Afterwards no process and no partial file of it is left."""
    strikes: list[Strike] = []
    made = Trial(tmp_path / "run", strikes)
    yield made
    request.node.user_properties += [strike.to_property() for strike in strikes]
    made.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with open_disk(tmp_path / "disk") as made:
        yield made


@pytest.fixture
def note_stall(request: pytest.FixtureRequest) -> Callable[[str, bool, float], None]:
    """Records whether a run that is stuck, or seems to be, was judged correctly."""

    def note(what: str, is_hit: bool, seconds: float) -> None:
        request.node.user_properties.append(("stall", [what, is_hit, seconds]))

    return note


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """The outcome of a run without faults, by the arguments of `faulty.train`."""
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
