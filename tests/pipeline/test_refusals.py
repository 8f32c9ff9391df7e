"""What a pipeline does not support ends with one sentence, on each map of stages to ranks that can see it."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import samestep
from samestep.errors import Error


class Chain(nn.Module):
    """Three layers. `way` is how forward calls them."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def run_with(
    way: Callable[..., Tensor] = lambda m, x: m.c(m.b(m.a(x))),
    change: Callable[[Any], Any] = lambda model: model,
    body: Callable[..., Tensor] = square,
    *,
    stages: Any = ("b", "c"),
    optimizer: Callable[..., Any] = torch.optim.SGD,
    objects: Callable[[nn.Module], dict[str, Any]] = lambda model: {},
    loop: Callable[..., object] = lambda step, compute_loss: step.run(compute_loss),
    **options: Any,
) -> None:
    """Train a few steps of a pipeline of three stages."""
    run: Any = samestep.Run(None, **{"batch_size": 4, "micro_batch_size": 2, "pipeline": 3, "device": "cpu"} | options)
    model = change(Chain(way))
    updates = optimizer(model.parameters(), lr=0.1)
    given = {} if stages is None else {"stages": stages}
    run.prepare(model=model, optimizer=updates, **given, **objects(model))
    for step in run.steps(torch.ones(8, 2), 2):
        loop(step, functools.partial(body, model))
        updates.step()


def share_buffer(model: Chain) -> Chain:
    model.a.register_buffer("table", torch.ones(2))
    model.c.register_buffer("table", model.a.table)
    return model


def share_memory(model: Chain) -> Chain:
    model.c.weight.data = model.a.weight.data
    return model


