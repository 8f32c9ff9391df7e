"""Training scripts with one mistake each, chosen by name: python wrong.py RUN_DIR "optimizer.step not dedented".

A row has the name of the mistake, a regular expression of the error's sentence, and the mistake itself: arguments of
`tiny_run`, whose functions get the `Tiny` as `t`.
"""

import functools
import os
import random
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from support.tiny import NUM_SAMPLES, Pairs, Stream, Tiny, learn, tiny_run, update
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, Subset

import samestep

RunDir = str | Path | None
INF, NAN = float("inf"), float("nan")
DRAWS = random.Random(0)

# --- kinds of rows ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """`at`: "start" if the error comes before the run directory is made, "loop" if it comes in the first steps."""

    train: Callable[[RunDir], object]
    sentence: str
    at: str


def in_loop(sentence: str, *, at: str = "loop", **arguments: Any) -> Mistake:
    """A mistake in the loop, as arguments of `tiny_run`."""
    return Mistake(functools.partial(tiny_run, **arguments), sentence, at)


def at_start(sentence: str, script: Callable[[samestep.Run], object] | None = None, **arguments: Any) -> Mistake:
    """A mistake before the loop, as arguments of `tiny_run` or as a function of a Run that has prepared nothing."""
    if script is None:
        return in_loop(sentence, at="start", **arguments)
    return Mistake(lambda run_dir: script(samestep.Run(run_dir, batch_size=4, micro_batch_size=1)), sentence, "start")


def by_rank(sentence: str, arguments: Callable[[int], dict[str, Any]], at: str = "start") -> Mistake:
    """Arguments of `tiny_run` that depend on the rank."""
    return Mistake(lambda run_dir: tiny_run(run_dir, **arguments(int(os.environ["RANK"]))), sentence, at)


# --- what rows use ----------------------------------------------------------------------------------------------------


def mse(t: Tiny, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(t.model(x), y)


def score(batch: Any) -> dict[str, float]:
    return {"a": 1.0}


class Stateful:
    """An object that run.prepare takes, with any state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Bounded(nn.Linear):
    """Assigns other data to its weight in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 1.0)
        return super().forward(x)


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


class Unreadable(Pairs):
    """One sample cannot be read."""

    def __init__(self, sample: int) -> None:
        super().__init__()
        self.sample = sample

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.sample:
            raise KeyError("a column")
        return super().__getitem__(index)


def collate(samples: list[tuple[Tensor, Tensor]]) -> Any:
    """Fails for sample 20."""
    if any(torch.equal(x, Pairs().x[20]) for x, _ in samples):
        raise ValueError("too long")
    return torch.utils.data.default_collate(samples)


# --- mistakes in the structure of a script ----------------------------------------------------------------------------


def learn_from_attack(t: Tiny, x: Tensor, y: Tensor) -> None:
    mse(t, x.requires_grad_(), y).backward()
    learn(t, x + 0.1 * x.grad.sign(), y)  # type: ignore[union-attr]


def learn_with_infinite_slope(t: Tiny, x: Tensor, y: Tensor) -> None:
    root = torch.sqrt(t.model.weight * 0).sum()  # 0, and its slope is infinite
    t.step.backward(mse(t, x, y) + (root if t.step.number == 3 else 0))


def break_micro_batches(t: Tiny, steps: Iterable[Any], then: Callable[[Tiny], object] = update) -> None:
    for t.step in steps:
        for x, y in t.step:
            learn(t, x, y)
            break
        then(t)


def break_epochs(t: Tiny) -> None:
    for epoch in t.run.epochs(Pairs(), 2):
        t.take(epoch)
        break


def ignore_error_in_body(t: Tiny) -> None:
    for step in t.run.steps(Pairs(), 5):
        t.step = step
        try:
            for x, y in step:
                if step.number == 1:
                    raise RuntimeError("out of memory")
                learn(t, x, y)
        except RuntimeError:
            continue
        t.optimizer.step()


