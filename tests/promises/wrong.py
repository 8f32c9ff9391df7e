"""A small training run with one mistake in it, chosen by name: python wrong.py RUN "optimizer.step not dedented".

Each mistake is a function of the run's directory; what is to be said of it stands beside it.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import samestep

NUM_SAMPLES, BATCH_SIZE, MICRO_BATCH_SIZE = 32, 8, 2
Body = Callable[[Any, nn.Module, Tensor, Tensor], object]
RunDir = str | Path | None


@dataclass(frozen=True)
class Mistake:
    """`at`: "start": before the run begins, so that no directory is made; "loop": in its first steps."""

    train: Callable[[RunDir], object]
    said: str
    at: str


MISTAKES: dict[str, Mistake] = {}


def mistake(name: str, said: str, at: str = "loop") -> Callable[[Callable[[RunDir], object]], Any]:
    """`said`: a regular expression of the sentence."""

    def add(train: Callable[[RunDir], object]) -> Callable[[RunDir], object]:
        MISTAKES[name] = Mistake(train, said, at)
        return train

    return add


class Pairs(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """`fail`: the sample that cannot be read."""

    def __init__(self, num_samples: int = NUM_SAMPLES, fail: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = (torch.randn(num_samples, size, generator=generator) for size in (4, 1))
        self.fail = fail

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.fail:
            raise KeyError("a column")
        return self.x[index], self.y[index]


def find_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def build(run_dir: RunDir, model: Callable[[], nn.Module] = lambda: nn.Linear(4, 1), **arguments: Any) -> Any:
    """A run that has prepared a model and an optimizer, and these two."""
    sizes = {"batch_size": BATCH_SIZE, "micro_batch_size": MICRO_BATCH_SIZE, "device": "cpu"}
    run = samestep.Run(run_dir, **sizes | arguments)  # type: ignore[arg-type]
    made = model()
    optimizer = SGD(made.parameters(), lr=0.1)
    run.prepare(model=made, optimizer=optimizer)
    return run, made, optimizer


def learn(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    step.backward(F.mse_loss(model(x), y))


def loop(
    run: Any,
    model: nn.Module,
    optimizer: Any,
    body: Body = learn,
    data: Any = None,
    num_epochs: Any = 2,
    then: Callable[[Any], object] | None = None,
    **arguments: Any,
) -> None:
    """The loop as it should be, but for `body`, and for `then` in the place of the update."""
    for epoch in run.epochs(Pairs() if data is None else data, num_epochs, **arguments):
        for step in epoch:
            for x, y in step:
                body(step, model, x, y)
            if then is None:
                optimizer.step()
            else:
                then(step)


# --- in the loop over the micro-batches -------------------------------------------------------------------------------


@mistake("optimizer.step not dedented", r"optimizer\.step\(\) inside the micro-batch loop of step 0: .* dedent it")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)

    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        learn(step, model, x, y)
        optimizer.step()

    loop(run, model, optimizer, body)


@mistake("optimizer.step not dedented, in step 3", r"optimizer\.step\(\) inside the micro-batch loop of step 3: ")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)

    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        learn(step, model, x, y)
        if step.number == 3:
            optimizer.step()

    loop(run, model, optimizer, body)


@mistake("schedule.step not dedented", r"schedule\.step\(\) inside the micro-batch loop of step 0: .* dedent it")
def _(run_dir: RunDir) -> None:
    run = samestep.Run(run_dir, batch_size=BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE, device="cpu")
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 1)
    run.prepare(model=model, optimizer=optimizer, schedule=schedule)

    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        learn(step, model, x, y)
        schedule.step()

    loop(run, model, optimizer, body)


@mistake(
    "loss.backward by hand",
    r"loss\.backward\(\) was called .*: call step\.backward\(loss\)",
)
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), lambda step, model, x, y: F.mse_loss(model(x), y).backward())


@mistake(
    "loss.backward by hand, too",
    r"loss\.backward\(\) was called .*: call step\.backward\(loss\)",
)
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        learn(step, model, x, y)
        F.mse_loss(model(x), y).backward()

    loop(*build(run_dir), body)


@mistake("two step.backward", r"step\.backward was called twice for one model in micro-batch \d of step 0: add")
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        learn(step, model, x, y)
        learn(step, model, x, y)

    loop(*build(run_dir), body)


@mistake("no losses", r"step\.backward takes several losses as \{loss: weight, \.\.\.\}: at least one, and witho")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), lambda step, model, x, y: step.backward({}))


@mistake("fewer losses in a micro-batch", r"step\.backward got fewer losses in micro-batch \d of step 0 than in oth")
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        losses = {F.mse_loss(model(x), y): 2, model(x).mean(): 1}
        step.backward(losses if step.micro_batch == 1 else F.mse_loss(model(x), y))

    loop(*build(run_dir), body)


@mistake("a loss among others that is nan", r"the loss of step 1 is nan in micro-batch 2 \(rank \d\): nothing of this")
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        factor = torch.nan if (step.number, step.micro_batch) == (1, 2) else 1.0
        step.backward({F.mse_loss(model(x), y): 2, model(x).mean() * factor: 1})

    loop(*build(run_dir), body)


@mistake(
    "step.backward for all models and for one", r"step\.backward was called twice for one model in micro-batch \d of"
)
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        step.backward(F.mse_loss(model(x), y), model=model)
        learn(step, model, x, y)

    loop(*build(run_dir), body)


@mistake("step.backward for a strange model", r"a model that was not passed to run\.prepare: pass it there, too")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), lambda step, model, x, y: step.backward(model(x).mean(), model=nn.Linear(1, 1)))


@mistake("a model that no optimizer has", r"step\.backward\(model=\.\.\.\) in step 0 got a model without trained param")
def _(run_dir: RunDir) -> None:
    run = samestep.Run(run_dir, batch_size=BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE, device="cpu")
    model, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    run.prepare(model=model, critic=critic, optimizer=optimizer)
    loop(run, model, optimizer, lambda step, model, x, y: step.backward(critic(model(x)).mean(), model=critic))


@mistake("step.loss read too early", r"step\.loss of step 0 was read inside the micro-batch loop: read it after")
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        learn(step, model, x, y)
        print(step.loss)

    loop(*build(run_dir), body)


@mistake("step.metrics read too early", r"step\.metrics of step 0 was read inside the micro-batch loop: read it after")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), lambda step, model, x, y: step.metrics)


@mistake("epoch.metrics read too early", r"epoch\.metrics of epoch 0 was read before its first step was done")
def _(run_dir: RunDir) -> None:
    for epoch in build(run_dir)[0].epochs(Pairs(), 2):
        print(epoch.metrics)


@mistake("step.loss read before the loop", r"step\.loss of step 0 was read before the micro-batch loop: read it after")
def _(run_dir: RunDir) -> None:
    run, *_ = build(run_dir)
    for step in run.steps(Pairs(), 2):
        print(step.loss)


@mistake("clip_grad_norm_ not dedented", r"run\.clip_grad_norm_ inside the micro-batch loop of step 0: .* dedent it")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)

    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        learn(step, model, x, y)
        run.clip_grad_norm_(model.parameters(), 1.0)

    loop(run, model, optimizer, body)


@mistake("evaluate not dedented", r"run\.evaluate inside the micro-batch loop of step 0: ")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    loop(run, model, optimizer, lambda step, model, x, y: run.evaluate(lambda _: {"a": 1.0}, Pairs()))


@mistake("run.log in place of step.log", r"run\.log inside the micro-batch loop of step 0: .* call step\.log")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    loop(run, model, optimizer, lambda step, model, x, y: run.log({"loss": 1.0}))


@mistake("run.once not dedented", r"run\.once inside the micro-batch loop of step 0: ")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    loop(run, model, optimizer, lambda step, model, x, y: run.once(os.getpid))


@mistake(
    "zero_grad after step.backward",
    r"the gradient of model\.\w+ is None at the end of .*: remove zero_grad",
)
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)

    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        learn(step, model, x, y)
        optimizer.zero_grad()

    loop(run, model, optimizer, body)


@mistake("step.log of a tensor", r"step\.log needs a number as accuracy, not a tensor of shape \(2, 1\).*: take its me")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), lambda step, model, x, y: step.log(accuracy=model(x)))


@mistake("step.log of a string", r"step\.log needs a number as accuracy, not a str")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir, log_every=1), lambda step, model, x, y: step.log(accuracy="good"))


@mistake(
    "step.log before the loop", r"step\.log of step 0 was called outside of its body: call it in or after its micro"
)
def _(run_dir: RunDir) -> None:
    run, *_ = build(run_dir)
    for epoch in run.epochs(Pairs(), 2):
        for step in epoch:
            step.log(accuracy=1.0)


@mistake(
    "zero_grad before the update", r"optimizer\.step\(\) finds no gradient in step 0: zero_grad\(\) after the micro-bat"
)
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)

    def then(step: Any) -> None:
        optimizer.zero_grad()
        optimizer.step()

    loop(run, model, optimizer, then=then)


@mistake("step.backward after the loop", r"step\.backward was called outside the micro-batch loop: call it inside")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    loop(run, model, optimizer, then=lambda step: step.backward(model(torch.ones(1, 4)).mean()))


@mistake("a step within itself", r"step 0 is iterated over inside its own loop")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), lambda step, model, x, y: list(step))


@mistake("micro-batches listed", r"step\.backward was called outside the micro-batch loop")
def _(run_dir: RunDir) -> None:
    run, model, _ = build(run_dir)
    for epoch in run.epochs(Pairs(), 1):
        for step in epoch:
            for x, y in list(step):
                learn(step, model, x, y)


@mistake("an epoch's steps unpacked", r"a step was unpacked like a batch: loop over it first, `for batch in step`")
def _(run_dir: RunDir) -> None:
    for epoch in build(run_dir, micro_batch_size=4)[0].epochs(Pairs(), 2):
        for x, y in epoch:
            print(x, y)


@mistake("an epoch unpacked", r"an epoch was unpacked like a batch: loop over it first, `for step in epoch`")
def _(run_dir: RunDir) -> None:
    for x, y in build(run_dir)[0].epochs(Pairs(), 2):
        print(x, y)


@mistake("a step of run.steps unpacked", r"a step was unpacked like a batch: loop over it first, `for batch in step`")
def _(run_dir: RunDir) -> None:
    for _, (x, *y) in enumerate(build(run_dir)[0].steps(Pairs(), 2)):
        print(x, y)


@mistake("no_sync", r"no_sync\(\) belongs to DDP: leave it out, since a step exchanges its gradients once")
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: Any, x: Tensor, y: Tensor) -> None:
        with model.no_sync():
            learn(step, model, x, y)

    loop(*build(run_dir), body)


@mistake(
    "gradients by backward, as of an attack",
    r"loss\.backward\(\) was called .*torch\.autograd\.grad\(loss, x\)",
)
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        F.mse_loss(model(x.requires_grad_()), y).backward()
        learn(step, model, x + 0.1 * x.grad.sign(), y)

    loop(*build(run_dir), body)


@mistake("gradients accumulated over steps", r"gradients of step 2 were not used by an optimizer\.step\(\).* raise bat")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    loop(run, model, optimizer, then=lambda step: (step.number + 1) % 4 > 2 or optimizer.step())


@mistake("optimizer.step forgotten", r"gradients of step 0 were not used by an optimizer\.step\(\) .*: call it aft")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), then=lambda step: None)


@mistake("optimizer.step forgotten, and a second pass", r"gradients of step 0 were not used by an optimizer\.step\(\)")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    loop(run, model, optimizer, then=lambda step: [learn(step, model, x, y) for x, y in step])


# --- losses, weights and gradients ------------------------------------------------------------------------------------


@mistake("a loss per sample", r"needs a scalar loss that depends on the model, not a tensor of shape \(2, 1\): take it")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), lambda step, model, x, y: step.backward((model(x) - y) ** 2))


@mistake("loss.item()", r"step\.backward needs a scalar loss that depends on the model, not a float: compute it as a t")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), lambda step, model, x, y: step.backward(F.mse_loss(model(x), y).item()))


@mistake("a loss under no_grad", r"not a tensor of shape \(\) without a gradient: compute it .* outside of torch\.no_g")
def _(run_dir: RunDir) -> None:
    with torch.no_grad():
        loop(*build(run_dir), then=lambda _: None)


@mistake("a loss of another model", r"no trained parameter got a gradient in step 0: compute the loss from the")
def _(run_dir: RunDir) -> None:
    other = nn.Linear(4, 1)
    loop(*build(run_dir), lambda step, model, x, y: step.backward(other(x).mean()))


@mistake("a loss that is nan", r"the loss of step 5 is nan in micro-batch 3 \(rank [01]\): nothing of this step is sav")
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        is_last = step.micro_batch == 3
        step.backward(F.mse_loss(model(x), y) * (float("nan") if step.number == 5 and is_last else 1.0))

    loop(*build(run_dir, snapshot_every=2), body)


@mistake("a loss that is inf", r"the loss of step 2 is -inf in micro-batch 0 \(rank 0\): nothing of this step is saved")
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        scale = torch.tensor(float("inf") if step.number == 2 and step.micro_batch == 0 else 1.0)
        step.backward(-((model(x) ** 2).mean() + 1e-3) * scale)

    loop(*build(run_dir, snapshot_every=1), body)


@mistake("a gradient that is inf", r"model\.weight is not finite after step 4: no snapshot is made of it, and the la")
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: Any, x: Tensor, y: Tensor) -> None:
        root = torch.sqrt(model.weight * 0).sum()  # 0, and its slope is infinite
        step.backward(F.mse_loss(model(x), y) + (root if step.number == 3 else 0))

    loop(*build(run_dir, snapshot_every=1), body)


@mistake("statistics that are inf", r"model\.0\.running_var is not finite after step 2: no snapshot is made of it")
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        # A batch normalisation of what is huge: a variance beyond float32, and outputs of 0.
        step.backward(F.mse_loss(model(x * (1e30 if step.number == 1 else 1.0)), y))

    loop(*build(run_dir, lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)), snapshot_every=1), body)


@mistake("a poisoned state to be kept by name", r"is not finite after step 1: no snapshot is made of it")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir, snapshot_every=None)

    def then(_: Any) -> None:
        with torch.no_grad():
            model.weight.fill_(float("nan"))
        run.snapshot("best")

    loop(run, model, optimizer, then=then)


for number in (-1.0, float("nan"), float("inf"), "many", torch.ones(2), torch.tensor(-1)):

    @mistake(
        f"weight {number}", r"step\.backward got weight .* in micro-batch \d of step 0: a weight is 0, or a number"
    )
    def _(run_dir: RunDir, weight: Any = number) -> None:
        loop(*build(run_dir), lambda step, model, x, y: step.backward(F.mse_loss(model(x), y), weight=weight))


@mistake("an optimizer of sparse gradients", r"optimizer is SparseAdam, and samestep makes sparse gradi", at="start")
def _(run_dir: RunDir) -> None:
    run = samestep.Run(run_dir, batch_size=4, device="cpu")
    model = nn.Embedding(10, 4, sparse=True)
    run.prepare(model=model, optimizer=torch.optim.SparseAdam([*model.parameters()]))


@mistake(
    "weights changed by the forward", r"model\.0\.weight was changed inside the micro-batch loop .*: change weights"
)
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        step.backward(F.mse_loss(model(x[:, 0].abs().long()), y))

    loop(*build(run_dir, lambda: nn.Sequential(nn.Embedding(10, 4, max_norm=0.1), nn.Linear(4, 1))), body)


@mistake("weights given other data in the forward", r"model\.1\.weight was changed inside .* assigning \.data\?\)")
def _(run_dir: RunDir) -> None:
    class Bounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 1.0)
            return super().forward(x)

    loop(*build(run_dir, lambda: nn.Sequential(nn.Linear(4, 3), Bounded(3, 1))))


@mistake("a model converted in the loop", r"model\.\w+ was converted or given another shape in the loop: change the")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    loop(run, model, optimizer, then=lambda step: model.double())


@mistake("reentrant checkpointing of one model", r"step\.backward\(model=.* use torch.* with use_reentrant=False")
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=True)
        step.backward(F.mse_loss(model[1](hidden), y), model=model)

    loop(*build(run_dir, lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))), body)


@mistake("reentrant checkpointing", r"model\.\w+ got two gradients in one micro-batch .*: use .* with use_reentrant=Fa")
def _(run_dir: RunDir) -> None:
    def body(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        x.requires_grad_()
        twice = [checkpoint(model, x, use_reentrant=True) for _ in range(2)]
        step.backward(F.mse_loss(torch.stack(twice).mean(0), y))

    loop(*build(run_dir), body)


@mistake("a lone sample", r"micro-batch 4 of step 4 \(rank \d\) has one sample, and model\.1 cannot normalize one valu")
def _(run_dir: RunDir) -> None:
    # 49 samples in steps of 10: the last one has 2 + 2 + 2 + 2 + 1.
    model = lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))  # noqa: E731
    loop(*build(run_dir, model, batch_size=10), data=Pairs(49))


@mistake("micro-batches of one sample", r"micro-batch \d of step 0 .* has one sample, .*: choose a larger micro_batch_")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir, lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)), micro_batch_size=1))


# --- loops left or never begun ----------------------------------------------------------------------------------------


@mistake("break in the micro-batches", r"the loop over the micro-batches of step 0 was left by break .* run\.stop\(\)")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    for epoch in run.epochs(Pairs(), 2):
        for step in epoch:
            for x, y in step:
                learn(step, model, x, y)
                break
            optimizer.step()


@mistake("break in the micro-batches, nothing after it", r"the loop over the micro-batches of step 0 was left by break")
def _(run_dir: RunDir) -> None:
    run, model, _ = build(run_dir)
    for step in run.steps(Pairs(), 2):
        for x, y in step:
            learn(step, model, x, y)
            break


@mistake("break in the steps", r"the loop over the steps was left by break .* in step 1, .* call run\.stop\(\)")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    for epoch in run.epochs(Pairs(), 2):
        for step in epoch:
            for x, y in step:
                learn(step, model, x, y)
            optimizer.step()
            if step.number == 1:
                break


@mistake("break in the epochs, then evaluate", r"the loop over the epochs was left by break .* in epoch 0, .*run\.stop")
def _(run_dir: RunDir) -> None:
    leave_epochs(run_dir).evaluate(lambda _: {"a": 1.0}, Pairs())


@mistake("break in the epochs, then log", r"the loop over the epochs was left by break .* in epoch 0, .* run\.stop\(\)")
def _(run_dir: RunDir) -> None:
    leave_epochs(run_dir).log({"a": 1.0})


@mistake("break in the epochs", r"the loop over the epochs was left by break .* in epoch 0, .* call run\.stop\(\)")
def leave_epochs(run_dir: RunDir) -> Any:
    run, model, optimizer = build(run_dir)
    for epoch in run.epochs(Pairs(), 2):
        for step in epoch:
            for x, y in step:
                learn(step, model, x, y)
            optimizer.step()
        break
    return run


@mistake("break in run.steps", r"the loop over the steps was left by break .* in step 1, .* call run\.stop\(\)")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    for step in run.steps(Pairs(), 5):
        for x, y in step:
            learn(step, model, x, y)
        optimizer.step()
        if step.number == 1:
            break


@mistake("an error in the body that is ignored", r"the loop over the micro-batches of step 1 was left by break .* an e")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    for step in run.steps(Pairs(), 5):
        try:
            for x, y in step:
                if step.number == 1:
                    raise RuntimeError("out of memory")
                learn(step, model, x, y)
        except RuntimeError:
            continue
        optimizer.step()


@mistake("a step never iterated", r"the micro-batches of step 0 were not iterated over: its body needs `for batch in s")
def _(run_dir: RunDir) -> None:
    run, _, optimizer = build(run_dir)
    for epoch in run.epochs(Pairs(), 2):
        for _ in epoch:
            optimizer.step()


@mistake("an epoch never iterated", r"the steps of epoch 0 were not iterated over: its body needs `for step in epoch`")
def _(run_dir: RunDir) -> None:
    for _ in build(run_dir)[0].epochs(Pairs(), 2):
        pass


@mistake("an epoch iterated twice", r"the steps of epoch 0 can be iterated over once")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    for epoch in run.epochs(Pairs(), 2):
        for step in [*walk(epoch, model, optimizer), *walk(epoch, model, optimizer)]:
            print(step)


@mistake("a step of the past", r"step 0 is over, since step 1 has begun")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    past: list[Any] = []

    def then(step: Any) -> None:
        optimizer.step()
        past.append(step)
        if step.number:
            list(past[0])

    loop(run, model, optimizer, then=then)


@mistake("a loop inside a loop", r"this run is inside another loop: call run\.epochs\(\) or run\.steps\(\) after that")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    loop(run, model, optimizer, num_epochs=1, then=lambda step: loop(run, model, optimizer))


def walk(epoch: Any, model: nn.Module, optimizer: Any) -> Iterator[Any]:
    for step in epoch:
        for x, y in step:
            learn(step, model, x, y)
        optimizer.step()
        yield step


# --- what is prepared -------------------------------------------------------------------------------------------------


@mistake("a model built before the Run", r"model was built before samestep\.Run\(\.\.\.\).*: build it afte", at="start")
def _(run_dir: RunDir) -> None:
    model = nn.Linear(4, 1)
    build(run_dir, lambda: model)


@mistake("no prepare", r"call run\.prepare\(model=\.\.\., optimizer=\.\.\.\) before the loop", at="start")
def _(run_dir: RunDir) -> None:
    samestep.Run(run_dir, batch_size=4, micro_batch_size=1).epochs(Pairs(), 1)


@mistake("prepare of nothing", r"call run\.prepare\(model=\.\.\., optimizer=\.\.\.\) before the loop", at="start")
def _(run_dir: RunDir) -> None:
    run = samestep.Run(run_dir, batch_size=4, micro_batch_size=1)
    run.prepare()
    run.epochs(Pairs(), 1)


@mistake("prepare twice", r"run\.prepare was called twice: pass all objects in one call", at="start")
def _(run_dir: RunDir) -> None:
    run, model, _ = build(run_dir)
    run.prepare(average=model)


@mistake("prepare without names", r"run\.prepare takes everything by name, run\.prepare\(model=model, \.\.", at="start")
def _(run_dir: RunDir) -> None:
    samestep.Run(run_dir, batch_size=4, micro_batch_size=1).prepare(nn.Linear(4, 1))


@mistake("evaluate without prepare", r"call run\.prepare\(model=.*\) before run\.evaluate", at="start")
def _(run_dir: RunDir) -> None:
    samestep.Run(run_dir, batch_size=4, micro_batch_size=1).evaluate(lambda _: {"a": 1.0}, Pairs())


@mistake("a model in DataParallel", r"model is wrapped in DataParallel: pass the bare model", at="start")
def _(run_dir: RunDir) -> None:
    build(run_dir, lambda: DataParallel(nn.Linear(4, 1)))


@mistake("SyncBatchNorm", r"model\.1 is a SyncBatchNorm, whose statistics .*: use BatchNorm", at="start")
def _(run_dir: RunDir) -> None:
    model = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))  # noqa: E731
    build(run_dir, lambda: nn.SyncBatchNorm.convert_sync_batchnorm(model()))


@mistake("a lazy layer", r"model\.weight has no shape yet: run a batch through the model before run\.prepa", at="start")
def _(run_dir: RunDir) -> None:
    run = samestep.Run(run_dir, batch_size=4, micro_batch_size=1)
    run.prepare(model=nn.LazyLinear(1))


def prepare(run_dir: RunDir, **objects: Any) -> None:
    """In one call, with a model and its optimizer."""
    run = samestep.Run(run_dir, batch_size=4, micro_batch_size=1)
    model = nn.Linear(4, 1)
    run.prepare(**{"model": model, "optimizer": SGD(model.parameters(), lr=0.1)} | objects)


@mistake("a lazy BatchNorm", r"model\.running_mean has no shape yet: run a batch through the model before", at="start")
def _(run_dir: RunDir) -> None:
    samestep.Run(run_dir, batch_size=4).prepare(model=nn.LazyBatchNorm1d(affine=False))


@mistake("a loose parameter", r"optimizer holds parameters .* put a parameter of no model into one, such", at="start")
def _(run_dir: RunDir) -> None:
    run, model, bias = samestep.Run(run_dir, batch_size=4), nn.Linear(4, 1), nn.Parameter(torch.zeros(1))
    run.prepare(model=model, optimizer=SGD([*model.parameters(), bias], lr=0.1))


@mistake("an optimizer of another model", r"second holds parameters of a model that was not passed: pass i", at="start")
def _(run_dir: RunDir) -> None:
    prepare(run_dir, second=SGD(nn.Linear(1, 1).parameters(), lr=0.1))


@mistake("a scaler of gradients", r"scaler is a GradScaler: leave it out, .*precision='fp16'\)", at="start")
def _(run_dir: RunDir) -> None:
    prepare(run_dir, scaler=torch.amp.GradScaler("cpu"))


@mistake("an unknown device map", r'device_map must be "keep" or None, not .auto.$', at="start")
def _(run_dir: RunDir) -> None:
    prepare(run_dir, device_map="auto")


@mistake("a list of models", r"run\.prepare got models, a list without state_dict and load_state_dict", at="start")
def _(run_dir: RunDir) -> None:
    prepare(run_dir, models=[])


@mistake("a schedule that is None", r"run\.prepare got schedule, a NoneType without state_dict", at="start")
def _(run_dir: RunDir) -> None:
    prepare(run_dir, schedule=None)


@mistake("a state that cannot be saved", r"scorer\.key is a function, which a snapshot cannot hold", at="start")
def _(run_dir: RunDir) -> None:
    class Scorer:
        def state_dict(self) -> dict[str, Any]:
            return {"key": find_rank}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    prepare(run_dir, scorer=Scorer())


@mistake("an optimizer that was not passed", r"an optimizer \(Adam\) that run\.prepare did not get updates model\.weig")
def _(run_dir: RunDir) -> None:
    run = samestep.Run(run_dir, batch_size=BATCH_SIZE, micro_batch_size=1, device="cpu")
    model = nn.Linear(4, 1)
    run.prepare(model=model)
    loop(run, model, Adam(model.parameters()))


@mistake("a layer replaced after prepare", r"model\.1\.weight was replaced or converted after run\.prepare: change the")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    model[1] = nn.Linear(4, 1)
    loop(run, model, optimizer)


@mistake("a layer added after prepare", r"a model got or lost parameters after run\.prepare: change the model before i")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir, lambda: nn.Sequential(nn.Linear(4, 1)))
    model.append(nn.Linear(1, 1))
    loop(run, model, optimizer)


# --- data -------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


DATA = {
    "an empty data set": ([], r"the data set \(list\) is empty: a run needs at least one"),
    "no data": (None, r"NoneType does not support indexing"),
    "a generator": ((x for x in "ab"), r"generator does not support indexing, .*: pass a map-style data set"),
    "an IterableDataset": (Stream(), r"Stream is a stream without indexing, .*: pass it to run\.steps"),
    "a DataLoader of one": (
        DataLoader(Stream()),
        r"Stream is a stream without indexing, .*: pass it to run\.steps",
    ),
    "a DataLoader of other micro-batches": (
        DataLoader(Pairs(), 3),
        r"the DataLoader's batch_size is 3 and the run's micro_batch_size 2, but they mean the same",
    ),
    "a DistributedSampler": (
        DataLoader(Pairs(), MICRO_BATCH_SIZE, sampler=DistributedSampler(Pairs(), num_replicas=2, rank=0)),
        r"the DataLoader's sampler is a DistributedSampler, .*: remove it, since the run itself divides the samples",
    ),
}
for name, (given, words) in DATA.items():

    @mistake(name, words, at="start")
    def _(run_dir: RunDir, data: Any = given) -> None:
        build(run_dir)[0].epochs(data, 1)


SAMPLERS = {
    "a sampler that is a list": ([1, 2], r"sampler must be a function, sampler\(epoch\) -> .* not a list"),
    "a sampler of torch's": (DistributedSampler(Pairs(), 2, 0), r"sampler must be a function, .* not a DistributedSam"),
    "a sampler of nothing": (lambda epoch: [], r"the sampler gave no indices"),
    "a sampler that gives None": (lambda epoch: None, r"sampler\(0\) gave None: return the epoch's sample indices"),
    "a sampler of floats": (lambda epoch: [0.5], r"the sampler's indices are float64: give whole numbers"),
    "a sampler out of range": (
        lambda epoch: [3, 32],
        r"the sampler gave index 32 at position 1: .* samples are 0 to 31",
    ),
}
for name, (given, words) in SAMPLERS.items():

    @mistake(name, words, at="start")
    def _(run_dir: RunDir, sampler: Any = given) -> None:
        build(run_dir)[0].epochs(Pairs(), 1, sampler=sampler)


@mistake("a sampler and shuffle", r"sampler and shuffle=True were both given: .* leave shuffle out", at="start")
def _(run_dir: RunDir) -> None:
    build(run_dir)[0].epochs(Pairs(), 1, sampler=range, shuffle=True)


@mistake(
    "a sampler of epochs of many lengths", r"sampler\(1\) gave 10 indices and sampler\(0\) 32: return equally many"
)
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), sampler=lambda epoch: range(10 if epoch else 32))


@mistake("drop_last of everything", r"drop_last leaves no step of 5 samples with batch_size 8: lower batch", at="start")
def _(run_dir: RunDir) -> None:
    build(run_dir)[0].epochs(Pairs(5), 1, drop_last=True)


for arguments in ({"shuffle": "yes"}, {"drop_last": 1}, {"num_workers": -1}, {"num_workers": "2"}):

    @mistake(f"data with {arguments}", rf"{next(iter(arguments))} (must be|is)", at="start")
    def _(run_dir: RunDir, given: Any = arguments) -> None:
        build(run_dir)[0].epochs(Pairs(), 1, **given)


for count in (0, -1, 1.5, "2", True, None):

    @mistake(f"{count!r} epochs", rf"needs a number of epochs of at least 1, not {re.escape(repr(count))}", at="start")
    def _(run_dir: RunDir, num_epochs: Any = count) -> None:
        build(run_dir)[0].epochs(Pairs(), num_epochs)

    @mistake(f"{count!r} steps", rf"needs a number of steps of at least 1, not {re.escape(repr(count))}", at="start")
    def _(run_dir: RunDir, num_steps: Any = count) -> None:
        build(run_dir)[0].steps(Pairs(), num_steps)


@mistake("a data set that fails", r"the data set failed at sample 20 \(KeyError: 'a column' at .*wrong\.py:\d+\), on r")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), data=Pairs(fail=20))


@mistake("a data set that fails in a worker", r"the data set failed at sample 20 \(.*in DataLoader worker 0\), on rank")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), data=Pairs(fail=20), num_workers=1)


def collate(samples: list[tuple[Tensor, Tensor]]) -> Any:
    """Refuses sample 20."""
    if any(torch.equal(x, Pairs().x[20]) for x, _ in samples):
        raise ValueError("too long")
    return torch.utils.data.default_collate(samples)


for num_workers in (0, 1):

    @mistake(
        f"a collate function that fails in {'a worker' if num_workers else 'the rank'}",
        r"collate_fn failed at sample 20 \(ValueError: too long at .*wrong\.py:\d+.*\), on rank \d in step ",
    )
    def _(run_dir: RunDir, count: int = num_workers) -> None:
        loop(*build(run_dir), collate_fn=collate, num_workers=count)


# --- state and snapshots ----------------------------------------------------------------------------------------------


for name in ("a b", "", "../best", "best/1", "3", "step-00000001", "latest", "never", "é", "x" * 65, 5, None):

    @mistake(f"a snapshot named {name!r}", r"a snapshot's name is letters, digits and underscores, such as best, not ")
    def _(run_dir: RunDir, name: Any = name) -> None:
        run, model, optimizer = build(run_dir)
        loop(run, model, optimizer, then=lambda _: run.snapshot(name))


@mistake("an object in run.state", r"state\.best is a object, which a snapshot cannot hold")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    run.state["best"] = object()
    loop(run, model, optimizer)


@mistake("a run.state that is none", r"run\.state has become a NoneType: keep it a dict")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    run.state = None
    loop(run, model, optimizer)


@mistake("run.log of a number", r"run\.log takes a dict of name -> value or keyword arguments, not 1\.0")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    loop(run, model, optimizer, then=lambda _: run.log(1.0))


# --- ranks that differ ------------------------------------------------------------------------------------------------

RANKS: dict[str, Mistake] = {}


def on_ranks(name: str, said: str, at: str = "loop") -> Callable[[Callable[[RunDir], object]], Any]:
    def add(train: Callable[[RunDir], object]) -> Callable[[RunDir], object]:
        RANKS[name] = Mistake(train, said, at)
        return train

    return add


@on_ranks("batch sizes", r"batch_size is 8 on rank 0 and 16 on rank 1: make it the same on all ranks", at="start")
def _(run_dir: RunDir) -> None:
    build(run_dir, batch_size=8 * (1 + find_rank()))


@on_ranks("seeds", r"seed is 0 on rank 0 and 1 on rank 1: make it the same on all ranks", at="start")
def _(run_dir: RunDir) -> None:
    build(run_dir, seed=find_rank())


@on_ranks("rows", r"log_every is '1' on rank 0 and '2' on rank 1: make it the same on all ranks", at="start")
def _(run_dir: RunDir) -> None:
    build(run_dir, log_every=1 + find_rank())


@on_ranks("models", r"model is '.* 5 values.*' on rank 0 and '.* 10 values.*' on rank 1: make it the same", at="start")
def _(run_dir: RunDir) -> None:
    build(run_dir, lambda: nn.Linear(4, 1 + find_rank()))


class Position:
    """Something with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@on_ranks("what is prepared", r"what run\.prepare got is .* on rank 0 and .* on rank 1: make it the same", at="start")
