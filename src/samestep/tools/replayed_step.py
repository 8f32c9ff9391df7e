"""Replays the steps of a run for `samestep replay`, and describes the requested step or micro-batch.

Rank 0 writes a line per step with its bits. The last line, written by rank 0 or by the rank that has the micro-batch,
describes the requested step or micro-batch. Then all ranks end.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from samestep.data.loader import seed_all
from samestep.errors import Error
from samestep.hashing import find_leaves
from samestep.plan.ledger import combine, fingerprint, to_bits
from samestep.plan.order import derive
from samestep.processes import leave
from samestep.snapshot.async_copy import is_finite
from samestep.tools.tracer import Tracer
from samestep.train.context import RunContext
from samestep.train.determinism import describe_machine
from samestep.train.opening import describe_script, read_commit
from samestep.train.step import Step

MAX_NORMS = 1000  # parameters in the result


class Replay(Tracer):
    """Ends the run after a step, or after one micro-batch of it without computing the others.

    Options: `step`; `micro_batch`, or None for the whole step.
    """

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self._step = options["step"]
        self._micro_batch = options["micro_batch"]
        self._is_alone = False  # the script's body runs for one micro-batch, without the other ranks
        self._result: dict[str, Any] = {}
        self._logged: dict[str, Any] = {}
        self._losses: dict[int, list[float]] = {}  # of each micro-batch that this rank computes in the step
        self._grads: list[Tensor | None] = []

    def reduced(self, step: Step) -> None:
        if step.number == self._step:
            self._grads = [param.grad for param in self.loop.gradients.plan.params]
            self._result |= {"loss": step.result.loss, **self._measure()}

    def end_step(self, step: Step) -> None:
        """Write the step's bits. After the requested step, end this process."""
        if self.context.rank == 0:
            loss = float("nan") if step.result.loss is None else step.result.loss
            bits = {"loss": to_bits(loss), "gradient": step.result.gradient_checksum}
            samples = {"num_samples": step.num_samples, "fingerprint": step.result.fingerprint}
            self.write({"step": step.number, **samples, **bits})
        if step.number == self._step:
            plan = self.loop.data.plan
            indices = [plan.indices(span).tolist() for span in plan.micro_batches(step.number)]
            self._finish(step, {**self._result, "samples": indices})

    def _finish(self, step: Step, result: dict[str, Any]) -> NoReturn:
        computed = dict(pair for theirs in self.context.group.gather([*self._losses.items()]) for pair in theirs)
        if self._is_alone or (self._micro_batch is None and self.context.rank == 0):
            machine = describe_machine(self.context.config, self.context.device)
            about = {"machine": machine, "git": read_commit(), "script": describe_script()}
            losses = [computed.get(v, []) for v in range(len(step.sizes))]
            result = {"epoch": step.epoch, "sizes": step.sizes, "losses": losses, **result}
            self.write({"result": result, "about": about})
        self.context.group.gather_number(0)  # a rank that ends earlier would count as lost
        leave(0)

    # --- one micro-batch --------------------------------------------------------------------------------------

    def probe(self, step: Step) -> Iterator[Any]:
        """Return the requested micro-batch for the script. `backward` and `log` then receive its results."""
        v = self._micro_batch
        if step.number != self._step or v is None:
            return
        if v >= len(step.sizes):
            raise Error(
                f"step {step.number} has {len(step.sizes)} micro-batches, 0 to {len(step.sizes) - 1}, not {v}",
                code="SS709",
            )
        step.held = self.context.build_layout(len(step.sizes)).ranges[self.context.rank]
        if v in step.held:
            batch = step.load_up_to(v)
            self._is_alone = True
            plan = self.loop.data.plan
            indices = [plan.indices(span) for span in plan.micro_batches(step.number)]
            prints = [*map(fingerprint, indices[:v]), step.loaded_fingerprint, *map(fingerprint, indices[v + 1 :])]
            self._result = {"samples": [indices[v].tolist()], "losses": [], "weights": []}
            self._result |= {"num_samples": step.num_samples, "fingerprint": combine(prints)}
            self._grads = [None] * len(self.loop.gradients.plan.params)
            search = _NonFinite(self.modules)
            seed_all(derive(self.context.config.seed, "compute", step=step.number, pass_=0, micro_batch=v))
            yield batch
            search.close()
            if not (search.has_forward or all(map(math.isfinite, self._result["losses"]))):
                search.found.insert(0, "the loss is not finite, but all modules' outputs are: it arises after them")
            self._result |= {"not_finite": search.found, "logged": _to_json(self._logged), **self._measure()}
        self._finish(step, self._result)

    def backward(self, step: Step, loss: Tensor, weight: float | Tensor | None, model: nn.Module | None) -> None:
        """Note the losses. Alone, compute the gradient of the mean over this micro-batch only, without loss scaling."""
        if not self._is_alone:
            if step.number == self._step:
                self._losses.setdefault(step.micro_batch, []).append(float(loss.detach()))
            return
        params = [param for param in self.loop.gradients.plan.params if param.requires_grad]
        found = iter(torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True))
        for i, param in enumerate(self.loop.gradients.plan.params):
            grad = next(found) if param.requires_grad else None
            if grad is not None:
                before = self._grads[i]
                self._grads[i] = grad if before is None else before + grad
        self._result["losses"].append(float(loss.detach()))
        self._result["weights"].append(float(step.sizes[step.micro_batch] if weight is None else weight))

    def log(self, step: Step, values: Mapping[str, Any]) -> None:
        if self._is_alone:
            self._logged.update(values)

    def _measure(self) -> dict[str, Any]:
        """Return the norm of the gradient, and its norms by parameter, the largest first."""
        grads = zip(self.loop.gradients.plan.names, self._grads, strict=True)
        norms = {name: float(grad.detach().double().norm()) for name, grad in grads if grad is not None}
        ordered = sorted(norms, key=lambda name: (norms[name] <= sys.float_info.max, -norms[name]))
        total = float(np.linalg.norm([*norms.values()])) if norms else 0.0
        return {"norm": total, "norms": {name: norms[name] for name in ordered[:MAX_NORMS]}}


class _NonFinite:
    """Finds the first modules whose values are not finite, in the forward and in the backward pass.

    Attributes:
        found: what was found, in sentences.
        has_forward: whether the output of a module was not finite.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.found = [
            f"the weights of {name}.{path} are not finite"
            for name, module in modules.items()
            for path, param in module.named_parameters()
            if not is_finite(param)
        ]
        self.has_forward = self._has_backward = False
        self._hooks = [
            layer.register_forward_hook(partial(self._look, f"{name}.{path}".rstrip(".")))
            for name, module in modules.items()
            for path, layer in module.named_modules()
        ]

    def _look(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        label = f"{name} ({type(module).__name__})"
        tensors = _find_tensors(output)
        if not self.has_forward and not all(map(is_finite, tensors)):
            self.has_forward = True
            given = "finite" if all(map(is_finite, _find_tensors(inputs))) else "not finite either"
            self.found.append(f"the output of {label} is the first that is not finite; its inputs are {given}")
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._look_back, label))

    def _look_back(self, label: str, grad: Tensor) -> None:
        if not self._has_backward and not is_finite(grad):
            self._has_backward = True
            self.found.append(f"in the backward, the gradient of the output of {label} is the first that is not finite")

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _find_tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in find_leaves(value) if isinstance(leaf, Tensor)]


def _to_json(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.as_tensor(value).detach().double().cpu().tolist() for name, value in values.items()}
