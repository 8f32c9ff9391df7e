"""Computes a run's averages in a second way, for `samestep verify --gradients`.

The models compute in float64. Before the first step, a few of its samples pass through the loop's body as one batch,
and then as batches of one sample: the mean over the batch must equal the weighted mean over the single samples.
Meanwhile modules are in evaluation mode, because dropout and batch statistics depend on the shape of a batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.loader import seed_all, to_device
from samestep.plan.seeds import derive
from samestep.tools.tracer import Tracer
from samestep.tools.verify.trace import read_draws
from samestep.train.step.steps import Step

NUM_PROBES = 8  # samples that are computed one by one
TOLERANCE = 1e-6  # between sums in float64
Row = tuple[float | None, Tensor]  # weight and gradient of a loss


class Averages(Tracer):
    """Runs in float64. Writes lines with a "fault" or a "note" about the loss of a few samples, and about scores."""

    _rows: list[Row] | None = None  # of a batch of the probe

    def prepare(self, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        super().prepare(objects, modules)
        for module in modules.values():
            module.double()
            for part in module.modules():
                part.register_forward_pre_hook(cast_inputs, with_kwargs=True)  # the script's own tensors are float32

    def evaluate(
        self,
        evaluate: Callable[..., dict[str, Any]],
        score: Callable[[Any], Mapping[str, Any]],
        data: Any,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Score in micro-batches of the given size, twice in the same way, and then in micro-batches of one sample."""

        def cast_and_score(batch: Any) -> Mapping[str, Any]:
            return score(cast(batch))

        result = evaluate(cast_and_score, data, **arguments)
        again = evaluate(cast_and_score, data, **arguments)
        single = evaluate(cast_and_score, data, **arguments | {"micro_batch_size": 1})
        for name, value in result.items():
            if isinstance(value, float):
                self.write(judge_score(name, value, again[name], single[name]))
        return result

    def forward(self, step: Step, batch: Any) -> Any:
        return cast(batch)

    def backward(self, step: Step, loss: Tensor, weight: float | Tensor | None, model: nn.Module | None) -> None:
        if self._rows is None:
            return
        own = None if model is None else {id(param) for param in model.parameters()}
        params = [p for p in self.loop.gradients.plan.params if p.requires_grad and (own is None or id(p) in own)]
        grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True, materialize_grads=True)
        flat = torch.cat([grad.flatten() for grad in grads])
        self._rows.append((None if weight is None else float(weight), flat))

    def probe(self, step: Step) -> Iterator[Any]:
        if step.number or step.num_passes:
            return
        parts = {part: part.training for module in self.modules.values() for part in module.modules()}
        for part in parts:
            part.training = False
        results = []
        has_drawn = False
        for batch in self._load_probes(step.number):
            seed_all(derive(self.context.config.seed, "compute", step=step.number))
            self._rows = []
            before = read_draws()
            yield batch
            results.append(self._rows)
            has_drawn |= read_draws() != before
        self._rows = None
        for part, was_training in parts.items():
            part.training = was_training
        if all(len(result) == 1 for result in results):
            self.write(judge_loss([result[0] for result in results], has_drawn))

    def _load_probes(self, step: int) -> Iterator[Any]:
        """Return a few samples of the step as one batch, then each as a batch."""
        plan = self.loop.data.plan
        indices = [int(i) for span in plan.micro_batches(step) for i in plan.indices(span)][:NUM_PROBES]
        spec = self.loop.data.spec
        seed = derive(self.context.config.seed, "data", step=step)
        seed_all(seed)
        many = getattr(spec.dataset, "__getitems__", None)
        samples = [spec.dataset[i] for i in indices] if many is None else many(indices)
        for chosen in (samples, *([sample] for sample in samples)):
            seed_all(seed)
            yield cast(to_device(spec.collate_fn(chosen), self.context.device))


def judge_loss(rows: Sequence[Row], has_drawn: bool) -> dict[str, str]:
    """Compare the gradient of a batch with the weighted mean of the gradients of its samples.

    The shares of the samples in the gradient of the batch are their coefficients by least squares. If a remainder is
    left, the samples are mixed, and there is no share.

    Args:
        rows: weight (None: the number of samples) and gradient, of the batch and then of each sample.
        has_drawn: the script's body drew random numbers, so that a sample has other values each time.
    """
    (weight, gradient), *singles = rows
    weights = [1.0 if own is None else own for own, _ in singles]
    weight = float(len(singles)) if weight is None else weight
    total = sum(weights)
    count = len(singles)
    if abs(weight - total) > TOLERANCE * max(weight, 1.0) and not has_drawn:
        return {
            "fault": f"step.backward got weight {weight:g} for {count} samples together, and weights that add up to "
            f"{total:g} for them one by one: pass the number of items that the loss averages (samples, or tokens "
            "without padding)"
        }
    matrix = torch.stack([own for _, own in singles]).double().cpu().T
    gradient = gradient.double().cpu()
    tolerance = TOLERANCE * float(gradient.norm())
    given = torch.tensor(weights, dtype=torch.float64) / (total or 1.0)
    if float((gradient - matrix @ given).norm()) <= tolerance:
        return {"note": f"the loss of {count} samples is the weighted mean of their {count} losses"}
    shares = torch.linalg.lstsq(matrix, gradient.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    if has_drawn or float((matrix @ shares - gradient).norm()) > tolerance:
        why = "draws random numbers" if has_drawn else "mixes the samples of a micro-batch"
        return {"note": f"whether the loss is a mean was not checked: the model, or the loss, {why}"}
    found, wanted = (", ".join(f"{float(share):.3g}" for share in each) for each in (shares, given))
    return {
        "fault": f"wrong weights: in the loss of {count} samples together they count {found}, but by weight= they "
        f"would count {wanted}: pass a mean to step.backward, and the number of items that it averages as weight="
    }


def judge_score(name: str, score: float, again: float, single: float) -> dict[str, str]:
    """Compare a score with the one of a second evaluation, and with that of one sample at a time."""
    tolerance = TOLERANCE * max(abs(score), abs(single), 1e-12)
    if abs(score - again) > tolerance:
        return {"note": f"score {name!r} of run.evaluate draws random numbers: its average was not checked"}
    if abs(score - single) <= tolerance:
        return {"note": f"score {name!r} of run.evaluate is the same one sample at a time"}
    return {
        "fault": f"score {name!r} of run.evaluate depends on the micro-batch size ({score:.6g}, and {single:.6g} one "
        "sample at a time): it counts padding, or does not average over samples; return (mean, number of items that "
        "it averages)"
    }


def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
    """Convert a module's inputs to float64. A forward pre-hook."""
    return cast(args), cast(kwargs)


def cast(value: Any) -> Any:
    """Return a batch with its floating-point tensors in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(cast, value))
    if isinstance(value, list | tuple):
        return type(value)(map(cast, value))
    if isinstance(value, dict):
        return {key: cast(item) for key, item in value.items()}
    return value
