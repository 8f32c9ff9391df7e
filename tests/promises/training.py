"""Training functions about all that is not the gradient's way: data, buffers, precision, schedules, compilers."""

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from promises.loops import Result, build_run, case, score_classes, train_classes
from promises.models import NUM_SAMPLES, Augmented, Buffers, Norms, Sentences, Tagger, build_pairs, pad
from support.trace import Trace
from torch import Tensor, nn

import samestep


@case
def token_weights() -> Result:
    """Means over words, of which a micro-batch may have none."""
    run = build_run()
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    run.prepare(model=model, optimizer=optimizer)
    trace = Trace(run)

    def score(words: Tensor) -> dict[str, Any]:
        return {"loss": (F.cross_entropy(model(words), words.flatten(), ignore_index=0), (words != 0).sum())}

    for epoch in run.epochs(Sentences(), 2, collate_fn=pad, num_workers=1):
        for step in epoch:
            for words in step:
                loss = F.cross_entropy(model(words), words.flatten(), ignore_index=0)
                step.backward(loss, weight=(words != 0).sum())
            run.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            trace.end_step(step)
        # Sentences 0, 5, 10 ... have no word, and with micro-batches of 1 their loss is not a number.
        trace.add("scores", run.evaluate(score, Sentences(29), collate_fn=pad, micro_batch_size=1))
    return trace.finish()


@case
def plateau() -> Result:
    """The schedule, the best score and the end follow from what was evaluated."""
    run = build_run()
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    run.prepare(model=model, optimizer=optimizer, scheduler=scheduler)
    trace = Trace(run)
    for epoch in run.epochs(build_pairs(), 12):
        for step in epoch:
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            trace.end_step(step)
        scores = run.evaluate(score_classes(model), build_pairs(29, seed=1))
        scheduler.step(scores["loss"])
        trace.add("scores", scores)
        trace.add("learning rate", optimizer.param_groups[0]["lr"])
        if scores["loss"] < run.state.get("best", float("inf")):
            run.state |= {"best": scores["loss"], "epoch": epoch.number}
        elif epoch.number - run.state["epoch"] >= 4:
            run.stop("no better for 4 epochs")
    return trace.finish()


def train_compiled(backend: str) -> Result:
    """Of layers for which dynamic shapes would give kernels with other bits: the ragged micro-batch must not do it."""
    run = build_run()
    model = nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 5, 2), nn.BatchNorm1d(5), nn.GELU(), nn.Flatten(), nn.Linear(25, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    compiled = torch.compile(model, backend=backend)
    result = train_classes(run, model, optimizer, forward=compiled)
    assert not any("_orig_mod" in name for name in run._build_state({})["objects"]["model"])
    return result


@case
def compiled_by_aot_eager() -> Result:
    return train_compiled("aot_eager")


def compiled_by_inductor() -> Result:
    return train_compiled("inductor")


def compiled_for_many_lengths() -> Result:
    """More lengths than torch would compile kernels for, unless it is told to: others would then run uncompiled."""
    run = samestep.Run(None, batch_size=12, micro_batch_size=1)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compiled = torch.compile(model)
    run.prepare(model=compiled, optimizer=optimizer)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(1 + i % 12, 16, generator=generator) for i in range(24)]
    trace = Trace(run)
    for epoch in run.epochs(data, 1):
        for step in epoch:
            for x in step:
                step.backward((compiled(x) ** 2).mean())
            optimizer.step()
            trace.end_step(step)
    return trace.finish()


@case
def batch_norm() -> Result:
    """Of all kinds: a moving average, a cumulative one, without statistics, frozen, run twice, in channels_last."""
    run = build_run()
    model = Norms().to(memory_format=torch.channels_last)
    model.frozen.eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    result = train_classes(run, model, optimizer)
    # Six steps of 12, 12 and 3 micro-batches, two epochs.
    counts = [layer.num_batches_tracked for layer in (model.moving, model.cumulative, model.twice, model.frozen)]
    assert counts == [54, 54, 108, 0], counts
    assert not model.frozen.running_mean.any()
    return result


@case
def training_mode_set_in_the_loop() -> Result:
    """Each epoch ends in eval mode, and each micro-batch turns it off: on the ranks that have one."""
    run = build_run()
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def forward(x: Tensor) -> Tensor:
        model.train(torch.is_grad_enabled())
        return model(x)

    result = train_classes(run, model, optimizer, num_epochs=3, forward=forward)
    assert model[1].num_batches_tracked == 81
    return result


