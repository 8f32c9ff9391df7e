"""Training functions of all kinds, each a script of its own: run on any number of ranks, they must do the same.

Almost all have 12 micro-batches per step, so that 1 to 12 ranks are legal, and most have a short last step that leaves
ranks idle, with a ragged last micro-batch.
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
    NUM_SAMPLES,
    Augmented,
    Bags,
    Branches,
    Buffers,
    Coder,
    Kinds,
    Norms,
    Sentences,
    Tagger,
    Transformer,
    build_pairs,
    build_texts,
    pad,
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


def train_transformer(run: samestep.Run, num_epochs: int = 2) -> Result:
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    run.prepare(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema)
    trace = Trace(run)
    for epoch in run.epochs(build_texts(), num_epochs):
        for step in epoch:
            for tokens in step:
                step.backward(F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))
            trace.add("norm", run.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
            trace.end_step(step)
        trace.draw(f"after epoch {epoch.number}")
        trace.add("scores", run.evaluate(lambda tokens: {"mean": ema(tokens[:, :-1]).mean()}, build_texts(29, seed=1)))
    return trace.finish()


@case
def transformer() -> Result:
    return train_transformer(build_run())


@case
def transformer_in_many_buckets() -> Result:
    return train_transformer(build_run(bucket_cap_mb=0.001), num_epochs=1)


@case
def transformer_on_long_routes() -> Result:
    """No bucket is small enough to go straight to all ranks: they take the butterfly, or go in chunks."""
    from samestep.engine import routes

    routes.DIRECT_MAX_BYTES = 0
    return train_transformer(build_run(), num_epochs=1)


@case
def transformer_in_many_buckets_on_long_routes() -> Result:
    from samestep.engine import routes

    routes.DIRECT_MAX_BYTES = 0
    return train_transformer(build_run(bucket_cap_mb=0.004), num_epochs=1)


def train_many_parts() -> Result:
    """23 micro-batches: a rank's share is up to four subtrees."""
    run = samestep.Run(None, batch_size=23, micro_batch_size=1)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return train_classes(run, model, optimizer, data=build_pairs(23 + 13))


@case
def many_parts() -> Result:
    return train_many_parts()


@case
def many_parts_on_long_routes() -> Result:
    from samestep.engine import routes

    routes.DIRECT_MAX_BYTES = 0
    return train_many_parts()


@case
def two_threads() -> Result:
    return train_transformer(build_run(threads=2), num_epochs=1)


@case
def unused_weights() -> Result:
    run = build_run()
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.3)

    def choose(step: Any) -> None:
        model.is_even = step.number % 2 == 0

    def look(step: Any) -> None:
        # As on one device: no gradient, so no update by weight decay or by momentum, and no state.
        assert all(param.grad is None for param in model.never.parameters())
        assert all((param.grad is not None) == model.is_even for param in model.even.parameters())
        assert not any(param in optimizer.state for param in model.never.parameters())

    return train_classes(run, model, optimizer, num_epochs=3, before=choose, after=look)


@case
def a_step_without_any_gradient_of_a_bucket() -> Result:
    """Buckets of one weight each, so that whole buckets are left unused by some ranks or by all."""
    run = build_run(bucket_cap_mb=0.0001)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)

    def choose(step: Any) -> None:
        model.is_even = step.number % 2 == 0

    return train_classes(run, model, optimizer, before=choose)


@case
def a_last_step_of_one_micro_batch() -> Result:
    run = build_run()
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return train_classes(run, model, optimizer, data=build_pairs(BATCH_SIZE + MICRO_BATCH_SIZE))


@case
def micro_batches_without_backward() -> Result:
    """Left out by the script: neither the gradient nor the loss knows them."""
    run = build_run()
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    trace = Trace(run)
    for epoch in run.epochs(build_pairs(), 2):
        for step in epoch:
            for x, y in step:
                if step.num_samples < BATCH_SIZE or not bool((y == 3).any()):
                    step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            trace.end_step(step)
    return trace.finish()


@case
def gradients_of_minus_zero() -> Result:
    """From a part of the micro-batches only: how the others' absence travels must not turn the sign of the sum."""
    run = build_run()
    model = nn.ParameterDict({"head": nn.Parameter(torch.randn(6, 4)), "zero": nn.Parameter(torch.zeros(3))})
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run.prepare(model=model, optimizer=optimizer)
    trace = Trace(run)
    for epoch in run.epochs(build_pairs(), 2):
        for step in epoch:
            for x, y in step:
                loss = F.cross_entropy(x @ model["head"], y)
                if bool((y == 3).any()):
                    loss = loss - (0.0 * model["zero"]).sum()
                step.backward(loss)
            trace.add("gradient of zero", model["zero"].grad)
            optimizer.step()
            trace.end_step(step)
    return trace.finish()


