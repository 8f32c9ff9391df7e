"""Training functions, each with something that could depend on the number of ranks.

On any number of ranks, each of them must do the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from promises.loops import (
    Result,
    adamw,
    build_pairs,
    build_run,
    build_texts,
    have_grads,
    read_grads,
    sgd_momentum,
    trace_run,
    train_classes,
)
from support.snapshots import build_state
from support.tiny import update
from support.trace import Trace
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

CASES: dict[str, Callable[[], Result]] = {}


def case(fn: Callable[[], Result]) -> Callable[[], Result]:
    CASES[fn.__name__] = fn
    return fn


# --- models -----------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """Embeddings tied with the output, a dropout in each block, a block that is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(17, 16), nn.Embedding(9, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 64, 0.1, F.gelu, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        return self.head(self.blocks[1](x))


class Branches(nn.Module):
    """Weights that all steps, some steps, or some micro-batches leave unused."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.never, self.even, self.rare = nn.Linear(3, 3), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.is_even = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        if self.is_even:
            hidden = hidden + self.even(hidden)
        if bool((x[:, 0] > 1.3).any()):
            hidden = hidden + self.rare(hidden)
        return self.head(hidden)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 2, bias=False)
        self.moving = nn.BatchNorm2d(4)
        self.cumulative = nn.BatchNorm2d(4, momentum=None, affine=False)
        self.untracked = nn.BatchNorm1d(8, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(8)
        self.twice = nn.BatchNorm1d(8, momentum=0.3)
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 1, 2, 3).to(memory_format=torch.channels_last)
        hidden = self.cumulative(self.moving(self.convolution(image))).flatten(1)
        hidden = self.twice(torch.tanh(self.frozen(self.untracked(hidden))))
        return self.head(self.twice(self.hidden(hidden)))


class Kinds(nn.Module):
    """Weights of four dtypes in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.brain = nn.Linear(6, 7), nn.Linear(7, 5).bfloat16()
        self.wide = nn.Linear(5, 5).double()
        self.waves = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.brain(torch.tanh(self.single(x)).bfloat16())
        hidden = torch.tanh(self.wide(hidden.double())).float()
        return self.head(torch.fft.ifft(torch.fft.fft(hidden) * self.waves).real)


# --- gradients: which weights get one, and how the ranks exchange them ------------------------------------------------


@case
def transformer(**arguments: Any) -> Result:
    def body(t: Any, tokens: Tensor) -> None:
        t.step.backward(F.cross_entropy(t.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))

    def then(t: Any) -> None:
        t.trace.add("norm", t.run.clip_grad_norm_(t.model.parameters(), 1.0))
        update(t)
        t.scheduler.step()
        t.ema.update_parameters(t.model)

    def validate(t: Any) -> None:
        t.trace.draw(f"after epoch {t.epoch.number}")
        score = lambda tokens: {"mean": t.ema(tokens[:, :-1]).mean()}  # noqa: E731
        t.trace.add("scores", t.run.evaluate(score, build_texts(29, seed=1)))

    return trace_run(
        Transformer, optimizer=adamw, data=build_texts(), body=body, then=then, after_epoch=validate,
        objects=lambda t: {
            "scheduler": torch.optim.lr_scheduler.LambdaLR(t.optimizer, lambda step: min(1.0, (step + 1) / 4)),
            "ema": AveragedModel(t.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))},
        **arguments,
    )  # fmt: skip


CASES["two_threads"] = partial(transformer, num_threads=2, num_epochs=1)


def alternate(t: Any) -> None:
    """Every other step leaves a branch of `Branches` unused."""
    t.model.is_even = t.step.number % 2 == 0


@case
def unused_weights() -> Result:
    def check(t: Any) -> None:
        # As on one device: no gradient, so no update by weight decay or momentum, and no state.
        assert not any(have_grads(t.run, t.model.never.parameters()))
        assert set(have_grads(t.run, t.model.even.parameters())) == {t.model.is_even}
        assert not any(param in t.optimizer.state for param in t.model.never.parameters())

    optimizer = lambda params: torch.optim.AdamW(params, 1e-2, weight_decay=0.3)  # noqa: E731
    return train_classes(Branches, optimizer=optimizer, num_epochs=3, before=alternate, after=check)


