"""Copies that are made during the computation, and what becomes of them: a snapshot, if they are sound, or nothing."""

from collections import defaultdict
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import Tensor

from samestep.snapshot import async_copy
from samestep.snapshot.async_copy import (
    LARGE_BYTES,
    Copy,
    Inspection,
    SnapshotOrder,
    Staging,
    TrainingState,
    is_finite,
    list_detectable,
    locate,
)
from samestep.snapshot.location import Location
from samestep.snapshot.snapshotter import Event, Stage, Writer, advance

NUM_LARGE = LARGE_BYTES // 4


def make_tensors() -> dict[str, Tensor]:
    return {
        "large": torch.randn(NUM_LARGE),
        "in other strides": torch.randn(2, NUM_LARGE // 8, 8).transpose(0, 2),
        "half": torch.randn(2 * NUM_LARGE).bfloat16(),
        "small": torch.randn(3),
        "with holes": torch.randn(2, NUM_LARGE)[:, ::2],
        "empty": torch.empty(0),
    }


def begin(
    tensors: dict[str, Tensor],
    targets: dict[str, Tensor] | None = None,
    look: Callable[[object, Tensor], None] = lambda place, tensor: None,
) -> Copy:
    """Begin to copy tensors, by default all. `look`: called with each part of them."""
    targets = Staging().take(tensors) if targets is None else targets
    inspection = Inspection(TrainingState({}, {}, [], [], [], None), step=1)
    inspection.look = look  # type: ignore[method-assign]
    return Copy(tensors, targets, stable={*map(locate, list_detectable(tensors.values()))}, inspection=inspection)


def test_what_is_copied_and_looked_at() -> None:
    tensors = make_tensors()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    looked: dict[object, list[Tensor]] = defaultdict(list)
    targets = Staging().take({name: tensor for name, tensor in tensors.items() if name != "half"})
    copy = begin(tensors, targets, lambda place, tensor: looked[place].append(tensor.clone().flatten()))
    for name in ("small", "with holes"):
        tensors[name].zero_()  # copied by now
    assert not torch.equal(targets["large"], tensors["large"])
    copy.run()
    copy.join()
    assert copy.torn == []
    for name, target in targets.items():
        assert torch.equal(target, expected[name]), name
        assert torch.cat(looked[locate(tensors[name])]).sort()[0].equal(target.flatten().sort()[0]), name
    assert torch.cat(looked[locate(tensors["half"])]).equal(tensors["half"])
    assert targets["in other strides"].stride() == tensors["in other strides"].stride()


def test_memory_is_used_again() -> None:
    """For a tensor of the same name, shape and strides."""
    staging = Staging()
    first = staging.take({name: torch.randn(2, 3) for name in ("same", "shape", "strides", "gone")})
    second = staging.take({"same": torch.randn(2, 3), "shape": torch.randn(4), "strides": torch.randn(3, 2).t()})
    assert [name for name in second if second[name] is first[name]] == ["same"]
    assert second["shape"].shape == (4,)
    assert second["strides"].stride() == (1, 2)


class OnGpu(Tensor):
    """A tensor in host memory that seems to be on cuda:1."""

    is_cuda = True
    device = torch.device("cuda", 1)  # type: ignore[assignment]


def test_a_thread_waits_for_the_copies_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on cuda:0, whose streams have nothing of a tensor on cuda:1."""
    cuda = MagicMock()
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(async_copy, "WriteDetector", lambda tensors: SimpleNamespace(find_changed=list))
    sources = {"large": torch.randn(NUM_LARGE).as_subclass(OnGpu), "small": torch.randn(3).as_subclass(OnGpu)}
    targets = {name: torch.zeros(each.shape) for name, each in sources.items()}
    begin(sources, targets, lambda place, tensor: cuda.look(tensor)).run()
    copied = ["stream", "stream().__enter__", "Stream().synchronize", "look", "stream().__exit__"]
    calls = [name for name, _, _ in cuda.mock_calls]
    assert calls == ["Stream", "current_stream", "Stream().wait_stream", *copied, *copied]
    cuda.Stream.assert_called_once_with(OnGpu.device)
    cuda.current_stream.assert_called_once_with(OnGpu.device)
    assert cuda.stream.call_args_list == [call(cuda.Stream.return_value)] * 2


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.add_(1),
        lambda tensor: tensor[5].zero_(),
        lambda tensor: tensor.view(2, -1)[1].mul_(2),
        lambda tensor: tensor.data.mul_(0.99),
        lambda tensor: tensor.data.copy_(torch.randn(NUM_LARGE)),
        lambda tensor: torch._foreach_add_([tensor], 1),
        lambda tensor: torch.optim.SGD([tensor], 0.1).step(),
    ],
)
def test_what_is_written_to_is_torn(write: object) -> None:
    tensors = {"still": torch.randn(NUM_LARGE), "changed": torch.randn(NUM_LARGE)}
    tensors["changed"].grad = torch.ones(NUM_LARGE)
    copy = begin(tensors)
    copy.run()
    write(tensors["changed"])  # type: ignore[operator]
    copy.join()
    assert copy.torn == [locate(tensors["changed"])]


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_finite(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)  # their sum is not finite
    assert is_finite(tensor)
    tensor[17] = bad
    assert not is_finite(tensor)
    assert is_finite(torch.empty(0, dtype=dtype))


def test_the_first_tensor_that_is_not_finite_is_named() -> None:
    checked = [(name, torch.full((size,), torch.nan)) for size, name in enumerate(("first", "second"), start=1)]
    inspection = Inspection(TrainingState({}, {}, checked, [], [], None), step=1)
    inspection.look_again()
    assert inspection.find_infinite() == "first"


# --- the thread that writes them ----------------------------------------------------------------------------------


def test_a_view_of_a_parameter_is_not_compared_with_it() -> None:
    """Ranks that write nothing look at the parameter alone."""
    weight = torch.randn(4, 2)
    compared: list[object] = []
    inspection = Inspection(TrainingState({}, {}, [], [], [("weight", weight)], compared.append), step=1)
    Copy({"weight": weight, "flat": weight.view(-1)}, {}, stable=(), inspection=inspection)
    inspection.conclude("")
    inspection.look_again()
    inspection.conclude("")
    assert compared[0] == compared[1]


def write(copy: Copy, *, is_divided: bool = False) -> tuple[Writer, MagicMock]:
    """Write a copy. Returns the location, too, which notes what is called."""
    location = MagicMock(spec=Location, is_divided=is_divided)
    return Writer(copy, location, SnapshotOrder(1)), location


def list_calls(location: MagicMock) -> list[str]:
    return [name for name, _, _ in location.method_calls]


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


@pytest.mark.parametrize("is_divided", [False, True])
def test_a_rank_alone_completes_no_torn_one_and_no_divided_one(is_divided: bool) -> None:
    large = torch.randn(NUM_LARGE)
    copy = begin({"large": large})
    large.add_(1)
    writer, location = write(copy, is_divided=is_divided)
    if is_divided:
        writer.handle(Event.SOUND)  # all say so, and no part of another rank is written
    writer.wait_until_written()
    assert (writer.stage, list_calls(location)) == (Stage.ABORTED, ["prepare", "abort"])


def test_errors_are_kept() -> None:
    def look(place: object, tensor: Tensor) -> None:
        raise ValueError("a look")

    copy = begin({"large": torch.randn(NUM_LARGE)}, {}, look)
    writer, location = write(copy)
    writer.wait_until_written()
    assert copy.has_failed
    assert str(writer.failure) == "a look"
    assert list_calls(location) == ["abort"]