def ignore_error_between_steps(t: Tiny) -> None:
    """The error is one that the loop raises, and not the script."""
    with suppress(samestep.Error):
        for _ in t.run.steps(Pairs(), 5):
            pass


def iterate_first_step_again(t: Tiny) -> None:
    update(t)
    if t.step.number == 0:
        t.past = t.step  # type: ignore[attr-defined]
    else:
        list(t.past)  # type: ignore[attr-defined]


def train_unprepared_head(t: Tiny) -> None:
    head = nn.Linear(4, 1)
    other = SGD(head.parameters(), 0.1)
    t.train(body=lambda t, x, y: t.step.backward((t.model(x) + head(x)).mean()), then=lambda t: other.step())


def snapshot_on_rank_0(t: Tiny, is_evaluated: bool) -> None:
    for epoch in t.run.epochs(Pairs(), 2):
        if is_evaluated:
            t.run.evaluate(score, Pairs(5))
        t.take(epoch)
        if t.run.rank == 0:
            t.run.snapshot("best")


# --- the mistakes -----------------------------------------------------------------------------------------------------

IN_MICRO_BATCHES: dict[str, Mistake] = {
    "optimizer.step not dedented": in_loop(
        r"optimizer\.step\(\) inside the micro-batch loop of step 0: .* dedent it",
        body=lambda t, x, y: [learn(t, x, y), t.optimizer.step()]),
    "schedule.step not dedented": in_loop(
        r"schedule\.step\(\) inside the micro-batch loop of step 0: .* dedent it",
        objects=lambda t: {"schedule": StepLR(t.optimizer, 1)},
        body=lambda t, x, y: [learn(t, x, y), t.schedule.step()]),
    "loss.backward by hand, too": in_loop(
        r"loss\.backward\(\)(, zero_grad or clip.* change gradients after| was called .*: call step\.backward\(loss\))",
        body=lambda t, x, y: [learn(t, x, y), mse(t, x, y).backward()]),
    "two step.backward": in_loop(
        r"step\.backward was called twice in micro-batch \d of step 0: add",
        body=lambda t, x, y: [learn(t, x, y), learn(t, x, y)]),
    "step.backward for a strange model": in_loop(
        r"got a model without trained parameters: pass it and its optimizer to run\.prepare",
        body=lambda t, x, y: t.step.backward(t.model(x).mean(), model=nn.Linear(1, 1))),
    "step.total in the loop": in_loop(
        r"step\.total was called inside the micro-batch loop of step 0: call it before",
        body=lambda t, x, y: t.step.total(len)),
    "step.gather in the loop": in_loop(
        r"step\.gather was called inside the micro-batch loop of step 0: call it after",
        body=lambda t, x, y: t.step.gather({})),
    "epoch.metrics read too early": in_loop(
        r"epoch\.metrics of epoch 0 was read before its first step was done",
        do=lambda t: [epoch.metrics for epoch in t.run.epochs(Pairs(), 2)]),
    "step.loss read before the loop": in_loop(
        r"step\.loss of step 0 was read before the micro-batch loop: read it after",
        do=lambda t: [step.loss for step in t.run.steps(Pairs(), 2)]),
    "clip_grad_norm_ not dedented": in_loop(
        r"run\.clip_grad_norm_ inside the micro-batch loop of step 0: .* dedent it",
        body=lambda t, x, y: [learn(t, x, y), t.run.clip_grad_norm_(t.model.parameters(), 1.0)]),
    "evaluate not dedented": in_loop(
        r"run\.evaluate inside the micro-batch loop of step 0: ",
        body=lambda t, x, y: t.run.evaluate(score, Pairs())),
    "run.log in place of step.log": in_loop(
        r"run\.log inside the micro-batch loop of step 0: .* call step\.log",
        body=lambda t, x, y: t.run.log({"loss": 1.0})),
    "run.once not dedented": in_loop(
        r"run\.once inside the micro-batch loop of step 0: ", body=lambda t, x, y: t.run.once(os.getpid)),
    "step.log of a tensor": in_loop(
        r"accuracy of step\.log must be a number, not a tensor of shape \(2, 1\).*: reduce it by",
        body=lambda t, x, y: t.step.log(accuracy=t.model(x))),
    "step.log before the loop": in_loop(
        r"step\.log of step 0 was called outside of its body: call it in or after its micro",
        do=lambda t: [step.log(accuracy=1.0) for epoch in t.run.epochs(Pairs(), 2) for step in epoch]),
    "step.backward after the loop": in_loop(
        r"step\.backward was called outside the micro-batch loop: call it inside",
        then=lambda t: t.step.backward(t.model(torch.ones(1, 4)).mean())),
    "a step within itself": in_loop(
        r"step 0 is iterated over inside its own loop", body=lambda t, x, y: list(t.step)),
    "an epoch unpacked": in_loop(
        r"the micro-batches of step 0 were not iterated over: its body needs `for batch in s",
        do=lambda t: [x + y for x, y in t.run.epochs(Pairs(), 2)]),
    "no_sync": in_loop(
        r"no_sync\(\) belongs to DDP: leave it out, since a step exchanges its gradients once",
        body=lambda t, x, y: t.model.no_sync()),
    "gradients by backward, as of an attack": in_loop(
        r"loss\.backward\(\) was called .*torch\.autograd\.grad\(loss, x\)", body=learn_from_attack),
}  # fmt: skip

