"""Copies that are made during the computation: their content, and the writes that they detect."""

import pytest
import torch
from torch import Tensor

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
    return Copy(tensors, targets, stable=stable, look=lambda place, tensor: None), targets


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