def _(run_dir: RunDir) -> None:
    prepare(run_dir, **({"loader": Position()} if find_rank() else {}))


@on_ranks("lengths of the data", r"data_length is 32 on rank 0 and 33 on rank 1: make it the same", at="start")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), data=Pairs(32 + find_rank()))


@on_ranks("numbers of epochs", r"the number of steps is 4 on rank 0 and 8 on rank 1: make it the same", at="start")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), num_epochs=1 + find_rank())


@on_ranks("samplers", r"sampler\(1\) gave other indices on other ranks: seed it from the epoch, not the rank")
def _(run_dir: RunDir) -> None:
    loop(*build(run_dir), sampler=lambda epoch: [(i + epoch * find_rank()) % 32 for i in range(32)])


@on_ranks("samplers of run.steps", r"sampler\(1\) gave other indices on other ranks: seed it from the epoch, not the r")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    sampler = lambda epoch: [(i + epoch * find_rank()) % 30 for i in range(30)]  # noqa: E731
    for step in run.steps(Pairs(), 8, sampler=sampler):
        for x, y in step:
            learn(step, model, x, y)
        optimizer.step()


@on_ranks("run.stop on one", r"rank 1 ended its loop after step 2 by run\.stop\(\), and rank 0 did not: call it on eve")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)

    def then(step: Any) -> None:
        optimizer.step()
        if run.rank == 1 and step.number == 1:
            run.stop("bored")

    loop(run, model, optimizer, then=then)