LOSSES: dict[str, Mistake] = {
    "loss.item()": in_loop(
        r"step\.backward needs a scalar loss that depends on the model, not a float: compute it as a t",
        body=lambda t, x, y: t.step.backward(mse(t, x, y).item())),
    "a loss under no_grad": in_loop(
        r"not a tensor of shape \(\) without a gradient: compute it .* outside of torch\.no_g",
        do=torch.no_grad()(Tiny.train)),
    "a gradient that is inf": in_loop(
        r"model\.weight is not finite after step 4: this state is not saved, and the prev", snapshot_every=1,
        body=learn_with_infinite_slope),
    # Batch normalization of huge values: a variance beyond float32, and outputs of 0.
    "statistics that are inf": in_loop(
        r"model\.0\.running_var is not finite after step 2: this state is not saved", snapshot_every=1,
        model=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)),
        body=lambda t, x, y: learn(t, x * (1e30 if t.step.number == 1 else 1.0), y)),
    "a poisoned state to be kept by name": in_loop(
        r"is not finite after step 1: this state is not saved", snapshot_every=None,
        then=lambda t: [nn.init.constant_(t.model.weight, NAN), t.run.snapshot("best")]),
    **{f"weight {weight}": in_loop(
        r"step\.backward got weight .* in micro-batch \d of step 0: a weight is 0, or a number",
        body=lambda t, x, y, weight=weight: t.step.backward(mse(t, x, y), weight=weight))
       for weight in (NAN, "many", torch.tensor(-1))},
    "weights changed by the forward": in_loop(
        r"model\.0\.weight was changed inside the micro-batch loop .*: change weights .* \(ActNorm\), run one forward",
        model=lambda: nn.Sequential(nn.Embedding(10, 4, max_norm=0.1), nn.Linear(4, 1)),
        body=lambda t, x, y: learn(t, x[:, 0].abs().long(), y)),
    "weights given other data in the forward": in_loop(
        r"model\.1\.weight was changed inside .* assigning \.data\?\)",
        model=lambda: nn.Sequential(nn.Linear(4, 3), Bounded(3, 1))),
    "a model converted in the loop": in_loop(
        r"model\.\w+ was converted or given another shape in the loop: change the", then=lambda t: t.model.double()),
}  # fmt: skip

