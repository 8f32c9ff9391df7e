"""What scripts do to a pass in one process, and the right numbers by hand."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from support.tiny import Tiny
from torch import Tensor, nn

import samestep
from samestep.errors import NotHealed
from samestep.world.transport import Transport


class FailsAt3(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, x: Tensor) -> Tensor:
        ctx.x = float(x)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.x == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return grad, None


@pytest.mark.parametrize("where", ["", "tries again", "outside of the loop"])
def test_a_backward_whose_error_is_caught_ends_the_run(where: str) -> None:
    def learn(tiny: Tiny, x: Tensor) -> None:
        loss = FailsAt3.apply(tiny.model.weight.sum() * x.mean(), x.mean())  # type: ignore[no-untyped-call]
        try:
            tiny.step.backward(loss)
        except torch.OutOfMemoryError:
            if where == "tries again":
                tiny.step.backward(tiny.model(x).mean())

    tiny = Tiny(model=lambda: nn.Linear(1, 1), batch_size=2, micro_batch_size=1)
    data = torch.tensor([[1.0], [3.0]])
    with pytest.raises(samestep.Error, match=r"raised OutOfMemoryError in micro-batch 1 .* smaller micro_batch_size"):
        if where == "outside of the loop":
            for step in tiny.run.steps(data, 2, shuffle=False):
                with suppress(torch.OutOfMemoryError):
                    for x in step:
                        step.backward(FailsAt3.apply(tiny.model.weight.sum() * x.mean(), x.mean()))  # type: ignore[no-untyped-call]
        else:
            tiny.train(num_steps=1, data=data, body=learn, shuffle=False)


def test_values_are_those_at_the_call() -> None:
    """The script writes to each tensor after the call that got it."""
    tiny = Tiny(optimizer=None)
    score = torch.zeros(1)
    predictions = torch.zeros(2)
    units = torch.tensor(1.0)
    for step in tiny.run.steps(torch.ones(8, 4), 1):
        for x in step:
            loss = 0 * tiny.model(x).mean() + 2
            units.fill_(1 + step.micro_batch)
            step.backward(loss, weight=units)
            step.log(value=units)
            with torch.no_grad():
                loss *= 10
                units *= 10

    def count(x: Tensor) -> dict[str, Any]:
        return {"total": score.add_(len(x)), "each": [*predictions.copy_(x[:, 0])]}

    assert step.metrics == {"loss": 2.0, "value": (1 + 4 + 9 + 16) / 10}
    scores = tiny.run.evaluate(count, torch.arange(8.0).expand(4, 8).T)
    assert scores["total"] == (2 + 4 + 6 + 8) / 4
    assert [*map(float, scores["each"])] == [*range(8)]


class Overwrites(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.mul_(2)


def test_a_function_that_writes_to_its_gradient() -> None:
    tiny = Tiny(model=lambda: nn.Linear(4, 1, bias=False), optimizer=None)
    for step in tiny.run.steps(torch.ones(8, 4), 2):
        for x in step:
            step.backward(Overwrites.apply(tiny.model(x).mean()))  # type: ignore[no-untyped-call]
        assert tiny.model.weight.grad.tolist() == [[2.0] * 4]
        tiny.model.weight.data.zero_()


def test_a_total_over_the_batch_has_the_random_numbers_of_the_loop() -> None:
    tiny = Tiny(optimizer=None)
    for step in tiny.run.steps(torch.ones(8, 4), 1):
        total = step.total(lambda x: (torch.rand(len(x)) < 0.5).sum())
        found = 0
        for x in step:
            found += int((torch.rand(len(x)) < 0.5).sum())
            step.backward(tiny.model(x).mean())
        assert total == found


def test_without_values_a_death_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that died may have been the only one that had values."""
    tiny = Tiny().train(num_steps=1)
    assert tiny.step.gather({}) == []
    monkeypatch.setattr(Transport, "gather", lambda self, value: [])
    with pytest.raises(NotHealed, match="a rank died before it sent the values"):
        tiny.step.gather({})