@on_ranks(
    "run.stop on one, then evaluate", r"rank 1 ended its loop after step 1 by run\.stop\(\), and rank 0 did not: call"
)
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    for epoch in run.epochs(Pairs(), 2):
        for step in epoch:
            for x, y in step:
                learn(step, model, x, y)
            optimizer.step()
            if run.rank == 1:
                run.stop("bored")
        run.evaluate(lambda batch: {"a": 1.0}, Pairs(5))


@on_ranks(
    "run.stop on one after an epoch", r"rank 0 ended its loop after step 4 by run\.stop\(\), and rank 1 did not: call"
)
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    for epoch in run.epochs(Pairs(), 2, sampler=lambda _: list(range(NUM_SAMPLES))):
        for step in epoch:
            for x, y in step:
                learn(step, model, x, y)
            optimizer.step()
        if run.rank == 0:
            run.stop("bored")


for is_evaluated in (False, True):

    @on_ranks(
        f"run.snapshot on one{', then evaluate' if is_evaluated else ''}",
        r"rank 0 takes a snapshot of step 4, and rank 1 does not: call run\.snapshot on every rank",
    )
    def _(run_dir: RunDir, is_evaluated: bool = is_evaluated) -> None:
        run, model, optimizer = build(run_dir, snapshot_every=8)
        for epoch in run.epochs(Pairs(), 2):
            if is_evaluated:
                run.evaluate(lambda batch: {"a": 1.0}, Pairs(5))
            for step in epoch:
                for x, y in step:
                    learn(step, model, x, y)
                optimizer.step()
            if run.rank == 0:
                run.snapshot("best")


