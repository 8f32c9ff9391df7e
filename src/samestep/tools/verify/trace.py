"""Traces a run step by step for `samestep verify`: checksums of the inputs and of the results of each step.

Each rank writes `rank-R.jsonl`: a line about the run, then one line per step after its body (for an epoch's last step,
after the epoch's body). With `"kill"`, the process is killed at some moment after the beginning of a step, or while
files of a snapshot are written; at the latest in the last step.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.hashing import hash_bytes, hash_content, view_bytes
from samestep.snapshot.serialization import digest_of, encode
from samestep.tools.tracer import Tracer
from samestep.torch_internals import gather_whole
from samestep.train.context import RunContext
from samestep.train.determinism import NUMPY_GENERATOR, PYTHON_GENERATOR, read_generator
from samestep.train.interception import Interceptor
from samestep.train.step import Step


class Trace(Tracer):
    """Writes a line for each step, with its facts: what, its name, its value. Options: `dir`, and optionally `kill`."""

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
            self._write_begin(step.number)
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
        self._facts.append(("samples", self._micro_batch, step.loaded_fingerprint))
        self._facts.append(("input", self._micro_batch, hash_content(batch)))

    def backward(self, step: Step, loss: Tensor, weight: float | Tensor | None, model: nn.Module | None) -> None:
        self._losses.append(float(loss.detach()).hex())

    def end_micro_batch(self, step: Step) -> None:
        self._facts.append(("losses", self._micro_batch, self._losses))
        self._facts.append(("draws", self._micro_batch, read_draws()))

    def reduced(self, step: Step) -> None:
        for name, param in zip(self.loop.gradients.plan.names, self.loop.gradients.plan.params, strict=True):
            if param.grad is not None:
                self._facts.append(("gradient", name, hash_tensor(gather_whole(param.grad))[:16]))

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

    def _write_begin(self, first_step: int) -> None:
        settings = self.context.config
        self.write(
            {
                "world_size": self.context.world_size,
                "begin": first_step,
                "num_micro_batches": settings.batch_size // settings.micro_batch_size,
                "micro_batch_size": settings.micro_batch_size,
                "shard": settings.shard if self.context.world_size > 1 else None,
            }
        )
        state = self.loop.build_state({"step": first_step})  # on all ranks, which may have slices of it
        if self.context.rank == 0:
            self._facts += (("initial", name, hash_tensor(tensor)) for name, tensor in encode(state)[1].items())

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


def read_draws() -> dict[str, str]:
    """Return a hash of each global generator's state."""
    return {
        "torch": read_generator(torch.default_generator),
        "numpy": read_generator(NUMPY_GENERATOR),
        "random": read_generator(PYTHON_GENERATOR),
    }


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the plain values of a state as text, with their paths. An optimizer's parameter numbers are omitted."""
    if isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            if key != "params":
                yield from flatten(item, f"{path}/{key}" if path else str(key))
    elif not isinstance(value, Tensor | np.ndarray | np.generic):
        yield path, repr(value)
