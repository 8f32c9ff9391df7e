"""What the training functions of these tests share: data and traced runs.

On any number of ranks, each of them must do the same. Almost all have 12 micro-batches per step, so that they can run
on 1 to 12 ranks, and a short last step that leaves ranks idle and has a ragged last micro-batch.
"""

import functools
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from support.tiny import Hook, Tiny, nothing, tiny_run, update
from support.trace import Trace
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import samestep
from samestep.torch_internals import gather_whole

Result = list[tuple[str, Any]]
MICRO_BATCH_SIZE = 3
BATCH_SIZE = 12 * MICRO_BATCH_SIZE
NUM_SAMPLES = 2 * BATCH_SIZE + 2 * MICRO_BATCH_SIZE + 2  # the third step has micro-batches of 3, 3 and 2
SIZES = {"batch_size": BATCH_SIZE, "micro_batch_size": MICRO_BATCH_SIZE, "device": None}
adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
NORM_TYPES = (2.0, float("inf"), 1.0)
sgd_momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def build_pairs(num_samples: int = NUM_SAMPLES, seed: int = 0) -> TensorDataset:
    """Features (num_samples, 6) and one of four classes."""
    x = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0.3).long())


def build_texts(num_samples: int = NUM_SAMPLES, seed: int = 0) -> Tensor:
    """Texts (num_samples, 10) of 17 tokens."""
    return torch.randint(17, (num_samples, 10), generator=torch.Generator().manual_seed(seed))


def build_run() -> samestep.Run:
    return samestep.Run(None, **SIZES)  # type: ignore[arg-type]


def learn_classes(t: Tiny, x: Tensor, y: Tensor) -> None:
    t.step.backward(F.cross_entropy(t.model(x), y))


def trace_run(
    model: Callable[[], nn.Module], *, body: Callable[..., object] = learn_classes, then: Hook = update,
    data: Any = None, at_end: Hook = nothing, **arguments: Any,
) -> Result:  # fmt: skip
    """A `tiny_run` that traces the end of each step. `at_end` is called after the loop; hooks may use `t.trace`."""
    trace: Any = None

    def train(t: Tiny, **given: Any) -> None:
        nonlocal trace
        t.trace = trace = Trace(t.run)  # type: ignore[attr-defined]
        t.train(**given)
        at_end(t)

    def end_step(t: Tiny) -> None:
        then(t)
        trace.end_step(t.step)

    data = build_pairs() if data is None else data
    tiny_run(None, do=train, model=model, body=body, then=end_step, data=data, **SIZES | arguments)
    return trace.finish()  # type: ignore[no-any-return]


def read_grads(run: samestep.Run, params: Iterable[Tensor]) -> list[Any]:
    """Return the gradients of parameters, None for one without, on all ranks. With owners, these have them."""
    found = [param.grad if param.grad is None else gather_whole(param.grad) for param in params]
    if run._prepared is None or run._prepared.divided is None:
        return found
    everywhere = run._context.group.gather(found)
    return [next((grad for grad in of_param if grad is not None), None) for of_param in zip(*everywhere, strict=True)]


def have_grads(run: samestep.Run, params: Iterable[Tensor]) -> list[bool]:
    """Return for each parameter whether it has a gradient, on all ranks. With owners, these have it."""
    found = [param.grad is not None for param in params]
    if run._prepared is None or run._prepared.divided is None:
        return found
    return [any(of_param) for of_param in zip(*run._context.group.gather(found), strict=True)]


def train_classes(
    model: Callable[[], nn.Module], *, before: Hook = nothing, after: Hook = nothing, **arguments: Any
) -> Result:
    """A traced run with clipping and validation, and with random draws wherever a script can draw."""

    def before_step(t: Any) -> None:
        before(t)
        t.trace.draw(f"before the micro-batches of step {t.step.number}")

    def body(t: Any, x: Tensor, y: Tensor) -> None:
        with t.run.autocast():
            loss = F.cross_entropy(t.model(x), y)
        t.step.backward(loss)

    def then(t: Any) -> None:
        t.trace.add("norm", t.run.clip_grad_norm_(t.model.parameters(), 0.5, NORM_TYPES[t.step.number % 3]))
        names = [name for name, _ in t.model.named_parameters()]
        given = have_grads(t.run, t.model.parameters())
        t.trace.add("with a gradient", [name for name, is_given in zip(names, given, strict=True) if is_given])
        update(t)
        after(t)

    def validate(t: Any) -> None:
        def score(batch: Any) -> dict[str, Any]:
            """Every kind of score at once, with random ones."""
            x, y = batch
            out = t.model(x)
            return {
                "loss": F.cross_entropy(out, y),
                "hits": ((out.argmax(1) == y).double().mean(), (y > 0).sum()),
                "found": out.argmax(1).tolist(),
                "noise": torch.rand(()) + np.random.rand() + random.random(),
            }

        t.trace.add("scores", t.run.evaluate(score, build_pairs(29, seed=1)))
        t.trace.draw(f"after epoch {t.epoch.number}")

    return trace_run(
        model, body=body, before=before_step, then=then, after_epoch=validate,
        before_epoch=lambda t: t.trace.draw(f"before the steps of epoch {t.epoch.number}"), **arguments,
    )  # fmt: skip
