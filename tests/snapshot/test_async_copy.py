"""Copies that are made during the computation: their content, and the writes that they detect."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep.snapshot import async_copy
from samestep.snapshot.async_copy import (
    LARGE_BYTES,
    Copy,
    Staging,
    is_finite,
    locate,
)

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


def begin(tensors: dict[str, Tensor], staging: Staging | None = None) -> tuple[Copy, dict[str, Tensor]]:
    targets = (staging or Staging()).take(tensors)
    stable = {locate(tensor) for tensor in tensors.values()}
    return Copy(tensors, targets, stable=stable, look=lambda address, tensor: None), targets


def test_what_is_copied() -> None:
    tensors = make_tensors()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    copy, targets = begin(tensors)
    tensors["small"].zero_()  # copied by now
    tensors["with holes"].zero_()
    assert not torch.equal(targets["large"], tensors["large"])
    copy.run()
    copy.join()
    for tensor in tensors.values():
        tensor.zero_()
    assert copy.torn == []
    for name, target in targets.items():
        assert torch.equal(target, expected[name]), name
    assert targets["in other strides"].stride() == tensors["in other strides"].stride()


def test_each_tensor_is_inspected_once_in_its_copy() -> None:
    tensors = {"large": torch.randn(NUM_LARGE), "small": torch.randn(3), "not copied": torch.randn(NUM_LARGE)}
    targets = Staging().take({name: tensors[name] for name in ("large", "small")})
    seen: list[tuple[int, int]] = []
    copy = Copy(
        tensors, targets, stable={locate(t) for t in tensors.values()}, look=lambda p, t: seen.append((p, locate(t)))
    )
    assert seen == [(locate(tensors["small"]), locate(targets["small"]))]
    copy.run()
    assert seen[1:] == [
        (locate(tensors["large"]), locate(targets["large"])), (locate(tensors["not copied"]),) * 2
    ]  # fmt: skip


def test_memory_is_used_again() -> None:
    staging = Staging()
    tensors = make_tensors()
    _, first = begin(tensors, staging)
    tensors["small"] = torch.randn(4)
    del tensors["half"]
    _, second = begin(tensors, staging)
    assert [name for name in second if second[name] is first.get(name)] == [
        "large", "in other strides", "with holes", "empty"
    ]  # fmt: skip
    assert second["small"].shape == (4,)
    assert "half" not in second
    tensors["large"] = torch.randn(2, NUM_LARGE // 2)
    _, third = begin(tensors, staging)
    tensors["large"] = tensors["large"].view(NUM_LARGE // 2, 2).t()  # the same shape
    _, fourth = begin(tensors, staging)
    assert third["large"].stride() != fourth["large"].stride() == tensors["large"].stride()


class Stream:
    """A stream of a fake GPU. What is queued runs once somebody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(device)
        self.queue: list[Callable[[], object]] = []

    def wait_stream(self, other: "Stream") -> None:
        self.queue.append(other.synchronize)

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class Gpus(threading.local):
    """Takes the place of `torch.cuda`. Each thread has a current device, at first cuda:0, and a stream per device."""

    def __init__(self, default: tuple[Stream, ...]) -> None:
        self.default = default
        self.place = 0
        self.streams: dict[int, Stream] = {}

    def Stream(self, device: Any = None) -> Stream:
        return Stream(torch.device("cuda", self.place) if device is None else device)

    def current_stream(self, device: Any = None) -> Stream:
        place = self.place if device is None else torch.device(device).index
        return self.streams.get(place, self.default[place])

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.place, self.streams
        self.place, self.streams = stream.device.index, {stream.device.index: stream}
        yield
        self.place, self.streams = before


class OnGpu(Tensor):
    """A tensor of cuda:1. What copies it queues this on the current stream."""

    is_cuda = True
    device = torch.device("cuda", 1)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.copy_:
            target, source = (each.as_subclass(Tensor) for each in args)
            torch.cuda.current_stream(cls.device).queue.append(lambda: target.copy_(source))  # type: ignore[attr-defined]
            return args[0]
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_thread_waits_for_the_copies_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on cuda:0, whose streams have nothing of a tensor on cuda:1."""
    gpus = Gpus(tuple(Stream(torch.device("cuda", place)) for place in range(2)))
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpus, name))
    monkeypatch.setattr(async_copy, "WriteDetector", lambda tensors: SimpleNamespace(find_changed=list))
    gpus.place = 1  # as after torch.cuda.set_device in the main thread
    expected = {"large": torch.randn(NUM_LARGE), "small": torch.randn(3), "on the CPU": torch.randn(NUM_LARGE)}
    source = torch.zeros(NUM_LARGE)
    torch.cuda.current_stream().queue.append(lambda: source.copy_(expected["large"]))  # type: ignore[attr-defined]
    tensors = {"large": source.as_subclass(OnGpu), "small": expected["small"].as_subclass(OnGpu)}
    tensors["on the CPU"] = expected["on the CPU"]
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    stable = {locate(tensor) for tensor in tensors.values()}
    seen: dict[int, list[Tensor]] = defaultdict(list)
    copy = Copy(tensors, targets, stable=stable, look=lambda address, tensor: seen[address].append(tensor.clone()))
    thread = threading.Thread(target=copy.run)
    thread.start()
    thread.join()
    copy.join()
    for name, tensor in tensors.items():
        assert torch.equal(torch.cat(seen[locate(tensor)]), expected[name]), name


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
    copy, _ = begin(tensors)
    copy.run()
    write(tensors["changed"])  # type: ignore[operator]
    copy.join()
    assert copy.torn == [locate(tensors["changed"])]


def test_what_is_only_read_or_replaced_is_not_torn() -> None:
    weight = torch.nn.Parameter(torch.randn(NUM_LARGE))
    copy, targets = begin({"weight": weight.detach()})
    before = weight.detach().clone()
    (weight * 2).sum().backward()
    weight.data = torch.zeros(NUM_LARGE)
    copy.run()
    copy.join()
    assert copy.torn == []
    assert torch.equal(targets["weight"], before)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_finite(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)  # their sum is not finite
    assert is_finite(tensor)
    tensor[17] = bad
    assert not is_finite(tensor)
    assert is_finite(torch.empty(0, dtype=dtype))