@case
def gan(has_penalty: bool = True) -> Result:
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
                scores = critic(torch.cat([x, fake]))  # in one call, for FSDP2
                loss = F.softplus(torch.cat([-scores[: len(x)], scores[len(x) :]])).mean()
                if has_penalty:
                    between = torch.lerp(x, fake, torch.rand(len(x), 1)).requires_grad_()
                    slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
                    loss = loss + ((slope.norm(dim=1) - 1) ** 2).mean()
                step.backward(loss, model=critic)
            trace.end_step(step)
            opt_c.step()
            if step.number % 2 == 0:
                for x, _ in step:
                    step.backward(F.softplus(-critic(generator(torch.randn(len(x), 2)))).mean(), model=generator)
                opt_g.step()
                assert all(param.grad is None for param in critic.parameters())
                trace.end_step(step)
        generator.eval()
        trace.add("samples", generator(fixed_noise))
        generator.train()
    return trace.finish()


CASES["gan_without_penalty"] = partial(gan, has_penalty=False)


@case
def dtypes() -> Result:
    return trace_run(Kinds, optimizer=sgd_momentum)


def build_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


@case
def clipping_with_weights_of_no_optimizer() -> Result:
    """Weights that no optimizer holds have no gradient. Otherwise the norm would contain each rank's own."""
    return train_classes(build_mlp, optimizer=lambda params: torch.optim.SGD(params[2:], 0.1))


@case
def overlapping_views_of_one_gradient() -> Result:
    """Autograd gives both weights the same memory as their gradient, so that adding in place adds to both."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(14))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.a.view(24) + torch.cat([torch.zeros(10), self.b])).view(6, 4)

    def check(t: Any) -> None:
        a, b = read_grads(t.run, [t.model.a, t.model.b])
        assert torch.equal(b, a.view(24)[10:])

    return train_classes(Sum, after=check)


@case
def gradients_kept_for_the_next_step() -> Result:
    """With several ranks, the next step writes its gradient into the same memory."""
    before: Any = None

    def then(t: Any) -> None:
        nonlocal before
        (grad,) = read_grads(t.run, [t.model.weight])
        if before is not None:
            t.trace.add("cosine", F.cosine_similarity(before.flatten(), grad.flatten(), dim=0))
        before = grad if t.model.weight.grad is None else t.model.weight.grad
        update(t)

    return trace_run(lambda: nn.Linear(6, 4), then=then)


@case
def sparse_gradients() -> Result:
    """Each micro-batch has other words, and some words twice. The layer is also used twice."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(17, 6, sparse=True), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            tokens = (4 * x).long() % 17
            return self.head(self.words(tokens).sum(1) + self.words(tokens[:, 0]))

    def check(t: Any) -> None:
        (grad,) = read_grads(t.run, [t.model.words.weight])
        assert grad.layout is torch.strided

    return train_classes(Words, optimizer=lambda params: torch.optim.Adagrad(params, 0.1), after=check)


@case
def gradients_that_a_function_withholds() -> Result:
    """In some micro-batches its backward returns None, as if they did not use the weight."""

    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, shift: Tensor) -> Tensor:
            ctx.gives = bool((x[:, 0] > 0).all())
            return x + shift

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
            return grad, grad.sum(0) if ctx.gives else None

    def check(t: Any) -> None:
        assert t.model["shift"].any()

    return trace_run(
        lambda: nn.ParameterDict({"shift": nn.Parameter(torch.zeros(6)), "head": nn.Parameter(torch.randn(6, 4))}),
        optimizer=sgd_momentum, at_end=check,
        body=lambda t, x, y: t.step.backward(F.cross_entropy(Shift.apply(x, t.model["shift"]) @ t.model["head"], y)),
        then=lambda t: [t.trace.add("has a gradient", have_grads(t.run, [t.model["shift"]])), update(t)],
    )  # fmt: skip


