"""Training functions about gradients: whose they are, who has them, and how they travel."""

from typing import Any

import torch
import torch.nn.functional as F
from promises.loops import Result, build_run, case, score_classes, train_classes
from promises.models import (
    BATCH_SIZE,
    MICRO_BATCH_SIZE,
    Bags,
    Branches,
    Coder,
    Kinds,
    Transformer,
    build_pairs,
    build_texts,
)
from support.trace import Trace
from torch import Tensor, nn

import samestep


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
    return train_transformer(build_run(num_threads=2), num_epochs=1)


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
def gradients_that_a_function_withholds() -> Result:
    """In some micro-batches its backward gives None, which is as good as not to have used the weight."""
    run = build_run()

    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, shift: Tensor) -> Tensor:
            ctx.gives = bool((x[:, 0] > 0).all())
            return x + shift

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
            return grad, grad.sum(0) if ctx.gives else None

    model = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(6)), "head": nn.Parameter(torch.randn(6, 4))})
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run.prepare(model=model, optimizer=optimizer)
    trace = Trace(run)
    for epoch in run.epochs(build_pairs(), 2):
        for step in epoch:
            for x, y in step:
                step.backward(F.cross_entropy(Shift.apply(x, model["shift"]) @ model["head"], y))
            trace.add("has a gradient", model["shift"].grad is not None)
            optimizer.step()
            trace.end_step(step)
    assert model["shift"].any()
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


def train_on_several_losses() -> Result:
    """Losses with weights of their own, some of them 0; two models, of which a second pass trains one once more."""
    run = build_run(bucket_cap_mb=0.0002)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    opt_1, opt_2 = torch.optim.AdamW(model.parameters(), 1e-2), torch.optim.SGD(critic.parameters(), 0.1)
    run.prepare(model=model, critic=critic, opt_1=opt_1, opt_2=opt_2)
    trace = Trace(run)
    for epoch in run.epochs(build_pairs(), 2):
        for step in epoch:
            for x, y in step:
                if not bool((y[:1] == 3).any()):
                    out = model(x)
                    low = y < 2
                    losses = {F.cross_entropy(out, y): len(y), (out[low] ** 2).sum() / max(1, low.sum()): low.sum()}
                    step.backward(losses | {critic(out).mean(): float(step.number % 2)}, model=model)
                if step.number % 3 < 2:
                    scores = critic(model(x).detach())
                    step.backward({F.softplus(scores).mean(): 2, scores.square().mean(): int(y[0])}, model=critic)
            trace.add("gradients", [None if p.grad is None else p.grad.norm() for p in model.parameters()])
            trace.end_step(step)
            if step.number % 3 < 2:
                for x, y in step:
                    scores = critic(model(x).detach())
                    step.backward({scores.mean(): 1, model[4](x[:, :1].expand(-1, 8)).mean(): len(y)})
            trace.add("gradients", [None if p.grad is None else p.grad.norm() for p in model.parameters()])
            opt_1.step()
            opt_2.step()
            trace.end_step(step)
    return trace.finish()


@case
def several_losses() -> Result:
    return train_on_several_losses()


@case
def several_losses_on_long_routes() -> Result:
    from samestep.engine import routes

    routes.DIRECT_MAX_BYTES = 0
    return train_on_several_losses()


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


@case
def direct_between_hosts() -> Result:
    """Without the sockets between the ranks of one host."""
    from samestep.engine import routes

    routes.NEIGHBORS_MAX_BYTES = 0
    return train_kinds()


@case
def clipping_with_weights_of_no_optimizer() -> Result:
    """Weights that no optimizer holds have no gradient, or the norm of all weights would take in each rank's own."""
    run = build_run()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return train_classes(run, model, torch.optim.SGD(model[2].parameters(), 0.1))


@case
def unfrozen_in_a_steps_body() -> Result:
    """As GANs do it before each pass, and gradual unfreezing between two steps."""
    run = build_run()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    other = nn.Linear(6, 4).requires_grad_(False)
    optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()], 0.1)
    run.prepare(model=model, other=other, optimizer=optimizer)
    trace = Trace(run)
    for epoch in run.epochs(build_pairs(), 2):
        for step in epoch:
            other.requires_grad_(step.number % 3 == 1)
            for x, y in step:
                step.backward(F.cross_entropy(model(x) + other(x), y))
            other.requires_grad_(True)
            model.requires_grad_(False)
            for x, y in step:
                step.backward(F.cross_entropy(model(x) - other(x), y))
            model.requires_grad_(True)
            trace.add("gradients", [None if p.grad is None else p.grad.norm() for p in other.parameters()])
            optimizer.step()
            trace.end_step(step)
    return trace.finish()


@case
def another_layer_in_the_optimizer() -> Result:
    run = build_run()
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    trace = Trace(run)
    for epoch in run.epochs(build_pairs(), 2):
        for step in epoch:
            if step.number == 2:
                optimizer.param_groups[0]["params"] = list(model[0].parameters())
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            trace.add("has gradients", [p.grad is not None for p in model.parameters()])
            optimizer.step()
            trace.end_step(step)
    return trace.finish()


@case
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


@case
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


@case
def overlapping_views_of_one_gradient() -> Result:
    """As above, where one of them begins in the middle of the other."""
    run = build_run()

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(14))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.a.view(24) + torch.cat([torch.zeros(10), self.b])).view(6, 4)

    model = Sum()

    def look(step: Any) -> None:
        assert torch.equal(model.b.grad, model.a.grad.view(24)[10:])

    return train_classes(run, model, torch.optim.SGD(model.parameters(), 0.1), after=look)


@case
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


@case
def sparse_gradients() -> Result:
    """Each micro-batch has other words, and some words twice. The layer is used twice, too."""
    run = build_run()

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(17, 6, sparse=True), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            tokens = (4 * x).long() % 17
            return self.head(self.words(tokens).sum(1) + self.words(tokens[:, 0]))

    model = Words()

    def look(step: Any) -> None:
        assert model.words.weight.grad.layout is torch.strided

    return train_classes(run, model, torch.optim.Adagrad(model.parameters(), 0.1), after=look)
