"""A small training run for tests. The plain case is one line: `tiny_run(run_dir, num_epochs=2, snapshot_every=3)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import samestep

NUM_SAMPLES, BATCH_SIZE, MICRO_BATCH_SIZE = 32, 8, 2


class Pairs(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Four random features and a random target, the same in every process."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = (torch.randn(num_samples, size, generator=generator) for size in (4, 1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Stream(torch.utils.data.IterableDataset[Tensor]):
    """Four features that say which sample of which lane it is."""

    def lane(self, lane: int, num_lanes: int) -> Any:
        return (torch.tensor([float(lane), float(k), 0.0, 1.0]) for k in range(100))

    def __iter__(self) -> Any:
        return iter(())


def learn(tiny: Tiny, x: Tensor, y: Tensor | None = None) -> None:
    """A micro-batch: backward of the mean squared error. Without targets, they are 0."""
    out = tiny.model(x)
    tiny.step.backward(F.mse_loss(out, torch.zeros_like(out) if y is None else y))


def update(tiny: Tiny) -> None:
    """After the micro-batches of a step: the optimizer's update."""
    if tiny.optimizer is not None:
        tiny.optimizer.step()


def nothing(tiny: Tiny) -> None:
    pass


Hook = Callable[["Tiny"], object]


class Tiny:
    """A run that has prepared a model and an optimizer. The functions passed to `train` get this object.

    Args:
        run_dir: as in `samestep.Run`, like `arguments`.
        model: builds the model, after the Run is built.
        optimizer: builds the optimizer from the list of parameters; None: the run prepares none.
        objects: returns further arguments of `run.prepare`, by name. They become attributes, too.

    Attributes:
        run, model, optimizer: what was built.
        epoch, step: those that `train` is in.
    """

    epoch: Any
    step: Any

    def __init__(
        self,
        run_dir: str | Path | None = None,
        *,
        model: Callable[[], nn.Module] = lambda: nn.Linear(4, 1),
        optimizer: Callable[[Any], Any] | None = lambda parameters: SGD(parameters, lr=0.1),
        objects: Callable[[Tiny], dict[str, Any]] = lambda tiny: {},
        **arguments: Any,
    ) -> None:
        sizes = {"batch_size": BATCH_SIZE, "micro_batch_size": MICRO_BATCH_SIZE, "device": "cpu"}
        self.run: Any = samestep.Run(run_dir, **sizes | arguments)  # type: ignore[arg-type]
        self.model: Any = model()
        self.optimizer: Any = optimizer and optimizer([*self.model.parameters()])
        prepared = {"model": self.model} | ({"optimizer": self.optimizer} if optimizer else {})
        further = objects(self)
        vars(self).update(further)
        self.run.prepare(**prepared | further)

    def train(
        self,
        num_epochs: Any = 2,
        *,
        num_steps: int | None = None,
        data: Any = None,
        body: Callable[..., object] = learn,
        before: Hook = nothing,
        then: Hook = update,
        before_epoch: Hook = nothing,
        after_epoch: Hook = nothing,
        **feed: Any,
    ) -> Tiny:
        """Run the loop. Returns this object.

        Args:
            num_steps: use `run.steps` with this number of steps; default: `run.epochs` with `num_epochs`.
            data: the data set; default: `Pairs()`.
            body: called as body(tiny, x, y) with each micro-batch, or as body(tiny, x) with one that is no tuple.
            before, then: called before and after the micro-batches of each step. `then` makes the update.
            before_epoch, after_epoch: called before and after the steps of each epoch.
            feed: further arguments of `run.epochs` or `run.steps`.
        """
        data = Pairs() if data is None else data
        if num_steps is not None:
            self.take(self.run.steps(data, num_steps, **feed), body, before, then)
            return self
        for epoch in self.run.epochs(data, num_epochs, **feed):
            self.epoch = epoch
            before_epoch(self)
            self.take(epoch, body, before, then)
            after_epoch(self)
        return self

    def take(
        self, steps: Iterable[Any], body: Callable[..., object] = learn, before: Hook = nothing, then: Hook = update
    ) -> None:
        """Run the loop over `steps`."""
        for self.step in steps:
            before(self)
            for batch in self.step:
                body(self, *(batch if isinstance(batch, list | tuple) else [batch]))
            then(self)


FEED = {*inspect.signature(samestep.Run.epochs).parameters} - {"self"}
TRAIN = {*inspect.signature(Tiny.train).parameters} - {"self", "feed"}


def tiny_run(run_dir: str | Path | None = None, *, do: Callable[..., object] = Tiny.train, **arguments: Any) -> int:
    """Build a `Tiny` and train it. Returns the number of steps done.

    Args:
        do: called with the `Tiny` in place of `Tiny.train`.
        arguments: those of `Tiny`, which include those of `samestep.Run`, and those of `Tiny.train`.
    """
    given = {name: arguments.pop(name) for name in (FEED | TRAIN) & {*arguments}}
    tiny = Tiny(run_dir, **arguments)
    do(tiny, **given)
    return int(tiny.run.steps_done)
