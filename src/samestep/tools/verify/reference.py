"""Computes a run's averages in a second way, for `samestep verify --gradients`.

The models compute in float64. Before the first step, a few of its samples pass through the loop's body as one batch,
and then as batches of one sample: the mean over the batch must equal the mean over the single samples. Dropout is off,
because its random numbers depend on the shape of a batch.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from samestep.data.loader import seed_all, to_device
from samestep.plan.seeds import derive
from samestep.tools.tracer import Tracer
from samestep.tools.verify.trace import read_draws
from samestep.train.step.steps import Step

NUM_PROBES = 8  # samples that are computed one by one
Row = tuple[float | None, Tensor]  # weight and gradient of a loss


class Reference(Tracer):
    """Runs in float64. Writes what a few samples contribute to a gradient, and the scores one sample at a time."""

    _probe: list[Row] | None = None

    def prepare(self, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        super().prepare(objects, modules)
        for module in modules.values():
            for part in module.modules():
                if isinstance(part, _DropoutNd):
                    part.p = 0.0
                elif isinstance(getattr(part, "dropout", None), float):
                    setattr(part, "dropout", 0.0)  # noqa: B010  # as of MultiheadAttention
                part.register_forward_pre_hook(cast_inputs, with_kwargs=True)  # the script's own tensors are float32
            module.double()

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
        names = [name for name, value in result.items() if isinstance(value, float)]
        self.write({"evaluate": {name: [result[name], again[name], single[name]] for name in names}})
        return result

    def forward(self, step: Step, batch: Any) -> Any:
        return cast(batch)

    def backward(self, step: Step, loss: Tensor, weight: float | Tensor | None, model: nn.Module | None) -> None:
        if self._probe is None:
            return
        own = None if model is None else {id(param) for param in model.parameters()}
        params = [p for p in self.loop.gradients.plan.params if p.requires_grad and (own is None or id(p) in own)]
        grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True, materialize_grads=True)
        flat = torch.cat([grad.flatten() for grad in grads])
        self._probe.append((None if weight is None else float(weight), flat))

    def probe(self, step: Step) -> Iterator[Any]:
        if step.number or step.num_passes:
            return
        plan = self.loop.data.plan
        spans = plan.micro_batches(step.number)
        indices = [int(i) for span in spans for i in plan.indices(span)][:NUM_PROBES]
        modules = {id(part): part for module in self.modules.values() for part in module.modules()}.values()
        norms = [part for part in modules if isinstance(part, _BatchNorm) and part.training]
        buffers = [buffer for part in modules for buffer in part.buffers(recurse=False)]
        kept = [buffer.clone() for buffer in buffers]
        for part in norms:
            part.training = False
        results = []
        has_drawn = False
        for batch in self._load_probes(indices, step.number):
            seed_all(derive(self.context.config.seed, "compute", step=step.number))
            self._probe = []
            before = read_draws()
            yield batch
            results.append(self._probe)
            has_drawn |= read_draws() != before
        self._probe = None
        for part in norms:
            part.training = True
        with torch.no_grad():
            for buffer, old in zip(buffers, kept, strict=True):
                buffer.copy_(old)
        if all(len(result) == 1 for result in results):
            self.write({"probe": summarize([result[0] for result in results]) | {"has_drawn": has_drawn}})

    def _load_probes(self, indices: list[int], step: int) -> Iterator[Any]:
        """Return the samples as one batch, then each as a batch."""
        spec = self.loop.data.spec
        seed = derive(self.context.config.seed, "data", step=step)
        seed_all(seed)
        many = getattr(spec.dataset, "__getitems__", None)
        samples = [spec.dataset[i] for i in indices] if many is None else many(indices)
        for chosen in (samples, *([sample] for sample in samples)):
            seed_all(seed)
            yield cast(to_device(spec.collate_fn(chosen), self.context.device))


def summarize(rows: list[Row]) -> dict[str, Any]:
    """Compare the gradient of a batch with the weighted mean of the gradients of its samples.

    Args:
        rows: weight (None: the number of samples) and gradient, of the batch and then of each sample.

    Returns:
        `error`: the norm of the difference. `weight`, `weights`: of the batch and of each sample. `shares`: the
        coefficients of the samples' gradients in the batch's, by least squares; `rest`: the norm of the remainder. Both
        norms are relative to that of the batch's gradient.
    """
    (weight, gradient), *singles = rows
    weights = [1.0 if own is None else own for own, _ in singles]
    weight = float(len(singles)) if weight is None else weight
    matrix = torch.stack([own for _, own in singles]).double().cpu()
    gradient = gradient.double().cpu()
    size = max(float(gradient.norm()), 1e-300)
    mean = torch.tensor(weights, dtype=torch.float64) @ matrix / (sum(weights) or 1.0)
    shares = torch.linalg.lstsq(matrix.T, gradient.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    return {
        "error": float((gradient - mean).norm()) / size,
        "weight": weight,
        "weights": weights,
        "shares": shares.tolist(),
        "rest": float((matrix.T @ shares - gradient).norm()) / size,
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