def later(way: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A forward that does something after the first micro-batch, which alone is checked in full."""
    calls = itertools.count()
    return lambda m, x: m.c(m.b(m.a(x))) if next(calls) < 2 else way(m, x)  # it computes the first one twice


def tie(model: Chain) -> Chain:
    model.c.weight = model.a.weight
    return model


def catch(model: Chain, x: Tensor) -> Tensor:
    try:
        return square(model, x)
    except BaseException:
        return x.sum()


def look(m: Chain, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.c(m.b(y * y.sum().item()))  # type: ignore[no-any-return]


def skip(m: Chain, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.c(y + m.b(y))  # type: ignore[no-any-return]


def use_first_in_last(m: Chain, x: Tensor) -> Tensor:
    return nn.functional.linear(m.c(m.b(m.a(x))), m.a.weight)


def keep_loss(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    m.extra = y.square().mean()
    return m.c(m.b(y))  # type: ignore[no-any-return]


def keep_average(model: Any) -> dict[str, Any]:
    average = vars(model)["average"] = AveragedModel(model)  # no part of the model
    return {"average": average}


ALL, ONE, SEVERAL = (1, 3), (1,), (3,)  # numbers of ranks


CASES: list[tuple[dict[str, Any], tuple[int, ...], str]] = [
    ({"stages": None}, ALL, "got 0 names in stages: name the 2 modules"),
    ({"stages": ["b", "d"]}, ALL, "names 'd', which is no module of model"),
    ({"stages": ["c", "b"]}, ALL, "names 'b' after a module that follows it"),
    ({"pipeline": None}, ONE, "got stages, and the run has no pipeline"),
    ({"shard": "optimizer", "shard_copies": 2}, ALL, "shard_copies=2 is not available with pipeline"),
    ({"shard": "fsdp2"}, ALL, 'shard="fsdp2" is not available with pipeline'),
    ({"check_compute_every": 2}, ALL, "check_compute_every is not available with pipeline"),
    ({"objects": lambda model: {"device_map": "keep"}}, ALL, 'device_map="keep" is not available with pipeline'),
    ({"objects": lambda model: {"other": nn.Linear(1, 1)}}, ALL, "got 2 models (model, other), and a pipe"),
    ({"objects": lambda model: {"average": AveragedModel(model.a)}}, ALL, "names 'b', which is no module of average"),
    ({"objects": keep_average, "body": lambda model, x: square(model, x) + model.average(x).mean()}, ALL,
     "calls average after model"),
    ({"objects": keep_average, "body": lambda model, x: model.average(x).mean()}, ALL, "no trained parameter"),
    ({"change": lambda model: torch.compile(model, backend="eager")}, ALL, "compiled as a whole"),
    ({"body": lambda model, x: model(x).sum() * torch.nan}, SEVERAL, "nan in micro-batch 0 (rank 2)"),
    ({"change": share_buffer}, ALL, "model.a.table and model.c.table are one buffer"),
    ({"change": share_memory}, ALL, "shares memory with"),
    ({"optimizer": torch.optim.LBFGS}, SEVERAL, "LBFGS, which needs the gradients of all stages"),
    ({"loop": lambda step, _: [*step]}, ALL, "for batch in step in step 0 of a run with pipeline"),
    ({"loop": lambda step, compute_loss: step.run(lambda x: step.backward(compute_loss(x)))}, ALL,
     "step.backward in step 0 of a run with"),
    ({"body": lambda model, x: model(model(x)).mean()}, ONE, "calls model after model"),
    ({"body": lambda model, x: model.a(x).mean()}, ALL, "model.a is in stage 0"),
    ({"body": lambda model, x: x.mean()}, ALL, "did not call model in a micro-batch"),
    ({"body": catch}, SEVERAL, "has caught a BaseException"),
    ({"way": lambda m, x: m.b(m.a(x))}, ALL, "did not call model.c in a micro-batch"),
    ({"way": lambda m, x: m.b(m.c(m.a(x)))}, ALL, "model.c begins stage 2, and was called in stage 0"),
    ({"way": lambda m, x: m.a(m.c(m.b(m.a(x))))}, ALL, "model.a is in stage 0"),
    *(({"way": way}, ALL, f"stage {stage} of model {sentence}") for way, stage, sentence in [
        (skip, 1, "passes a tensor of another stage to add"),
        (lambda m, x: (lambda y: m.c(y.detach() + m.b(y)))(m.a(x)), 1, "passes a tensor of another stage to add"),
        (lambda m, x: m.c(m.b(m.a(x) @ m.c.weight.detach())), 0, "passes a tensor of another stage to detach"),
        (lambda m, x: m.c(m.b(m.a(x))) * (x > 0), 2, "passes a tensor of another stage to"),
        (use_first_in_last, 2, "passes a tensor of another stage to linear"),
        (lambda m, x: m.c(m.b(m.a(x.mul_(2)))), 0, "writes to a tensor among its inputs"),
        (lambda m, x: m.c(m.b(m.a(x)) * float(torch.rand(()))), 1, "reads values of a tensor (__float__)"),
    ]),
    ({"change": lambda model: nn.Sequential(model.a, nn.ReLU(inplace=True), model.c), "stages": ["1", "2"]}, ALL,
     "stage 1 of model writes to a tensor among its inputs"),
    ({"way": look}, ONE, "stage 0 of model reads values of a tensor (item)"),
    ({"way": look}, SEVERAL, "may read values of the model before its end"),  # of the rank that is first to say so
    ({"way": lambda m, x: m.c(m.b(m.a(x) + torch.ones(2)))}, SEVERAL, "creates tensors with device="),
    ({"way": later(skip)}, ONE, "has reached a stage before it"),
    ({"way": later(skip)}, SEVERAL, "has no values there"),
    ({"way": later(use_first_in_last)}, ONE, "has reached a stage before it"),
    ({"change": tie, "body": lambda model, x: square(model, x) + model.c.weight.sum()}, ALL,
     "a weight that stages share outside of its modules"),
    ({"way": keep_loss, "body": lambda model, x: square(model, x) + model.extra}, SEVERAL, "has no values there"),
    ({"way": lambda m, x: m.c(m.b(torch.complex(m.a(x), x)).real)}, SEVERAL, "real numbers cross"),
    ({"env": {"SAMESTEP_PIPELINE_RANKS": "2"}}, SEVERAL, "give 1 or 3"),
    ({"pipeline": None, "stages": None, "env": {"SAMESTEP_PIPELINE_RANKS": "1"}}, ONE, "the run has no pipeline"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "world_sizes", "sentence"), CASES, ids=[sentence for *_, sentence in CASES])
def test_refused(arguments: dict[str, Any], world_sizes: tuple[int, ...], sentence: str) -> None:
    given = dict(arguments)
    env = given.pop("env", {})
    for world_size in world_sizes:
        with pytest.raises(Error) as raised:
            samestep.spawn(run_with, world_size, (), given, env=env)
        assert sentence in str(raised.value)
        assert "\n" not in str(raised.value)
