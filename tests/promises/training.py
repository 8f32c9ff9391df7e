"""Training functions about everything but gradients: data, buffers, precision, schedules, compilers."""

from typing import Any

import torch
from promises.loops import Result, adamw, case, read_grads, trace_run, train_classes
from promises.models import Norms, build_pairs
from support.states import build_state
from support.tiny import update
from torch import nn


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
