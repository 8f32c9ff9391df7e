"""Computes a run's averages in a second way, for `samestep verify --gradients`.

With `"dtype": "float64"`, the models compute in float64, and the trace contains the first step's gradient as
autograd computes it, summed by weight without the reducer. Before that step, a few of its samples pass through the
loop's body as one batch, and then as batches of one sample: the mean over the batch must equal the mean over the single
samples. With "float32", the trace contains the gradient that the ranks have reduced. Dropout is off in both cases,
because its random numbers depend on the dtype.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from samestep.data.loader import seed_all, to_device
from samestep.files import open_regular
from samestep.plan.seeds import derive
from samestep.snapshot.serialization import write_tensors
from samestep.tools.verify.trace import Trace, read_draws
from samestep.train.context import RunContext
from samestep.train.step.steps import Step

NUM_PROBES = 8  # samples that are computed one by one
Grads = list[Tensor | None]


class Reference(Trace):
    """A trace of a run in float64, or in float32. It computes the average of the first step in a second way."""

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self._is_double = options["dtype"] == "float64"
        self._probe: list[tuple[float, float | None, Tensor]] | None = None  # loss, weight, gradient
        self._sum: list[Tensor] = []
        self._weight = 0.0
        self._draws = False
        self._drawn: dict[str, str] = {}

    def prepare(self, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        super().prepare(objects, modules)
        for module in modules.values():
            for part in module.modules():
                if isinstance(part, _DropoutNd):
                    part.p = 0.0
                elif isinstance(getattr(part, "dropout", None), float):
                    setattr(part, "dropout", 0.0)  # noqa: B010  # as of MultiheadAttention
                if self._is_double:  # what the script draws or makes itself is float32
                    part.register_forward_pre_hook(cast_inputs, with_kwargs=True)
            if self._is_double:
                module.double()

    def evaluate(
        self,
        evaluate: Callable[..., dict[str, Any]],
        score: Callable[[Any], Mapping[str, Any]],
        data: Any,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Score in micro-batches of the given size, twice in the same way, and then in micro-batches of one sample."""
        if not self._is_double:
            return evaluate(score, data, **arguments)

        def cast_and_score(batch: Any) -> Mapping[str, Any]:
            return score(cast(batch))

        result = evaluate(cast_and_score, data, **arguments)
        if self.context.world_size == 1:
            again = evaluate(cast_and_score, data, **arguments)
            single = evaluate(cast_and_score, data, **arguments | {"micro_batch_size": 1})
            names = [name for name, value in result.items() if isinstance(value, float)]
            self.write({"evaluate": {name: [result[name], again[name], single[name]] for name in names}})
        return result

    def begin_step(self, step: Step) -> None:
        super().begin_step(step)
        self._params = self.loop.gradients.plan.params

    def forward(self, step: Step, batch: Any) -> Any:
        batch = super().forward(step, batch)
        self._drawn = read_draws()
        return cast(batch) if self._is_double else batch

    def end_micro_batch(self, step: Step) -> None:
        super().end_micro_batch(step)
        self._draws |= read_draws() != self._drawn

    def backward(self, step: Step, loss: Tensor, weight: float | Tensor | None, model: nn.Module | None) -> None:
        super().backward(step, loss, weight, model)
        if self._probe is not None:
            number = None if weight is None else float(weight)
            flat = [g.flatten() for g in self._differentiate(loss, model) if g is not None]
            self._probe.append((float(loss.detach()), number, torch.cat(flat)))
        elif self._is_double and step.number == 0 and step.num_passes == 0:
            share = float(step.sizes[step.micro_batch] if weight is None else weight)
            if share:
                self._add(share, self._differentiate(loss, model))

    def reduced(self, step: Step) -> None:
        super().reduced(step)
        if self.context.rank == 0 and step.number == 0 and step.num_passes == 1:
            self._write_gradients()

    def _differentiate(self, loss: Tensor, model: nn.Module | None) -> Grads:
        """Return the loss's gradient for each parameter; None for those of other models, zeros for unused ones."""
        own = None if model is None else {id(param) for param in model.parameters()}
        wanted = [param.requires_grad and (own is None or id(param) in own) for param in self._params]
        params = [param for param, is_wanted in zip(self._params, wanted, strict=True) if is_wanted]
        grads = iter(torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True, materialize_grads=True))
        return [next(grads) if is_wanted else None for is_wanted in wanted]

    def _add(self, weight: float, grads: Grads) -> None:
        weighted = [torch.zeros_like(p) if g is None else weight * g for p, g in zip(self._params, grads, strict=True)]
        self._sum = [a + b for a, b in zip(self._sum, weighted, strict=True)] if self._sum else weighted
        self._weight += weight

    def _write_gradients(self) -> None:
        plan = self.loop.gradients.plan
        gradients = {}
        for i, (name, param) in enumerate(zip(plan.names, self._params, strict=True)):
            if self._is_double:
                gradients[name] = self._sum[i] / self._weight if self._sum else torch.zeros(())
            elif param.grad is not None:
                gradients[name] = param.grad
        with open(self.directory / "gradients.safetensors", "wb", opener=open_regular) as file:
            write_tensors(file, {name: torch.as_tensor(gradient).clone() for name, gradient in gradients.items()})
        self.write({"draws": self._draws})

    # --- a few samples, together and one by one ---------------------------------------------------------------

    def probe(self, step: Step) -> Iterator[Any]:
        if not self._is_double or step.number or step.num_passes:
            return
        plan = self.loop.data.plan
        spans = plan.micro_batches(step.number)
        indices = [int(i) for span in spans for i in plan.indices(step.number, span)][:NUM_PROBES]
        modules = {id(part): part for module in self.modules.values() for part in module.modules()}.values()
        norms = [part for part in modules if isinstance(part, _BatchNorm) and part.training]
        buffers = [buffer for part in modules for buffer in part.buffers(recurse=False)]
        kept = [buffer.clone() for buffer in buffers]
        for part in norms:
            part.training = False
        results = []
        for batch in self._load_probes(indices, step.number):
            seed_all(derive(self.context.config.seed, "compute", step=step.number))
            self._probe = []
            before = read_draws()
            yield batch
            results.append(self._probe)
            self._draws |= read_draws() != before
        self._probe = None
        for part in norms:
            part.training = True
        with torch.no_grad():
            for buffer, old in zip(buffers, kept, strict=True):
                buffer.copy_(old)
        if all(len(result) == 1 for result in results):
            self.write({"probe": summarize([result[0] for result in results]) | {"draws": self._draws}})

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


def summarize(rows: list[tuple[float, float | None, Tensor]]) -> dict[str, Any]:
    """Compare the gradient of a batch with the weighted mean of the gradients of its samples.

    Args:
        rows: loss, weight (None: the number of samples) and gradient, of the batch and then of each sample.

    Returns:
        `error`: the norm of the difference. `weight`, `weights`: of the batch and of each sample. `shares`: the
        coefficients of the samples' gradients in the batch's, by least squares; `rest`: the norm of the remainder. Both
        norms are relative to that of the batch's gradient.
    """
    (_, weight, gradient), *singles = rows
    weights = [1.0 if own is None else own for _, own, _ in singles]
    weight = float(len(singles)) if weight is None else weight
    matrix = torch.stack([own for _, _, own in singles]).double().cpu()
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
