"""What the tests of crashes and stops share."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from promises.faulty import train
from promises.trial import Outcome, Trial, Undisturbed, read_outcome
from support.disks import open_disk

import samestep


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    """A run to which a test applies faults. Afterwards no process and no partial file of it is left."""
    made = Trial(tmp_path / "run")
    yield made
    made.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with open_disk(tmp_path / "disk") as made:
        yield made


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The outcome of a run without faults, by the arguments of `faulty.train`."""

    @functools.cache
    def run(**arguments: object) -> Outcome:
        directory = tmp_path_factory.mktemp("undisturbed") / "run"
        samestep.spawn(train, 1, (directory,), arguments)
        return read_outcome(directory)

    return run