LOOPS: dict[str, Mistake] = {
    "a loop that is not the run's": at_start(
        r"optimizer\.step\(\) was called before the loop of the run: .*; iterate over run\.epochs\(\.\.\.\) or run",
        do=lambda t: [(mse(t, x, y).backward(), t.optimizer.step()) for x, y in DataLoader(Pairs())]),
    "break in the micro-batches": in_loop(
        r"the loop over the micro-batches of step 0 was left by break .* run\.stop\(\)",
        do=lambda t: [break_micro_batches(t, epoch) for epoch in t.run.epochs(Pairs(), 2)]),
    "break in the epochs": in_loop(
        r"the loop was left by break .* at run.steps_done=4, .* call run\.stop\(\)", do=break_epochs),
    "an error in the body that is ignored": in_loop(
        r"the loop over the micro-batches of step 1 was left by break .* an e", do=ignore_error_in_body),
    "a loop after an error between the steps that is ignored": in_loop(
        r"the loop was left by break .* an error", do=lambda t: [ignore_error_between_steps(t), t.train()]),
    "an epoch never iterated": in_loop(
        r"the steps of epoch 0 were not iterated over: its body needs `for step in epoch`",
        do=lambda t: [None for _ in t.run.epochs(Pairs(), 2)]),
    "an epoch iterated twice": in_loop(
        r"the steps of epoch 0 can be iterated over once", after_epoch=lambda t: t.take(t.epoch)),
    "a step of the past": in_loop(
        r"step 0 is over, since step 1 has begun", then=iterate_first_step_again),
    "restore in the loop": in_loop(
        r"run\.restore in the loop would change what is trained", then=lambda t: t.run.restore("best")),
    "a loop inside a loop": in_loop(
        r"this run is inside another loop: call run\.epochs\(\) or run\.steps\(\) after that",
        num_epochs=1, then=Tiny.train),
}  # fmt: skip

PREPARED: dict[str, Mistake] = {
    "prepare of nothing": at_start(
        r"run\.prepare got no objects: call run\.prepare\(model=\.\.\., optimizer=\.\.\.\)",
        lambda run: run.prepare()),
    "prepare twice": at_start(
        r"run\.prepare was called twice: pass all objects in one call", do=lambda t: t.run.prepare(average=t.model)),
    "prepare without names": at_start(
        r"run\.prepare takes everything by name, run\.prepare\(model=model, \.\.",
        lambda run: run.prepare(nn.Linear(4, 1))),
    "evaluate without prepare": at_start(
        r"call run\.prepare\(model=.*\) before run\.evaluate", lambda run: run.evaluate(score, Pairs())),
    **{f"evaluate with micro-batches of {size!r}": at_start(
        r"micro_batch_size must be a whole number above 0",
        do=lambda t, size=size: t.run.evaluate(score, Pairs(), micro_batch_size=size))
       for size in (0, -1, "2", 1.5)},
    "evaluate of nothing": at_start(r"the data set .* is empty", do=lambda t: t.run.evaluate(score, [])),
    "evaluate with exchanged arguments": at_start(
        r"not a Pairs: call run\.evaluate\(score, data\)", do=lambda t: t.run.evaluate(Pairs(), score)),
    "restore without a directory": Mistake(
        lambda run_dir: Tiny().run.restore("best"), r"this run has no directory", "start"),
    "restore without prepare": at_start(
        r"call run\.prepare.* before run\.restore", lambda run: run.restore("best")),
    "restore without a snapshot": at_start(
        r"there is no snapshot in .* yet", do=lambda t: t.run.restore("latest")),
    "SyncBatchNorm": at_start(
        r"model\.1 is a SyncBatchNorm, whose statistics .*: use BatchNorm",
        model=lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))),
    "a loose parameter": at_start(
        r"optimizer holds parameters .* put a parameter of no model into one, such",
        optimizer=lambda parameters: SGD([*parameters, nn.Parameter(torch.zeros(1))], lr=0.1)),
    "a scaler of gradients": at_start(
        r"scaler is a GradScaler: leave it out, .*precision='fp16'\)",
        objects=lambda t: {"scaler": torch.amp.GradScaler("cpu")}),
    "an unknown device map": at_start(
        r"device_map must be none or keep, not .auto.$", objects=lambda t: {"device_map": "auto"}),
    "override in words": at_start(
        r"override must be False or True, not 'no'", objects=lambda t: {"override": "no"}),
    "a block by name": at_start(
        r"shard_blocks lists classes of modules, not 'Linear'", objects=lambda t: {"shard_blocks": "Linear"}),
    "a list of models": at_start(
        r"run\.prepare got models, a list without state_dict and load_state_dict", objects=lambda t: {"models": []}),
    "a class of optimizers": at_start(
        r"optimizer, the class SGD: pass an object", objects=lambda t: {"optimizer": SGD}),
    "a snapshot that is not there": at_start(
        r"there is no snapshot named best", resume="best"),
    "a layer without a shape": at_start(
        r"layer\.weight has no shape before the first batch", objects=lambda t: {"layer": nn.LazyLinear(1)}),
    "a state that cannot be saved": at_start(
        r"scorer\.key is a function, which a snapshot cannot hold",
        objects=lambda t: {"scorer": Stateful(key=score)}),
    "an optimizer that was not passed": in_loop(
        r"an optimizer \(Adam\) that was not passed to run\.prepare updates model\.weig", micro_batch_size=1,
        optimizer=None, then=lambda t: Adam(t.model.parameters()).step()),
    "a layer replaced after prepare": in_loop(
        r"model\.1\.weight was added, removed, replaced or converted after run\.prepare: change the",
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
        do=lambda t: [t.model.__setitem__(1, nn.Linear(4, 1)), t.train()]),
}  # fmt: skip