@case
def unfrozen_in_a_steps_body() -> Result:
    """As in GANs before each pass, and for gradual unfreezing between two steps."""

    def add_other(t: Any) -> dict[str, Any]:
        other = nn.Linear(6, 4).requires_grad_(False)
        return {"other": other, "optimizer": torch.optim.Adam([*t.model.parameters(), *other.parameters()], 0.1)}

    def then(t: Any) -> None:
        t.other.requires_grad_(True)
        t.model.requires_grad_(False)
        for x, y in t.step:
            t.step.backward(F.cross_entropy(t.model(x) - t.other(x), y))
        t.model.requires_grad_(True)
        t.trace.add("gradients", read_grads(t.run, t.other.parameters()))
        update(t)

    return trace_run(
        build_mlp, optimizer=None, objects=add_other, then=then,
        before=lambda t: t.other.requires_grad_(t.step.number % 3 == 1),
        body=lambda t, x, y: t.step.backward(F.cross_entropy(t.model(x) + t.other(x), y)),
    )  # fmt: skip


# --- data, buffers, precision and compilers ---------------------------------------------------------------------------


def train_compiled(backend: str) -> Result:
    """Layers for which dynamic shapes would give kernels with other bits: the ragged micro-batch must not cause it."""

    def build() -> Any:
        norm, head = nn.BatchNorm1d(5), nn.Linear(25, 4)
        model = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 5, 2), norm, nn.GELU(), nn.Flatten(), head)
        return torch.compile(model, backend=backend)

    def check(t: Any) -> None:
        assert not any("_orig_mod" in name for name in build_state(t.run, {})["objects"]["model"])

    return train_classes(build, optimizer=adamw, at_end=check)


CASES["compiled_by_aot_eager"] = partial(train_compiled, "aot_eager")


@case
def batch_norm() -> Result:
    """All kinds: a moving average, a cumulative one, without statistics, frozen, run twice, in channels_last."""

    def build() -> nn.Module:
        model = Norms().to(memory_format=torch.channels_last)
        model.frozen.eval()
        return model

    def check(t: Any) -> None:
        # Six steps, each of which counts once.
        layers = (t.model.moving, t.model.cumulative, t.model.twice, t.model.frozen)
        assert [layer.num_batches_tracked for layer in layers] == [6, 6, 12, 0]
        assert not t.model.frozen.running_mean.any()

    return train_classes(build, at_end=check)


@case
def scores_that_change_the_model() -> Result:
    """A score may use dropout, as for an uncertainty, and gradients. The model's statistics and modes stay, and so does
    the step's own gradient.
    """

    def then(t: Any) -> None:
        def score(batch: Any) -> dict[str, Any]:
            t.model.train()
            x = batch[0].clone().requires_grad_()
            with torch.enable_grad():
                t.model(x).square().mean().backward()
            return {"slope": x.grad.norm(), "of the weights": t.model[0].weight.grad.norm()}

        before = [grad.clone() for grad in read_grads(t.run, t.model.parameters())]
        t.trace.add("scores", t.run.evaluate(score, build_pairs(29, seed=1)))
        assert [layer.training for layer in t.model] == [True, True, True, False, True]
        assert all(map(torch.equal, before, read_grads(t.run, t.model.parameters())))
        update(t)

    def build() -> nn.Module:
        norms = [nn.BatchNorm1d(8), nn.BatchNorm1d(8).eval()]
        return nn.Sequential(nn.Linear(6, 8), norms[0], nn.Dropout(0.2), norms[1], nn.Linear(8, 4))

    return trace_run(build, then=then)


@case
def parameters_of_integers() -> Result:
    """As the quantized weights of some models and the states of Keras: frozen, and held by the optimizer."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        model.register_parameter("code", nn.Parameter(torch.arange(3), requires_grad=False))
        return model

    return train_classes(build, optimizer=adamw)


@case
def fp16_with_overflows() -> Result:
    """Gradients that overflow in some micro-batches: no rank makes that step's update, and the scale is halved."""
    skipped = []

    def note(t: Any) -> None:
        missing = [grad is None for grad in read_grads(t.run, t.model.parameters())]
        assert len(set(missing)) == 1
        skipped.append(missing[0])

    def check(t: Any) -> None:
        assert any(skipped)
        assert not all(skipped)
        assert t.run._context.precision.scale == 2.0 ** (16 - sum(skipped))

    # A few samples are so large that the gradient of the weights exceeds the largest float16.
    data = build_pairs()
    data.tensors[0][::19] *= 500.0
    return train_classes(
        lambda: nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4)), optimizer=adamw, precision="fp16",
        num_epochs=4, data=data, after=note, at_end=check,
    )  # fmt: skip