@case
def embeddings() -> Result:
    run = build_run()
    model = Bags()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    run.prepare(model=model, optimizer=optimizer)
    trace = Trace(run)
    for epoch in run.epochs(build_texts(), 2):
        for step in epoch:
            for tokens in step:
                step.backward(F.cross_entropy(model(tokens[:, :-1]), tokens[:, -1]))
            optimizer.step()
            trace.end_step(step)
    return trace.finish()


@case
def gan() -> Result:
    """Two passes over a step, a gradient penalty through a double backward, the generator only every second step."""
    run = build_run()
    generator = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    critic = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.LeakyReLU(), nn.Linear(8, 1))
    opt_g = torch.optim.Adam(generator.parameters(), 1e-2, betas=(0.5, 0.999))
    opt_c = torch.optim.Adam(critic.parameters(), 1e-2, betas=(0.5, 0.999))
    run.prepare(generator=generator, critic=critic, opt_g=opt_g, opt_c=opt_c)
    trace = Trace(run)
    fixed_noise = torch.randn(4, 2)
    for epoch in run.epochs(build_pairs(), 2):
        for step in epoch:
            for x, _ in step:
                fake = generator(torch.randn(len(x), 2)).detach()
                between = torch.lerp(x, fake, torch.rand(len(x), 1)).requires_grad_()
                slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
                loss = F.softplus(-critic(x)).mean() + F.softplus(critic(fake)).mean()
                step.backward(loss + ((slope.norm(dim=1) - 1) ** 2).mean(), model=critic)
            trace.end_step(step)
            opt_c.step()
            if step.number % 2 == 0:
                gradients = [param.grad.clone() for param in critic.parameters()]
                for x, _ in step:
                    step.backward(F.softplus(-critic(generator(torch.randn(len(x), 2)))).mean(), model=generator)
                opt_g.step()
                # The second pass is the generator's: the critic's gradient stays what it was.
                assert all(map(torch.equal, gradients, (param.grad for param in critic.parameters())))
                trace.end_step(step)
        generator.eval()
        trace.add("samples", generator(fixed_noise))
        generator.train()
    return trace.finish()


@case
def methods_other_than_forward() -> Result:
    run = build_run()
    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    return train_classes(run, model, optimizer, forward=lambda x: model.decode(model.encode(x)))


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
    assert run._precision.scale == 2.0 ** (16 - sum(skipped))
    return result


@case
def two_models_in_one_pass() -> Result:
    """Each with its own loss, weight and optimizer; one of them is left out in some micro-batches."""
    run = build_run()
    first, second = (
        nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 4)),
        nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4)),
    )
    opt_1, opt_2 = torch.optim.AdamW(first.parameters(), 1e-2), torch.optim.SGD(second.parameters(), 0.1)
    run.prepare(first=first, second=second, opt_1=opt_1, opt_2=opt_2)
    trace = Trace(run)
    for epoch in run.epochs(build_pairs(), 2):
        for step in epoch:
            for x, y in step:
                step.backward(F.cross_entropy(first(x), y), model=first)
                if bool((y > 0).any()):
                    loss = F.cross_entropy(second(x) + first(x).detach(), y)
                    step.backward(loss, model=second, weight=(y > 0).sum())
            opt_1.step()
            opt_2.step()
            trace.end_step(step)
        for model in (first, second):
            trace.add("scores", run.evaluate(score_classes(model), build_pairs(29, seed=1)))
    return trace.finish()


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


@case
def unfreezing() -> Result:
    """A part that is frozen at first, and one that the optimizer gets later."""
    run = build_run()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[4].parameters()], 1e-2)

    def thaw(step: Any) -> None:
        if step.number == 2:
            model[2].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1e-3})
        if step.number == 4:
            model[0].requires_grad_(True)

    return train_classes(run, model, optimizer, num_epochs=3, after=thaw)


def train_kinds() -> Result:
    run = build_run()
    model = Kinds()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run.prepare(model=model, optimizer=optimizer)
    trace = Trace(run)
    for epoch in run.epochs(build_pairs(), 2):
        for step in epoch:
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            trace.end_step(step)
    return trace.finish()


@case
def dtypes() -> Result:
    return train_kinds()


@case
def dtypes_on_long_routes() -> Result:
    from samestep.engine import routes

    routes.DIRECT_MAX_BYTES = 0
    return train_kinds()
