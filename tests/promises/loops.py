"""What the training functions of these tests share: a run, a plain loop, and a table of them all.

Run on any number of ranks, each of them must do the same. Almost all have 12 micro-batches per step, so that 1 to 12
ranks are legal, and a short last step that leaves ranks idle, with a ragged last micro-batch.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from promises.models import (
    BATCH_SIZE,
    MICRO_BATCH_SIZE,
    build_pairs,
)
from support.trace import Trace
from torch import Tensor, nn

import samestep

Result = list[tuple[str, Any]]
CASES: dict[str, Callable[[], Result]] = {}


def case(fn: Callable[[], Result]) -> Callable[[], Result]:
    CASES[fn.__name__] = fn
    return fn


def build_run(**arguments: Any) -> samestep.Run:
    return samestep.Run(None, batch_size=BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE, **arguments)


def score_classes(model: Callable[[Tensor], Tensor]) -> Callable[[Any], dict[str, Any]]:
    """Every kind of score at once, random ones too."""

    def score(batch: Any) -> dict[str, Any]:
        x, y = batch
        out = model(x)
        return {
            "loss": F.cross_entropy(out, y),
            "hits": ((out.argmax(1) == y).double().mean(), (y > 0).sum()),
            "found": out.argmax(1).tolist(),
            "noise": torch.rand(()) + np.random.rand() + random.random(),
        }

    return score


def train_classes(
    run: samestep.Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    num_epochs: int = 2,
    data: Any = None,
    forward: Callable[[Tensor], Tensor] | None = None,
    before: Callable[[Any], None] = lambda step: None,
    after: Callable[[Any], None] = lambda step: None,
    **feed: Any,
) -> Result:
    """A plain loop with clipping, validation, and draws wherever a body can draw."""
    run.prepare(model=forward if isinstance(forward, nn.Module) else model, optimizer=optimizer)
    trace, forward = Trace(run), forward or model
    for epoch in run.epochs(build_pairs() if data is None else data, num_epochs, **feed):
        trace.draw(f"before the steps of epoch {epoch.number}")
        for step in epoch:
            before(step)
            trace.draw(f"before the micro-batches of step {step.number}")
            for x, y in step:
                with run.autocast():
                    loss = F.cross_entropy(forward(x), y)
                step.backward(loss)
            trace.add("norm", run.clip_grad_norm_(model.parameters(), 0.5))
            trace.add("without gradient", [name for name, p in model.named_parameters() if p.grad is None])
            optimizer.step()
            after(step)
            trace.end_step(step)
        held_out, num_workers = build_pairs(29, seed=1), feed.get("num_workers")
        trace.add("scores", run.evaluate(score_classes(forward), held_out, num_workers=num_workers))
        trace.draw(f"after epoch {epoch.number}")
    return trace.finish()