@case
def statistics_that_a_layer_replaces() -> Result:
    """By new tensors instead of writing into its own, as layers made by hand often do; a script may, too."""
    run = build_run()

    class ByHand(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                var, mean = torch.var_mean(x.detach(), 0)
                self.running_mean = 0.9 * self.running_mean + 0.1 * mean
                self.running_var = 0.9 * self.running_var + 0.1 * var
                self.num_batches_tracked += 1
            return (x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + self.eps) * self.weight + self.bias

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by_hand, self.usual, self.head = ByHand(6), nn.BatchNorm1d(6), nn.Linear(12, 4)
            self.register_buffer("wide", torch.ones(1).expand(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cat([self.by_hand(x * self.wide), self.usual(x)], 1))

    model = Both()

    def replace(step: Any) -> None:
        if step.number == 2:
            for layer in (model.by_hand, model.usual):
                layer.running_mean = torch.full((6,), 0.5)
                layer.running_var.data = torch.full((6,), 2.0)

    def look(step: Any) -> None:
        torch.testing.assert_close(model.by_hand.running_mean, model.usual.running_mean)
        torch.testing.assert_close(model.by_hand.running_var, model.usual.running_var)

    return train_classes(run, model, torch.optim.SGD(model.parameters(), 0.1), before=replace, after=look)


@case
def draws_of_rank_0_alone() -> Result:
    """What run.once draws moves the generators on; what is drawn after it is the same on all ranks."""
    run = build_run()
    run.once(lambda: [torch.rand(3), np.random.rand(), random.random()] and 1)
    model = nn.Linear(6, 4)
    noise = torch.randn(6) + float(np.random.rand()) + random.random()

    def look(step: Any) -> None:
        run.once(lambda: torch.rand(step.number).tolist())

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return train_classes(run, model, optimizer, forward=lambda x: model(x + noise), after=look)


@case
def scores_by_gradients() -> Result:
    """Their backward leaves the step's own gradient alone."""
    run = build_run()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    trace = Trace(run)

    def score(batch: Any) -> dict[str, Any]:
        x = batch[0].clone().requires_grad_()
        with torch.enable_grad():
            model(x).square().mean().backward()
        return {"slope": x.grad.norm(), "of the weights": model[0].weight.grad.norm()}

    for epoch in run.epochs(build_pairs(), 2):
        for step in epoch:
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            before = [param.grad.clone() for param in model.parameters()]
            trace.add("scores", run.evaluate(score, build_pairs(29, seed=1)))
            assert all(map(torch.equal, before, (param.grad for param in model.parameters())))
            optimizer.step()
            trace.end_step(step)
    return trace.finish()


@case
def scores_in_training_mode() -> Result:
    """As for an uncertainty from dropout: the statistics stay, and so does the mode that each layer was in."""
    run = build_run()
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[3].eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    trace = Trace(run)

    def score(batch: Any) -> dict[str, Any]:
        assert not model.training
        model.train()
        return {"mean": model(batch[0]).mean()}

    for epoch in run.epochs(build_pairs(), 2):
        for step in epoch:
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        trace.add("scores", run.evaluate(score, build_pairs(6, seed=1)))
        assert [layer.training for layer in model] == [True, True, True, False, True]
        assert model[1].num_batches_tracked == 27 * (epoch.number + 1)
        trace.add("digest", trace.digest())
    return trace.finish()


@case
def other_buffers() -> Result:
    """Buffers that a forward writes in place, replaces, or draws: kept as the step's first micro-batch leaves them."""
    run = build_run()
    model = Buffers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[Tensor] = []

    def remember(step: Any) -> None:
        seen[:] = [model.mean.clone()]

    def forward(x: Tensor) -> Tensor:
        seen.append(x)
        return model(x)

    def look(step: Any) -> None:
        assert model.count == step.number + 1
        if run.world_size == 1:
            torch.testing.assert_close(model.mean, 0.9 * seen[0] + 0.1 * seen[1].mean(0))

    return train_classes(run, model, optimizer, forward=forward, before=remember, after=look)


@case
def bf16() -> Result:
    run = build_run(precision="bf16")
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return train_classes(run, model, optimizer)


@case
def parameters_of_integers() -> Result:
    """As quantized weights and the states of Keras are: frozen, and in the optimizer nevertheless."""
    run = build_run()
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
    model.register_parameter("code", nn.Parameter(torch.arange(3), requires_grad=False))
    return train_classes(run, model, torch.optim.AdamW(model.parameters(), 1e-2))


@case
def fp16_with_overflows() -> Result:
    """Gradients that overflow in some micro-batches: no rank makes that step's update, and the scale is halved."""
    run = build_run(precision="fp16")
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    skipped = []

    def look(step: Any) -> None:
        missing = [param.grad is None for param in model.parameters()]
        assert len(set(missing)) == 1
        skipped.append(missing[0])

    # One sample in many is so far off that the gradient of its weights passes the largest float16.
    data = build_pairs()
    data.tensors[0][::19] *= 500.0
    result = train_classes(run, model, optimizer, num_epochs=4, data=data, after=look)
    assert any(skipped)
    assert not all(skipped)
    assert run._context.precision.scale == 2.0 ** (16 - sum(skipped))
    return result


@case
def endless_steps() -> Result:
    """Steps that cross the ends of epochs: 50 samples, 36 in each step."""
    run = build_run()
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    run.prepare(model=model, optimizer=optimizer)
    trace = Trace(run)
    for step in run.steps(build_pairs(50), 7):
        trace.draw("before the micro-batches")
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        trace.end_step(step)
        if step.number % 3 == 2:
            trace.add("scores", run.evaluate(score_classes(model), build_pairs(29, seed=1)))
    return trace.finish()


@case
def a_sampler() -> Result:
    """It draws some samples twice and leaves others out."""
    run = build_run()
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def draw(epoch: int) -> Tensor:
        return torch.randint(60, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(epoch))

    return train_classes(run, model, optimizer, sampler=draw)


def train_augmented(num_workers: int) -> Result:
    run = build_run()
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return train_classes(run, model, optimizer, data=Augmented(), num_workers=num_workers)


@case
def augmentation() -> Result:
    return train_augmented(0)


def augmentation_in_workers() -> Result:
    return train_augmented(2)
