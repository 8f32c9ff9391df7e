"""A snapshot is completed after a sound copy and all parts, and after nothing else."""

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from samestep.snapshot.async_copy import LARGE_BYTES, Copy, Staging, locate
from samestep.snapshot.inspection import Inspection, SnapshotOrder, TrainingState
from samestep.snapshot.location import Location
from samestep.snapshot.manifest import Extents
from samestep.snapshot.snapshotter import Event, Stage, Writer, advance

NUM_LARGE = LARGE_BYTES // 4


class Noted(Location):
    """Where a snapshot is written. It notes what is called."""

    def __init__(self, *, is_divided: bool = False) -> None:
        self.is_divided = is_divided
        self.calls: list[str] = []

    def prepare(self, order: SnapshotOrder, tensors: Mapping[str, Tensor]) -> list[Extents]:
        self._note("prepare")
        return []

    def commit(self, order: SnapshotOrder, parts: Sequence[Extents]) -> None:
        self._note("commit")

    def abort(self, order: SnapshotOrder) -> None:
        self._note("abort")

    def _note(self, what: str) -> None:
        self.calls.append(what)


def begin(location: Noted, copy: Copy | None = None) -> Writer:
    inspection = Inspection(TrainingState({}, {}, [], [], [], pytest.fail), step=1)
    return Writer(copy or make_copy(torch.randn(NUM_LARGE)), location, SnapshotOrder(1), {}, inspection)


def make_copy(tensor: Tensor) -> Copy:
    tensors = {"large": tensor}
    return Copy(tensors, Staging().take(tensors), stable={locate(tensor)}, look=lambda address, tensor: None)


@pytest.mark.parametrize("is_divided", [False, True])
def test_all_sequences_of_events(is_divided: bool) -> None:
    """The first event that is not expected aborts, and no event changes a decision."""
    wanted = (Event.SOUND, Event.WRITTEN) if is_divided else (Event.SOUND,)
    for events in (each for length in range(5) for each in product(Event, repeat=length)):
        stage = Stage.COPYING
        for event in events:
            stage = advance(stage, event, is_divided=is_divided)
        own = events[: len(wanted)]
        if own == wanted:
            assert stage is Stage.COMMITTED
        elif own == wanted[: len(own)]:
            assert stage is (Stage.WRITING if own else Stage.COPYING)
        else:
            assert stage is Stage.ABORTED


def test_a_rank_alone_completes_no_divided_one() -> None:
    location = Noted(is_divided=True)
    writer = begin(location)
    writer.handle(Event.SOUND)
    writer.wait_until_written()
    assert (writer.stage, location.calls) == (Stage.ABORTED, ["prepare", "abort"])


def test_a_rank_alone_refuses_what_is_torn() -> None:
    location = Noted()
    large = torch.randn(NUM_LARGE)
    copy = make_copy(large)
    large.add_(1)
    writer = begin(location, copy)
    writer.wait_until_written()
    assert (writer.stage, location.calls) == (Stage.ABORTED, ["prepare", "abort"])


def test_errors_are_kept() -> None:
    def look(address: int, tensor: Tensor) -> None:
        raise ValueError("a look")

    large = torch.randn(NUM_LARGE)
    copy = Copy({"large": large}, {}, stable={locate(large)}, look=look)
    location = Noted()
    writer = begin(location, copy)
    writer.wait_until_written()
    assert copy.has_failed
    assert str(writer.failure) == "a look"
    assert location.calls == ["abort"]
