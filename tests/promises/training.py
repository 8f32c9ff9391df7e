"""Training functions about everything but gradients: data, buffers, precision, schedules, compilers."""

from typing import Any

import torch
import torch.nn.functional as F
from promises.loops import Result, adamw, case, read_grads, trace_run, train_classes
from promises.models import Augmented, Buffers, Norms, Sentences, Tagger, build_pairs, pad
from support.states import build_state
from support.tiny import learn, update
from torch import Tensor, nn


@case
def token_weights() -> Result:
    """Means over words, of which a micro-batch may have none."""

    def body(t: Any, words: Tensor) -> None:
        loss = F.cross_entropy(t.model(words), words.flatten(), ignore_index=0)
        t.step.backward(loss, weight=(words != 0).sum())

    def validate(t: Any) -> None:
        def score(words: Tensor) -> dict[str, Any]:
            return {"loss": (F.cross_entropy(t.model(words), words.flatten(), ignore_index=0), (words != 0).sum())}

        # Sentences 0, 5, 10 ... have no word, and with micro-batches of 1 their loss is not a number.
        t.trace.add("scores", t.run.evaluate(score, Sentences(29), collate_fn=pad, micro_batch_size=1))

    return trace_run(
        Tagger, optimizer=adamw, data=Sentences(), collate_fn=pad, num_workers=1, body=body, after_epoch=validate,
        then=lambda t: [t.run.clip_grad_norm_(t.model.parameters(), 1.0), update(t)],
    )  # fmt: skip


def train_compiled(backend: str) -> Result:
    """Layers for which dynamic shapes would give kernels with other bits: the ragged micro-batch must not cause it."""

    def build() -> Any:
        norm, head = nn.BatchNorm1d(5), nn.Linear(25, 4)
        model = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 5, 2), norm, nn.GELU(), nn.Flatten(), head)
        return torch.compile(model, backend=backend)

    def check(t: Any) -> None:
        assert not any("_orig_mod" in name for name in build_state(t.run, {})["objects"]["model"])

    return train_classes(build, optimizer=adamw, at_end=check)


@case
def compiled_by_aot_eager() -> Result:
    return train_compiled("aot_eager")


def compiled_by_inductor() -> Result:
    return train_compiled("inductor")


def compiled_for_many_lengths() -> Result:
    """More lengths than torch compiles kernels for by default: others would then run without compilation."""
    generator = torch.Generator().manual_seed(0)
    return trace_run(
        lambda: torch.compile(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))),
        data=[torch.randn(1 + i % 12, 16, generator=generator) for i in range(24)], body=learn, num_epochs=1,
        batch_size=12, micro_batch_size=1,
    )  # fmt: skip


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
def training_mode_set_in_the_loop() -> Result:
    """Each epoch ends in eval mode, and each micro-batch sets training mode, on the ranks that have one."""

    def check(t: Any) -> None:
        assert t.model[1].num_batches_tracked == t.step.number + 1

    return train_classes(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4)), num_epochs=3,
        forward=lambda t, x: t.model.train(torch.is_grad_enabled())(x), at_end=check,
    )  # fmt: skip


@case
def scores_by_gradients() -> Result:
    """The backward of a score does not change the step's own gradient."""

    def then(t: Any) -> None:
        def score(batch: Any) -> dict[str, Any]:
            x = batch[0].clone().requires_grad_()
            with torch.enable_grad():
                t.model(x).square().mean().backward()
            return {"slope": x.grad.norm(), "of the weights": t.model[0].weight.grad.norm()}

        before = [grad.clone() for grad in read_grads(t.run, t.model.parameters())]
        t.trace.add("scores", t.run.evaluate(score, build_pairs(29, seed=1)))
        assert all(map(torch.equal, before, read_grads(t.run, t.model.parameters())))
        update(t)

    return trace_run(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), then=then)


@case
def scores_in_training_mode() -> Result:
    """As for an uncertainty from dropout: the statistics stay, and so does the mode of each layer."""

    def build() -> nn.Module:
        norms = [nn.BatchNorm1d(8), nn.BatchNorm1d(8).eval()]
        return nn.Sequential(nn.Linear(6, 8), norms[0], nn.Dropout(0.2), norms[1], nn.Linear(8, 4))

    def validate(t: Any) -> None:
        def score(batch: Any) -> dict[str, Any]:
            assert not t.model.training
            t.model.train()
            return {"mean": t.model(batch[0]).mean()}

        t.trace.add("scores", t.run.evaluate(score, build_pairs(6, seed=1)))
        assert [layer.training for layer in t.model] == [True, True, True, False, True]
        assert t.model[1].num_batches_tracked == t.step.number + 1
        t.trace.add("digest", t.trace.digest())

    return trace_run(build, after_epoch=validate)


@case
def other_buffers() -> Result:
    """Buffers that a forward writes in place, replaces or draws. A step averages them."""
    seen: list[Tensor] = []

    def remember(t: Any) -> None:
        seen[:] = [t.model.mean.clone()]

    def forward(t: Any, x: Tensor) -> Tensor:
        seen.append(x)
        return t.model(x)

    def compare(t: Any) -> None:
        assert t.model.count == t.step.number + 1
        if t.run.world_size == 1:
            means = torch.stack([x.mean(0) for x in seen[1:]])
            torch.testing.assert_close(t.model.mean, 0.9 * seen[0] + 0.1 * means.mean(0))

    return train_classes(Buffers, forward=forward, before=remember, after=compare)


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


def train_augmented(num_workers: int) -> Result:
    return train_classes(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 4)), optimizer=adamw, data=Augmented(),
        num_workers=num_workers,
    )  # fmt: skip


def augmentation() -> Result:
    return train_augmented(0)


def augmentation_in_workers() -> Result:
    return train_augmented(2)