@on_ranks("run.evaluate on one", r"rank 0 has called run\.evaluate, and rank 1 has not: call it on every rank")
def _(run_dir: RunDir) -> None:
    run, model, optimizer = build(run_dir)
    for epoch in run.epochs(Pairs(), 2):
        for step in epoch:
            for x, y in step:
                learn(step, model, x, y)
            optimizer.step()
        if run.rank == 0:
            run.evaluate(lambda batch: {"a": 1.0}, Pairs(5))


@on_ranks("a result of run.once that does not travel", r"rank 0 cannot send a generator to the other ranks", at="start")
def _(run_dir: RunDir) -> None:
    build(run_dir)[0].once(lambda: (x for x in "ab"))


# --- no mistakes ------------------------------------------------------------------------------------------------------


def learn_well(run_dir: RunDir, num_samples: int = NUM_SAMPLES, **arguments: Any) -> int:
    """Without a mistake. Returns the steps done."""
    run, model, optimizer = build(run_dir, snapshot_every=2, **arguments)
    loop(run, model, optimizer, data=Pairs(num_samples))
    return int(run.steps_done)


def wait_in_step_3(run_dir: RunDir) -> None:
    """With a DataLoader worker, until there is a file `go` beside the directory; `held` says that it waits."""
    beside = Path(str(run_dir)).parent
    run, model, optimizer = build(run_dir, snapshot_every=2)

    def then(step: Any) -> None:
        optimizer.step()
        if step.number == 3:
            run._snapshotter.settle()  # the snapshot of step 2 may be on its way, and is not to land while others look
            (beside / "held").touch()
            deadline_s = time.monotonic() + 60
            while not (beside / "go").exists() and time.monotonic() < deadline_s:
                time.sleep(0.005)

    loop(run, model, optimizer, num_workers=1, then=then)


FINE: dict[str, Callable[[RunDir], object]] = {"nothing": learn_well, "waiting in step 3": wait_in_step_3}


def train(name: str, run_dir: RunDir) -> None:
    if name in FINE:
        FINE[name](run_dir)
    else:
        (MISTAKES | RANKS)[name].train(run_dir)


def main() -> None:
    run_dir, name = sys.argv[1:]
    train(name, run_dir)


if __name__ == "__main__":
    main()