DATA: dict[str, Mistake] = {
    "no data": at_start(r"NoneType does not support indexing", do=lambda t: t.run.epochs(None, 1)),
    "a data set without a length": at_start(r"Unsized has no len\(\)", data=Unsized()),
    "an IterableDataset": at_start(
        r"Stream is a stream without indexing, .*: pass it to run\.steps", data=Stream()),
    "a sampler that is a list": at_start(
        r"sampler must be a function, sampler\(epoch\) -> .* not a list", sampler=[1, 2]),
    "a sampler of torch's": at_start(
        r"sampler must be a function, .* not a DistributedSam", sampler=DistributedSampler(Pairs(), 2, 0)),
    "a sampler and shuffle": at_start(
        r"sampler and shuffle=True were both given: .* leave shuffle out", sampler=range, shuffle=True),
    "a sampler that draws from a generator of its own": at_start(
        r"sampler\(0\) gave other indices when it was called again: let them depend on the epoch, on what run.prepare",
        sampler=lambda epoch: DRAWS.sample(range(32), 32)),
    "drop_last of everything": at_start(
        r"drop_last leaves no step of a data set of length 5 with batch_size 8: lower", data=Pairs(5), drop_last=True),
    **{f"data with {arguments}": at_start(rf"{next(iter(arguments))} (must be|is)", **arguments)
       for arguments in ({"shuffle": "yes"}, {"drop_last": 1}, {"num_workers": -1})},
    **{f"{count!r} {what}": at_start(
        rf"num_{what} must be a whole number of at least 1, not {re.escape(repr(count))}",
        do=lambda t, what=what, count=count: getattr(t.run, what)(Pairs(), count))
       for count in (0, 1.5, True) for what in ("epochs", "steps")},
    "a data set that fails": in_loop(
        r"the data set failed at sample 20 \(KeyError: 'a column' at .*wrong\.py:\d+\), on r", data=Unreadable(20)),
    "a data set that fails in a worker": in_loop(
        r"the data set failed at sample 20 \(.*in DataLoader worker 0\), on rank", data=Unreadable(20), num_workers=1),
    **{f"a collate function that fails in {place}": in_loop(
        r"collate_fn failed at one of the samples .*20.* \(ValueError: too long at .*wrong\.py:\d+.*\), on rank \d in",
        collate_fn=collate, num_workers=num_workers)
       for num_workers, place in enumerate(("the rank", "a worker"))},
}  # fmt: skip

