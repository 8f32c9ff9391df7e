"""What a pipeline does not support ends with one sentence, on each map of stages to ranks that can see it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.errors import Error


class Chain(nn.Module):
    """Three layers. `way` is how forward calls them."""

    def __init__(self, way: Callable[..., Tensor] = lambda m, x: m.c(m.b(m.a(x)))) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


Body = Callable[[Any, Chain, Tensor], Tensor]


def compute(step: Any, model: Chain, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def run_with(
    model: Callable[[], nn.Module] = Chain,
    body: Body = compute,
    *,
    stages: Any = ("b", "c"),
    optimizer: Callable[..., Any] = torch.optim.SGD,
    objects: Callable[[nn.Module], dict[str, Any]] = lambda model: {},
    loop: Callable[..., object] = lambda step, compute_loss: step.run(compute_loss),
    prepare: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Train a few steps of a pipeline of three stages."""
    run: Any = samestep.Run(None, **{"batch_size": 4, "micro_batch_size": 2, "pipeline": 3, "device": "cpu"} | options)
    built: Any = model()
    updates = optimizer(built.parameters(), lr=0.1)
    given = {} if stages is None else {"stages": stages}
    run.prepare(model=built, optimizer=updates, **given, **objects(built), **prepare or {})
    for step in run.steps(torch.ones(8, 2), 2):
        loop(step, functools.partial(body, step, built))
        updates.step()


def loop_over(step: Any, compute_loss: Any) -> None:
    for _ in step:
        pass


def share_buffer() -> nn.Module:
    model = Chain()
    for each in (model.a, model.c):
        each.register_buffer("table", model.a.get_buffer("table") if each is model.c else torch.ones(2))
    return model


def share() -> nn.Module:
    model = Chain()
    model.c.weight.data = model.a.weight.data
    return model


def catch(step: Any, model: Chain, x: Tensor) -> Tensor:
    try:
        return compute(step, model, x)
    except BaseException:
        return x.sum()


def look(model: Any, x: Tensor) -> Tensor:
    y = model.a(x)
    return model.c(model.b(y * y.sum().item()))  # type: ignore[no-any-return]


def tie() -> Chain:
    model = Chain()
    model.c.weight = model.a.weight
    return model


def use_first_in_last(model: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(model.c(model.b(model.a(x))), model.a.weight)


def keep_loss(model: Any, x: Tensor) -> Tensor:
    y = model.a(x)
    model.extra = y.square().mean()
    return model.c(model.b(y))  # type: ignore[no-any-return]


ALL, SEVERAL = (1, 3), (3,)  # numbers of ranks


CASES: list[tuple[dict[str, Any], tuple[int, ...], str]] = [
    ({"stages": None}, ALL, "got 0 names in stages: name the 2 modules"),
    ({"stages": ["b", "d"]}, ALL, "names 'd', which is no module of model"),
    ({"stages": ["c", "b"]}, ALL, "names 'b' after a module that follows it"),
    ({"pipeline": None}, (1,), "got stages, and the run has no pipeline"),
    ({"shard": "optimizer"}, ALL, 'shard="optimizer" is not available with pipeline'),
    ({"shard": "fsdp2"}, ALL, 'shard="fsdp2" is not available with pipeline'),
    ({"check_compute_every": 2}, ALL, "check_compute_every is not available with pipeline"),
    ({"prepare": {"device_map": "keep"}}, ALL, 'device_map="keep" is not available with pipeline'),
    ({"objects": lambda model: {"average": torch.optim.swa_utils.AveragedModel(model)}}, ALL, "a pipeline cuts one"),
    ({"model": lambda: torch.compile(Chain(), backend="eager")}, ALL, "compiled as a whole"),
    ({"body": lambda step, model, x: model(x).sum() * torch.nan}, SEVERAL, "nan in micro-batch 0 (rank 2)"),
    ({"model": share_buffer}, ALL, "model.a.table and model.c.table are one buffer"),
    ({"model": share}, ALL, "shares memory with"),
    ({"optimizer": torch.optim.LBFGS}, SEVERAL, "LBFGS, which needs the gradients of all stages"),
    ({"loop": loop_over}, ALL, "for batch in step in step 0 of a run with pipeline"),
    ({"body": lambda step, model, x: step.backward(model(x).mean())}, ALL, "step.backward in step 0 of a run with"),
    ({"body": lambda step, model, x: model(model(x)).mean()}, (1,), "calls model twice"),
    ({"body": lambda step, model, x: model.a(x).mean()}, ALL, "model.a is in stage 0"),
    ({"body": lambda step, model, x: x.mean()}, ALL, "did not call model in a micro-batch"),
    ({"body": catch}, SEVERAL, "has caught a BaseException"),
    ({"model": lambda: Chain(lambda m, x: m.b(m.a(x)))}, ALL, "did not call model.c in a micro-batch"),
    ({"model": lambda: Chain(lambda m, x: m.b(m.c(m.a(x))))}, ALL, "model.c begins stage 2, and was called in stage 0"),
    ({"model": lambda: Chain(lambda m, x: m.a(m.c(m.b(m.a(x)))))}, ALL, "model.a is in stage 0"),
    ({"model": lambda: Chain(lambda m, x: (lambda y: m.c(y + m.b(y)))(m.a(x)))}, (1,), "has reached a stage before it"),
    ({"model": lambda: Chain(lambda m, x: (lambda y: m.c(y + m.b(y)))(m.a(x)))}, SEVERAL, "on the meta device before"),
    ({"model": lambda: Chain(lambda m, x: m.c(m.b(m.a(x))) * m.a.weight[0])}, (1,), "has reached a stage before it"),
    ({"model": lambda: Chain(use_first_in_last)}, (1,), "has reached a stage before it"),
    ({"model": lambda: Chain(use_first_in_last)}, SEVERAL, "on the meta device before"),
    ({"model": tie, "body": lambda step, model, x: compute(step, model, x) + model.c.weight.sum()}, ALL,
     "a weight that stages share outside of its modules"),
    ({"model": lambda: Chain(keep_loss), "body": lambda step, model, x: compute(step, model, x) + model.extra}, SEVERAL,
     "on the meta device before"),
    ({"model": lambda: Chain(look)}, SEVERAL, "on the meta device before"),
    ({"model": lambda: Chain(lambda m, x: m.c(m.b(torch.complex(m.a(x), x)).real))}, SEVERAL, "real numbers cross"),
    ({"env": {"SAMESTEP_PIPELINE_RANKS": "2"}}, SEVERAL, "give 1 or 3"),
    ({"pipeline": None, "stages": None, "env": {"SAMESTEP_PIPELINE_RANKS": "1"}}, (1,), "the run has no pipeline"),
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
