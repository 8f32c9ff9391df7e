"""The interceptors of tools that train a script to look at it: of `scale`, `replay` and `verify`. All write traces.

Each rank writes `rank-R.jsonl`, which the tool reads when the script has ended.
"""

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from samestep.data.loader import seed_all
from samestep.errors import Error, UsageError
from samestep.files import open_regular
from samestep.hashing import find_leaves, hash_bytes, hash_content, hash_short, view_bytes
from samestep.plan.ledger import combine, to_bits
from samestep.plan.order import derive
from samestep.processes import leave
from samestep.snapshot.async_copy import is_finite
from samestep.snapshot.serialization import digest_of, encode
from samestep.torch_internals import gather_whole
from samestep.train.context import RunContext
from samestep.train.determinism import NUMPY_GENERATOR, PYTHON_GENERATOR, describe_machine, read_generator
from samestep.train.interception import Interceptor, LoopParts
from samestep.train.opening import read_commit
from samestep.train.step import Step
from samestep.world.group import describe_script

OUTSIDE = ("saving", "validating")  # phases that are not part of a step
MAX_NORMS = 1000  # parameters in the result of a replay


class Tracer(Interceptor):
    """Writes lines about one run on one rank.

    Args:
        options: `dir`, and the options of a subclass.
    """

    is_trial = True

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self._file = open(Path(options["dir"], f"rank-{context.rank}.jsonl"), "a", opener=open_regular)  # noqa: SIM115
        self.modules: Mapping[str, nn.Module] = {}

    def prepare(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules

    def begin_loop(self, loop: LoopParts) -> None:
        self.loop = loop

    def write(self, line: dict[str, Any]) -> None:
        """Append a line. Raises Error if it cannot be written."""
        try:
            print(json.dumps(line), file=self._file, flush=True)
        except OSError as error:
            raise Error(
                f"{self._file.name} cannot be written ({error.strerror}): make room there, or set TMPDIR to another "
                "directory",
                code="SS113",
            ) from None


# --- scale ------------------------------------------------------------------------------------------------------------


class ScaleTiming(Tracer):
    """Measures the steps and the tensors.

    Writes a line about the run, one per step, and one about the tensors after the first step of one rank. Workers have
    states that `shard` cannot divide.
    """

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self._written = -1  # the last step with a line
        self.write(
            {
                "world_size": context.world_size,
                "batch_size": context.config.batch_size,
                "micro_batch_size": context.config.micro_batch_size,
                "workers": context.config.workers,
            }
        )

    def end_body(self, step: Step) -> None:
        if step.number == self._written:  # an interrupted epoch ends once more
            return
        is_first = self._written < 0
        self._written = step.number
        spent_s = self.loop.clock.spent_s()
        at_s = time.monotonic() - sum(spent_s.get(phase, 0.0) for phase in OUTSIDE)
        self.write({"step": step.number, "at_s": at_s})
        if is_first and self.context.world_size == 1 and self.context.config.workers is None:
            self.write({"memory": [astuple(each) for each in self.loop.measure_sizes()]})


# --- replay -----------------------------------------------------------------------------------------------------------


class Replay(Tracer):
    """Replays the steps of a run, describes one, and ends the run after it, or after one micro-batch of it alone.

    Rank 0 writes a line per step with its bits. The last line, written by rank 0 or by the rank that has the
    micro-batch, describes the requested step or micro-batch. Then all ranks end.
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
        self._grads: dict[str, Tensor] = {}  # by the name of the parameter

    def reduced(self, step: Step) -> None:
        if step.number == self._step:
            plan = self.loop.gradients.plan
            self._grads = {
                name: param.grad for name, param in zip(plan.names, plan.params, strict=True) if param.grad is not None
            }
            self._result |= {"loss": step.result.loss, **self._measure()}

    def end_step(self, step: Step) -> None:
        """Write the step's bits. After the requested step, end this process."""
        if self.context.rank == 0:
            loss = float("nan") if step.result.loss is None else step.result.loss
            self.write(
                {
                    "step": step.number,
                    "num_samples": step.num_samples,
                    "fingerprint": combine(step.result.fingerprints),
                    "loss": to_bits(loss),
                    "gradient": step.result.gradient_checksum,
                }
            )
        if step.number == self._step:
            plan = self.loop.data.plan
            indices = [plan.indices(span).tolist() for span in plan.micro_batches(step.number)]
            self._finish(step, {**self._result, "samples": indices})

    def _finish(self, step: Step, result: dict[str, Any]) -> NoReturn:
        computed = dict(pair for theirs in self.context.group.gather([*self._losses.items()]) for pair in theirs)
        if self._is_alone or (self._micro_batch is None and self.context.rank == 0):
            machine = describe_machine(self.context.config, self.context.device)
            losses = [computed.get(v, []) for v in range(len(step.sizes))]
            self.write(
                {
                    "result": {"epoch": step.epoch, "sizes": step.sizes, "losses": losses, **result},
                    "about": {"machine": machine, "git": read_commit(), "script": describe_script()},
                }
            )
        self.context.group.gather_number(0)  # a rank that ends earlier would count as lost
        leave(0)

    def probe(self, step: Step) -> Iterator[Any]:
        """Return the requested micro-batch for the script. `backward` and `log` then receive its results."""
        v = self._micro_batch
        if step.number != self._step or v is None:
            return
        if self.context.config.workers is not None:
            raise UsageError(
                "replay --micro-batch does not support workers, whose micro-batches depend on the ones before: replay "
                "the step",
                code="SS615",
            )
        if v >= len(step.sizes):
            raise Error(
                f"step {step.number} has {len(step.sizes)} micro-batches, 0 to {len(step.sizes) - 1}, not {v}",
                code="SS709",
            )
        step.held = self.context.divide_step(len(step.sizes)).ranges[self.context.rank]
        if v in step.held:
            batch = step.load_up_to(v)
            self._is_alone = True
            plan = self.loop.data.plan
            indices = [plan.indices(span) for span in plan.micro_batches(step.number)]
            prints = [hash_short(each.data) for each in indices]
            prints[v] = step.loaded_fingerprint
            self._result = {
                "samples": [indices[v].tolist()],
                "losses": [],
                "weights": [],
                "num_samples": step.num_samples,
                "fingerprint": combine(prints),
            }
            search = _NonFinite(self.modules)
            seed_all(derive(self.context.config.seed, "compute", step=step.number, pass_=0, micro_batch=v))
            yield batch
            if not (search.has_forward or all(map(math.isfinite, self._result["losses"]))):
                search.found.insert(0, "the loss is not finite, but all modules' outputs are: it arises after them")
            logged = {
                name: torch.as_tensor(each).detach().double().cpu().tolist() for name, each in self._logged.items()
            }
            self._result |= {"not_finite": search.found, "logged": logged, **self._measure()}
        self._finish(step, self._result)

    def backward(self, step: Step, loss: Tensor, weight: float | Tensor | None, model: nn.Module | None) -> None:
        """Note the losses. Alone, compute the gradient of the mean over this micro-batch only, without loss scaling."""
        if not self._is_alone:
            if step.number == self._step:
                self._losses.setdefault(step.micro_batch, []).append(float(loss.detach()))
            return
        plan = self.loop.gradients.plan
        params = {name: param for name, param in zip(plan.names, plan.params, strict=True) if param.requires_grad}
        found = torch.autograd.grad(loss, [*params.values()], retain_graph=True, allow_unused=True)
        for name, grad in zip(params, found, strict=True):
            if grad is not None:
                self._grads[name] = self._grads[name] + grad if name in self._grads else grad
        self._result["losses"].append(float(loss.detach()))
        self._result["weights"].append(float(step.sizes[step.micro_batch] if weight is None else weight))

    def log(self, step: Step, values: Mapping[str, Any]) -> None:
        if self._is_alone:
            self._logged.update(values)

    def _measure(self) -> dict[str, Any]:
        """Return the norm of the gradient, and its norms by parameter, the largest first."""
        norms = {
            name: float(self._grads[name].detach().double().norm())
            for name in self.loop.gradients.plan.names
            if name in self._grads
        }
        ordered = sorted(norms, key=lambda name: (norms[name] <= sys.float_info.max, -norms[name]))
        total = float(np.linalg.norm([*norms.values()])) if norms else 0.0
        return {"norm": total, "norms": {name: norms[name] for name in ordered[:MAX_NORMS]}}


class _NonFinite:
    """Finds the first modules whose values are not finite, in the forward and in the backward pass.

    Its hooks are not removed, because the process ends after the micro-batch.

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
        for name, module in modules.items():
            for path, layer in module.named_modules():
                layer.register_forward_hook(partial(self._look, f"{name}.{path}".rstrip(".")))

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


def _find_tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in find_leaves(value) if isinstance(leaf, Tensor)]


# --- verify -----------------------------------------------------------------------------------------------------------


class Trace(Tracer):
    """Writes checksums of the inputs and of the results of each step.

    The lines are one about the run, and one per step after its body (for an epoch's last step, after the epoch's body),
    with its facts: what, its name, its value. With the option `kill`, the process is killed at some moment after the
    beginning of a step, or while files of a snapshot are written; at the latest in the last step.
    """

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self._facts: list[tuple[str, str, Any]] = []  # of the step
        self._micro_batch = ""  # its name
        self._losses: list[str] = []  # of the micro-batch
        self._has_begun = self._is_armed = False

    def begin_step(self, step: Step) -> None:
        self._facts = []
        if not self._has_begun:
            self._has_begun = True
            settings = self.context.config
            self.write(
                {
                    "world_size": self.context.world_size,
                    "begin": step.number,
                    "most_replicas": settings.workers or settings.batch_size // settings.micro_batch_size,
                    "micro_batch_size": settings.micro_batch_size,
                    "pipeline": settings.pipeline,
                    "pipeline_ranks": self.context.group.ranks_per_replica,
                    "shard": settings.shard if self.context.world_size > 1 else None,
                }
            )
            state = self.loop.build_state({"step": step.number})  # on all ranks, which may have slices of it
            if self.context.rank == 0:
                self._facts += (("initial", name, hash_tensor(tensor)) for name, tensor in encode(state)[1].items())
        kill = self.options.get("kill")
        if kill and kill["rank"] == self.context.rank and kill["step"] <= step.number:
            if step.number == kill["last"]:  # nothing has killed it before
                os.kill(os.getpid(), signal.SIGKILL)
            if not self._is_armed:
                self._is_armed = True
                self._arm(kill)

    def forward(self, step: Step, batch: Any) -> None:
        self._micro_batch = f"micro-batch {step.micro_batch}" + (f" of pass {step.num_passes}" * (step.num_passes > 0))
        self._losses = []
        self._facts += [
            ("samples", self._micro_batch, step.loaded_fingerprint),
            ("input", self._micro_batch, hash_content(batch)),
        ]

    def backward(self, step: Step, loss: Tensor, weight: float | Tensor | None, model: nn.Module | None) -> None:
        self._losses.append(float(loss.detach()).hex())

    def end_micro_batch(self, step: Step) -> None:
        draws = {
            "torch": read_generator(torch.default_generator),
            "numpy": read_generator(NUMPY_GENERATOR),
            "random": read_generator(PYTHON_GENERATOR),
        }
        self._facts += [("losses", self._micro_batch, self._losses), ("draws", self._micro_batch, draws)]

    def reduced(self, step: Step) -> None:
        plan = self.loop.gradients.plan
        self._facts += (
            ("gradient", name, hash_tensor(gather_whole(param.grad))[:16])
            for name, param in zip(plan.names, plan.params, strict=True)
            if param.grad is not None
        )

    def end_body(self, step: Step) -> None:
        """Write the line of the step."""
        loss = None if step.result.loss is None else step.result.loss.hex()
        line = {"step": step.number, "loss": loss, "at_s": time.monotonic(), "facts": self._facts}
        state = self.loop.build_state({"step": step.number + 1})  # on all ranks, which may have slices of it
        if self.context.rank == 0:
            structure, tensors = encode(state)
            hashes = {name: hash_tensor(tensor) for name, tensor in tensors.items()}
            line["digest"] = digest_of(structure, hashes)
            self._facts += (("state", name, value[:16]) for name, value in hashes.items())
            self._facts += (("value", name, value) for name, value in flatten(state))
        self.write(line)

    def _arm(self, kill: dict[str, Any]) -> None:
        """Arrange to kill this process after some time, or at one of its next operations on a snapshot's files."""
        if "after_s" in kill:
            timer = threading.Timer(kill["after_s"], os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
            return
        home = f"{self.context.location.path}{os.sep}snapshots{os.sep}"
        left = kill["events"]

        def on_event(event: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            if event in ("open", "os.mkdir", "os.rename", "os.remove") and str(args[0]).startswith(home):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(on_event)


class Killer(Interceptor):
    """Kills ranks of a run that continues without them, each once.

    Options: `dir`, and `kills`: rank -> a step, and a number of its micro-batches.
    The rank is killed after so many micro-batches, counted over all passes, just before the next one.
    """

    is_trial = True
    permits_healing = True

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self._killed = Path(options["dir"]) / f"killed-{context.rank}"  # its number changes when other ranks die
        self._step, self._left = options["kills"].get(str(context.rank), (-1, 0))
        if self._killed.exists():  # all ranks have started again
            self._step = -1

    def forward(self, step: Step, batch: Any) -> None:
        if step.number == self._step:
            if self._left == 0:
                self._killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1


def hash_tensor(tensor: Tensor) -> str:
    """Return a hash of the elements of a tensor."""
    return hash_bytes(view_bytes(tensor))


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the plain values of a state as text, with their paths. An optimizer's parameter numbers are omitted."""
    if isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            if key != "params":
                yield from flatten(item, f"{path}/{key}" if path else str(key))
    elif not isinstance(value, Tensor | np.ndarray | np.generic):
        yield path, repr(value)