STATES: dict[str, Mistake] = {
    **{f"a snapshot named {name!r}": in_loop(
        r"a snapshot's name is letters, digits and underscores, such as best, not ",
        then=lambda t, name=name: t.run.snapshot(name))
       for name in ("", "../best", "3", "step-00000001", "latest", "never", "é", "x" * 65, 5)},
    "an object in run.state": in_loop(
        r"state\.best is a object, which a snapshot cannot hold",
        do=lambda t: [t.run.state.update(best=object()), t.train()]),
    "a run.state that is none": at_start(
        r"run\.state must be a dict, not a NoneType", lambda run: setattr(run, "state", None)),
    "run.log of a number": in_loop(
        r"run\.log takes a dict of name -> value or keyword arguments, not 1\.0", then=lambda t: t.run.log(1.0)),
    "a logged step": in_loop(
        r'run\.log got a value named .step.: a name is a string, and not "step"', then=lambda t: t.run.log(step=1)),
    "a name that is no string": in_loop(
        r"step\.log got a value named 1: a name is a string", then=lambda t: t.step.log({1: 2})),
}  # fmt: skip

MISTAKES = IN_MICRO_BATCHES | LOSSES | LOOPS | PREPARED | DATA | STATES

# Mistakes by which two ranks differ, or of which one of two is named.
RANKS: dict[str, Mistake] = {
    **{f"a loss of rank {rank} that is nan": in_loop(
        rf"step 1 is nan in micro-batch {v} \(rank {rank}\)",
        body=lambda t, x, y, v=v: t.step.backward(
            mse(t, x, y) * (NAN if (t.step.number, t.step.micro_batch) == (1, v) else 1.0)))
       for v, rank in ((1, 0), (2, 1))},
    **{f"a sample of rank {rank} that fails, with {num_workers} workers": in_loop(
        rf"sample {sample} .*on rank {rank} in step 0",
        data=Unreadable(sample), shuffle=False, num_workers=num_workers)
       for sample, rank, num_workers in ((2, 0, 1), (4, 1, 0))},
    "reentrant checkpointing": in_loop(
        r"model\.\w+ got two gradients in one micro-batch .*: use .* with use_reentrant=Fa",
        body=lambda t, x, y: t.step.backward(F.mse_loss(torch.stack(
            [checkpoint(t.model, x.requires_grad_(), use_reentrant=True) for _ in range(2)]).mean(0), y))),
    "batch sizes": by_rank(
        r"batch_size is 8 on rank 0 and 16 on rank 1: make it the same on all ranks",
        lambda rank: {"batch_size": 8 * (1 + rank)}),
    "a rank without a micro-batch": at_start(
        r"2 ranks cannot share a step of 1 micro-batch .*: start 1 rank, or give SAMESTEP_MICRO_BATCH_SIZE=2",
        batch_size=4, micro_batch_size=4),
    "seeds": by_rank(
        r"seed is 0 on rank 0 and 1 on rank 1: make it the same on all ranks", lambda rank: {"seed": rank}),
    "rows": by_rank(
        r"log_every is '1' on rank 0 and '2' on rank 1: make it the same on all ranks",
        lambda rank: {"log_every": 1 + rank}),
    "models": by_rank(
        r"model is '.* 5 values.*' on rank 0 and '.* 10 values.*' on rank 1: make it the same",
        lambda rank: {"model": lambda: nn.Linear(4, 1 + rank)}),
    "what is prepared": by_rank(
        r"what run\.prepare got is .* on rank 0 and .* on rank 1: make it the same",
        lambda rank: {"objects": lambda t: {"loader": Stateful()} if rank else {}}),
    "lengths of the data": by_rank(
        r"data_length is 32 on rank 0 and 33 on rank 1: make it the same", lambda rank: {"data": Pairs(32 + rank)}),
    "samples of the data": by_rank(
        r"sample 0 of the data set differs between rank 0 and rank 1: build the same data set, of the same dtypes, on "
        r"all ranks",
        lambda rank: {"data": Subset(Pairs(), range(rank, NUM_SAMPLES, 2))}),
    "numbers of epochs": by_rank(
        r"the number of steps is 4 on rank 0 and 8 on rank 1: make it the same", lambda rank: {"num_epochs": 1 + rank}),
    "samplers": by_rank(
        r"sampler\(1\) gave other indices on other ranks: seed it from the epoch, not the rank",
        lambda rank: {"sampler": lambda epoch: [(i + epoch * rank) % 32 for i in range(32)]}, at="loop"),
    "a sampler of epochs of different lengths": in_loop(
        r"sampler\(1\) gave 9 indices, and 8 for the epochs before: give as many .*, or use one loop per length",
        sampler=lambda epoch: range(8 + epoch)),
    "run.stop on one": in_loop(
        r"rank 1 has called run\.stop, and rank 0 has not: base the decision to stop on values that are the same",
        then=lambda t: [update(t), (t.run.rank, t.step.number) == (1, 1) and t.run.stop("bored")]),
    "run.stop on one, then evaluate": in_loop(
        r"rank 1 has called run\.stop, and rank 0 has not: base",
        then=lambda t: [update(t), t.run.rank == 1 and t.run.stop("bored")],
        after_epoch=lambda t: t.run.evaluate(score, Pairs(5))),
    "run.stop on one after an epoch": in_loop(
        r"rank 0 has called run\.stop, and rank 1 has not: base",
        sampler=lambda epoch: list(range(NUM_SAMPLES)),
        after_epoch=lambda t: t.run.rank == 0 and t.run.stop("bored")),
    **{f"run.snapshot on one{ending}": in_loop(
        r"rank 0 and rank 1 did not ask for the same snapshots in this epoch: call run\.snapshot on every rank",
        snapshot_every=8,
        do=lambda t, is_evaluated=bool(ending): snapshot_on_rank_0(t, is_evaluated))
       for ending in ("", ", then evaluate")},
    "an unprepared module with an optimizer": in_loop(
        r"an optimizer \(SGD\) that was not passed to run\.prepare updates a parameter of shape \(1, 4\) in st",
        do=train_unprepared_head),
    "run.once on one before prepare": at_start(
        r"rank 0 has called run\.once, and rank 1 has called run\.prepare: ",
        objects=lambda t: {} if t.run.rank else t.run.once(dict)),
    "run.evaluate on one before the loop": at_start(
        r"rank 0 has called run\.evaluate, and rank 1 has called run\.epochs or run\.steps: ",
        do=lambda t: [t.run.rank or t.run.evaluate(score, Pairs(8)), t.train()]),
    "run.evaluate on one": in_loop(
        r"rank 0 has called run\.evaluate, and rank 1 has not: call it on every rank",
        after_epoch=lambda t: t.run.rank == 0 and t.run.evaluate(score, Pairs(5))),
}  # fmt: skip

# --- no mistakes ------------------------------------------------------------------------------------------------------

learn_well = functools.partial(tiny_run, snapshot_every=2)


def train(name: str, run_dir: RunDir) -> None:
    if name == "nothing":
        learn_well(run_dir)
    else:
        (MISTAKES | RANKS)[name].train(run_dir)


if __name__ == "__main__":
    train(sys.argv[2], sys.argv[1])
