"""What a run did, step by step, for `samestep verify`: checksums of what went into a step and of what came out.

Each rank writes `rank-R.jsonl`: a line about the run, then one per step, taken when its body is done (an epoch's last
step: when the epoch's body is). With `"dump": n`, the tensors of step n as well. A fault can be asked for: to be
killed at some moment of a step, or while files of a snapshot are written.
"""

import hashlib
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from samestep.data.loader import Fetcher, Loader
from samestep.errors import Error
from samestep.snapshot.serialization import KIND, digest, digest_of, encode, view_bytes, write_tensors
from samestep.train.generators import find_generators, find_own_modules, read_generator
from samestep.train.steps import Losses, Step

if TYPE_CHECKING:
    from samestep.train.loop import Loop
    from samestep.train.run import Run


def open_trace(run: "Run", options: str) -> "Trace":
    """The trace that is asked for, as JSON: `dir`, and perhaps `dump`, `kill`, `reference` or `paces`."""
    parsed = json.loads(options)
    if parsed.get("reference"):
        from samestep.train.reference import Reference

        return Reference(run, parsed)
    if parsed.get("paces"):
        from samestep.train.phase_timing import PhaseTiming

        return PhaseTiming(run, parsed)
    return Trace(run, parsed)


class Trace:
    """Writes one rank's trace of one run."""

    def __init__(self, run: "Run", options: dict[str, Any]) -> None:
        self.run, self._options = run, options
        self.directory = Path(options["dir"])
        self._file = open(self.directory / f"rank-{run.rank}.jsonl", "a")  # noqa: SIM115
        self._before: dict[str, str] = {}

    def prepare(self) -> None:
        """The models are on the device, and alike; nothing has been restored yet."""

    def build_step(self, run: "Run", loop: "Loop", number: int, loader: Loader) -> Step:
        """A step that notes what goes into it."""
        if loop.steps_done == run._steps_done:
            self._begin(loop)
        kill = self._options.get("kill")
        if kill and kill["rank"] == run.rank and kill["step"] == number:
            self._arm(kill)
        self._before = {path: read_generator(thing) for path, thing in self._find_generators(loop).items()}
        return TracedStep(run, loop, number, loader)

    def end_step(self, loop: "Loop") -> None:
        """Writes down the step that is done."""
        step = loop.step
        if not isinstance(step, TracedStep):
            return
        reread = {"reread": self._read_twice(loop, step)} if self._options.get("reread") else {}
        line: dict[str, Any] = reread | {
            "step": step.number,
            "loss": None if step._loss is None else step._loss.hex(),
            "at_s": time.monotonic(),
            "threads": torch.get_num_threads(),
            "micro_batches": step.notes,
            "gradients": step.gradients,
            "draws": read_draws(),
            "moved": [
                f"{path} ({type(thing).__name__})"
                for path, thing in self._find_generators(loop).items()
                if self._before.get(path, "") not in ("", read_generator(thing))
            ],
        }
        if self.run.rank == 0:
            structure, tensors = encode(self.run._build_state({"step": loop.steps_done}))
            hashes = {name: hashlib.sha256(view_bytes(tensor)).hexdigest() for name, tensor in tensors.items()}
            line |= {"digest": digest_of(structure, hashes), "tensors": {n: h[:16] for n, h in hashes.items()}}
            line |= {"values": dict(flatten(structure)), "schedules": self.run._misuse.read_schedules()}
            if self._options.get("dump") == step.number:
                with open(self.directory / "dump.safetensors", "wb") as file:
                    write_tensors(file, tensors)
        self.write(line)

    def _read_twice(self, loop: "Loop", step: "TracedStep") -> dict[str, Any]:
        """Whether reading this rank's samples again, with the same seed, gives the same; and what changes meanwhile."""
        source, run = loop.batches.source, self.run
        fetcher, before = Fetcher(source.dataset, source.collate_fn), hash_attributes(source.dataset)
        differs, changed = False, set[str]()
        for task in loop.batches.tasks(step.number, step.number + 1, rank=run.rank, world_size=run.world_size):
            one, other = (hash_batch(fetcher.load(task).batch) for _ in range(2))
            differs |= one != other
            changed |= {name for name, now in hash_attributes(source.dataset).items() if before.get(name) != now}
        return {"differs": differs, "changed": sorted(changed)}

    def write(self, line: dict[str, Any]) -> None:
        """Adds a line."""
        print(json.dumps(line), file=self._file, flush=True)

    def _begin(self, loop: "Loop") -> None:
        run, settings = self.run, self.run._settings
        buffers = [
            f"objects/{name}/{path}" for name, module in run._modules.items() for path, _ in module.named_buffers()
        ]
        modules = [sys.modules["__main__"], *find_own_modules(Path.cwd(), len(sys.modules))]
        files = dict.fromkeys(getattr(module, "__file__", None) or "" for module in modules)
        self.write(
            {
                "world_size": run.world_size,
                "begin": run._steps_done,
                "last": loop.last_step,
                "num_micro_batches": settings.batch_size // settings.micro_batch_size,
                "micro_batch_size": settings.micro_batch_size,
                "num_threads": settings.num_threads,
                "deterministic": settings.deterministic,
                "reduction": settings.reduction,
                "schedules": [name for name, thing in run._objects.items() if isinstance(thing, LRScheduler)],
                "buffers": buffers,
                "files": [str(Path(file).absolute()) for file in files if file.endswith(".py")],
            }
        )

    def _find_generators(self, loop: "Loop") -> dict[str, Any]:
        source = loop.batches.source
        return find_generators({"the data set": source.dataset, "collate_fn": source.collate_fn} | self.run._modules)

    def _arm(self, kill: dict[str, Any]) -> None:
        """Has this process killed in a while, or at one of the next things that it does to a snapshot's files."""
        if "after_s" in kill:
            timer = threading.Timer(kill["after_s"], os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
            return
        home, left = f"{self.run.dir}{os.sep}snapshots{os.sep}", kill["events"]

        def on_event(event: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            if event in ("open", "os.mkdir", "os.rename", "os.remove") and os.fspath(args[0] or "").startswith(home):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        def guard(event: str, args: tuple[Any, ...]) -> None:
            with suppress(TypeError, AttributeError):  # files that are opened by number, or named in bytes
                on_event(event, args)

        sys.addaudithook(guard)


class TracedStep(Step):
    """A step that notes, per micro-batch, the samples, the batch, the losses, and what was drawn.

    Attributes:
        notes: one per micro-batch and pass.
        gradients: checksums by parameter, of the last pass.
    """

    def __init__(self, run: "Run", loop: "Loop", number: int, loader: Loader) -> None:
        super().__init__(run, loop, number, loader)
        self.notes: list[dict[str, Any]] = []
        self.gradients: dict[str, str | None] = {}

    def __iter__(self) -> Iterator[Any]:
        number = self.num_passes
        inner = super().__iter__()
        try:
            for batch in inner:
                note = {"v": self._v, "pass": number, "samples": self._cache[self._k].fingerprint, "losses": []}
                note["input"] = hash_batch(batch)
                self.notes.append(note)
                yield batch
                note["draws"] = read_draws()
        finally:
            inner.close()  # type: ignore[attr-defined]
        reducer = self._run._reducer
        self.gradients = {
            name: None if param.grad is None else hash_tensor(param.grad)
            for name, param in zip(reducer.names, reducer.params, strict=True)
        }

    def backward(self, loss: Losses, *, weight: float | Tensor | None = None, model: nn.Module | None = None) -> None:
        super().backward(loss, weight=weight, model=model)
        terms = [*loss] if isinstance(loss, Mapping) else [loss]
        self.notes[-1]["losses"] += [float(term.detach()).hex() for term in terms]


def hash_tensor(tensor: Tensor) -> str:
    """16 hexadecimal digits that stand for a tensor's elements."""
    return hashlib.sha256(view_bytes(tensor)).hexdigest()[:16]


def hash_batch(batch: Any) -> str:
    """16 hexadecimal digits that stand for a micro-batch's content; "" where there is no way to tell."""
    try:
        return digest(batch)[:16]
    except Error:
        pass
    try:
        return hashlib.sha256(pickle.dumps(batch)).hexdigest()[:16]
    except Exception:
        return ""


def hash_attributes(dataset: Any) -> dict[str, str]:
    """A hash of each attribute of a data set, and of those it wraps (`dataset.dataset`)."""
    found: dict[str, str] = {}
    inside, thing = "", dataset
    while thing is not None and len(inside) < 80:  # Subset and its kind, in few layers
        own = getattr(thing, "__dict__", {})
        found |= {inside + name: hash_batch(value) for name, value in own.items() if name != "dataset"}
        inside, thing = f"{inside}dataset.", own.get("dataset")
    return found


def read_draws() -> dict[str, str]:
    """Where the global generators stand."""
    return {
        "torch": read_generator(torch.default_generator),
        "numpy": read_generator(np.random.mtrand._rand),
        "random": read_generator(random._inst),
    }


def flatten(structure: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The plain values of an encoded state, with their paths; an optimizer's numbering of parameters is left out."""
    if isinstance(structure, list):
        pairs: list[tuple[Any, Any]] = list(enumerate(structure))
    elif isinstance(structure, dict) and structure.get(KIND) in ("tensor", "array"):
        return
    elif isinstance(structure, dict) and KIND in structure and isinstance(structure.get("items"), list):
        items = structure["items"]
        pairs = items if structure[KIND] in ("dict", "counter", "state_dict") else list(enumerate(items))
    elif isinstance(structure, dict) and KIND not in structure:
        pairs = list(structure.items())
    else:
        yield path, structure
        return
    for key, value in pairs:
        if key != "params":
            yield from flatten(value, f"{path}/{key}" if path else str(key))
