"""Training functions that do not yet do the same on any number of ranks: each plain PyTorch that a script may hold."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from promises.loops import Result, build_run, train_classes
from promises.models import build_pairs, build_texts
from support.trace import Trace
from torch import Tensor, nn

GAPS: dict[str, Callable[[], Result]] = {}


def gap(fn: Callable[[], Result]) -> Callable[[], Result]:
    GAPS[fn.__name__] = fn
    return fn


@gap
def buffers_written_through_data() -> Result:
    """As codebooks often are; their version counters do not tell."""
    run = build_run()

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.head = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean.data.mul_(0.9).add_(0.1 * x.mean(0))
            return self.head(x - self.mean)

    model = Codebook()
    return train_classes(run, model, torch.optim.SGD(model.parameters(), 0.1))


@gap
def two_views_of_one_gradient() -> Result:
    """Autograd gives both weights the same memory as their gradient, and adding in place then adds to both."""
    run = build_run()

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.a.view(24) + self.b.view(24)).view(6, 4)

    model = Sum()
    return train_classes(run, model, torch.optim.SGD(model.parameters(), 0.1))


@gap
def embeddings_with_max_norm() -> Result:
    """The forward shortens the rows that it looks up, on the rank that looks them up."""
    run = build_run()
    model = nn.Sequential(nn.Embedding(17, 4, max_norm=0.5), nn.Flatten(), nn.Linear(36, 17))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    trace = Trace(run)
    for epoch in run.epochs(build_texts(), 2):
        for step in epoch:
            for tokens in step:
                step.backward(F.cross_entropy(model(tokens[:, :-1]), tokens[:, -1]))
            optimizer.step()
            trace.end_step(step)
    return trace.finish()


@gap
def gradients_kept_for_the_next_step() -> Result:
    """With more than one rank, the next step writes its gradient into the same memory."""
    run = build_run()
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    trace = Trace(run)
    before: Any = None
    for epoch in run.epochs(build_pairs(), 2):
        for step in epoch:
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            if before is not None:
                trace.add("cosine", F.cosine_similarity(before.flatten(), model.weight.grad.flatten(), dim=0))
            before = model.weight.grad
            optimizer.step()
            trace.end_step(step)
    return trace.finish()
