"""Records what the ranks of a script that does not use samestep do: samples, gradients and weights.

Each process that trains appends lines of JSON to `rank-<process id>.jsonl`. Each line is an event:

    begin_pass    the script iterates a DataLoader. Passes and data sets are numbered.
    batch         it takes a batch of a pass; with the indices of its samples, or hashes of their contents
    end_pass      it requests another batch, and there is none
    trim          Accelerate removes the padding from the results of the last batch
    backward      a backward pass ends
    update        an optimizer's step ends; "computed": the gradient of this rank, "used": in `.grad`, "after": the
                  weights
    cut           the recorder ends the script after the steps of the trial

Tensors are recorded as their dot products with a few fixed random vectors. These are linear, so that the projection of
a mean of gradients is the mean of the projections, and two tensors with equal projections are equal with probability 1.
"""

import json
import math
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Subset

from samestep.data.content import find_leaves
from samestep.files import open_regular
from samestep.hashing import hash_pieces
from samestep.torch_internals import LoaderIterator
from samestep.waiting import wait_until
from samestep.world.environment import read_rank

NUM_VECTORS = 4
MAX_ELEMENTS = 1 << 14  # of a tensor, evenly spread, that are projected
LEAVE_S = 10.0  # for the other ranks to complete the last step
ENDED = "ended-"  # a file: a rank has made its last step

_recorder: "Recorder | None" = None  # of the process, in which the plain script has no run that could own it


def begin(options: Mapping[str, Any]) -> None:
    """Install the hooks in this process. A second call does nothing.

    Args:
        options: "dir" for the records; "steps", after which the script is ended.
    """
    global _recorder
    if _recorder is None:
        _recorder = Recorder(Path(options["dir"]), options["steps"])
        _recorder.install()


@cache
def draw_vectors(place: int, size: int) -> Tensor:
    """Return the random vectors for the tensor at a place of a list. They do not come from the global generators."""
    generator = torch.Generator().manual_seed(place)
    return torch.randn((NUM_VECTORS, size), generator=generator, dtype=torch.float64)


def project(place: int, tensor: Tensor) -> Tensor:
    """Project the tensor at a place of a list. Returns NUM_VECTORS numbers in float64, on the CPU."""
    flat = tensor.detach().to_dense().flatten()
    flat = flat[:: math.ceil(len(flat) / MAX_ELEMENTS) or 1].to("cpu", torch.float64)
    return (draw_vectors(place, len(flat)) * flat).sum(1)


def project_all(tensors: Iterable[Tensor | None]) -> Tensor:
    """Project a list of tensors; None counts as zeros."""
    projections = [project(place, tensor) for place, tensor in enumerate(tensors) if tensor is not None]
    return sum(projections, torch.zeros(NUM_VECTORS, dtype=torch.float64))


class OptimizerTracker:
    """Follows one optimizer: the gradients that this rank computes, and those with which it updates.

    `_computed` is the projection of the gradients that this rank has computed since the gradients were zero, and
    `_is_fresh` says that there was no backward pass since the last update.

    Attributes:
        number: of the optimizer.
        num_steps: completed updates.
    """

    def __init__(self, number: int, optimizer: Optimizer) -> None:
        self.number = number
        self.num_steps = 0
        self._optimizer = optimizer
        self._hooked: set[int] = set()
        self._is_fresh = True
        self._computed = project_all([])  # zeros

    @property
    def _params(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def before_backward(self) -> None:
        """Restart from the gradients in `.grad`, if the script has updated or set them to zero since."""
        for place, param in enumerate(self._params):
            if param.requires_grad and place not in self._hooked:
                self._hooked.add(place)
                # It gets the gradient of this rank, before DDP averages it.
                param.register_hook(partial(self._add_gradient, place))
        left = self._project_grads()
        if self._is_fresh or not left.any():
            self._computed = left
            self._is_fresh = False

    def _add_gradient(self, place: int, gradient: Tensor) -> None:
        self._computed = self._computed + project(place, gradient)

    def _project_grads(self) -> Tensor:
        return project_all([param.grad for param in self._params])

    def end_update(self) -> dict[str, Any]:
        """Describe an update. A closure has computed the gradients in the update itself."""
        line = {
            "optimizer": self.number,
            "num_elements": sum(param.numel() for param in self._params),
            "computed": None if self._is_fresh else self._computed.tolist(),
            "used": self._project_grads().tolist(),
            "after": project_all(self._params).tolist(),
        }
        self._is_fresh = True
        self.num_steps += 1
        return line


class Recorder:
    """Writes the events of this process: passes over loaders, their batches, backward passes and updates.

    Args:
        directory: for the file.
        steps: updates of an optimizer after which the process ends with exit code 0.
    """

    def __init__(self, directory: Path, steps: int) -> None:
        self._directory = directory
        self._steps = steps
        self._file = open(directory / f"rank-{os.getpid()}.jsonl", "a", buffering=1, opener=open_regular)  # noqa: SIM115
        self._trackers: dict[Optimizer, OptimizerTracker] = {}
        # id -> number and data set, which is kept, so that no other gets its id
        self._datasets: dict[int, tuple[int, Any]] = {}
        self._num_passes = 0
        self._queues: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()
        self._passes: WeakKeyDictionary[Any, tuple[int, Any]] = WeakKeyDictionary()
        self._has_wrapped_accelerate = False

    def install(self) -> None:
        """Wrap the functions of torch that are recorded."""
        register_optimizer_step_post_hook(self._after_step)
        _wrap_after(Optimizer, "__init__", lambda _, optimizer, *__, **___: self._find_tracker(optimizer))
        _wrap_after(DataLoader, "__iter__", self._begin_pass)
        _wrap_after(LoaderIterator, "_next_index", lambda index, iterator: self._queue(iterator).append(index))
        _wrap_after(LoaderIterator, "_reset", lambda _, iterator, *__, **___: self._queue(iterator).clear())
        _wrap_after(dist, "init_process_group", lambda *_, **__: self._wrap_accelerate())  # Trainer binds its method
        next_batch = LoaderIterator.__next__
        backward = torch.autograd.backward

        def take(iterator: Any) -> Any:
            try:
                batch = next_batch(iterator)
            except StopIteration:
                if iterator in self._passes:
                    self._write("end_pass", pass_number=self._passes[iterator][0])
                raise
            self._add_batch(iterator, batch)
            return batch

        def run_backward(*args: Any, **options: Any) -> None:
            for tracker in self._trackers.values():
                tracker.before_backward()
            backward(*args, **options)
            self._write("backward")

        LoaderIterator.__next__ = take
        torch.autograd.backward = run_backward

    def _write(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=self._file)

    # --- data ---------------------------------------------------------------------------------------------------------

    def _queue(self, iterator: Any) -> deque[Any]:
        return self._queues.setdefault(iterator, deque())

    def _begin_pass(self, iterator: Any, loader: Any) -> None:
        if not isinstance(iterator, LoaderIterator):  # a generator of a subclass, which calls this again
            return
        self._wrap_accelerate()
        number, _ = self._datasets.setdefault(id(loader.dataset), (len(self._datasets), loader.dataset))
        self._passes[iterator] = self._num_passes, loader
        self._write(
            "begin_pass",
            dataset=number,
            length=count(loader.dataset),
            num_batches=count(loader),
            drop_last=any(getattr(each, "drop_last", False) for each in (loader, loader.sampler, loader.batch_sampler)),
            is_subset=isinstance(loader.dataset, Subset),
            is_shuffled=getattr(loader.sampler, "shuffle", True),
        )
        self._num_passes += 1

    def _add_batch(self, iterator: Any, batch: Any) -> None:
        queue = self._queue(iterator)
        if iterator not in self._passes or not queue:
            return
        index = queue.popleft()
        number, loader = self._passes[iterator]
        places = list(index) if isinstance(index, list | tuple | Tensor) else [index]
        if any(place is None for place in places):
            ids: list[Any] = list(hash_rows(batch))
        else:
            ids = [resolve(loader.dataset, int(each) if hasattr(each, "__index__") else str(each)) for each in places]
        self._write("batch", pass_number=number, is_grad=torch.is_grad_enabled(), ids=ids)

    def _wrap_accelerate(self) -> None:
        accelerate = sys.modules.get("accelerate")
        if accelerate is not None and not self._has_wrapped_accelerate and hasattr(accelerate, "Accelerator"):
            self._has_wrapped_accelerate = True
            _wrap_after(accelerate.Accelerator, "gather_for_metrics", lambda *_, **__: self._write("trim"))

    # --- updates ------------------------------------------------------------------------------------------------------

    def _find_tracker(self, optimizer: Optimizer) -> OptimizerTracker:
        return self._trackers.setdefault(optimizer, OptimizerTracker(len(self._trackers), optimizer))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        tracker = self._find_tracker(optimizer)
        rank = dist.get_rank() if dist.is_initialized() else read_rank()
        self._write("update", rank=rank, **tracker.end_update())
        if tracker.num_steps >= self._steps:
            self._leave()

    def _leave(self) -> None:
        """End the process, once the other ranks have made this step too: they may still receive from this one."""
        self._write("cut")
        (self._directory / f"{ENDED}{os.getpid()}").touch()
        size = dist.get_world_size() if dist.is_initialized() else 1
        wait_until(lambda: len(list(self._directory.glob(f"{ENDED}*"))) >= size, LEAVE_S)
        for child in multiprocessing.active_children():  # workers of loaders
            child.kill()
        sys.stdout.flush()
        os._exit(0)


def _wrap_after(owner: Any, name: str, then: Callable[..., Any]) -> None:
    """Replace a function by one that then calls `then(result, *arguments)`."""
    original = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        then(result, *args, **options)
        return result

    setattr(owner, name, call)


def count(things: Any) -> int | None:
    """Return the length of a data set or a loader; None if it has none."""
    try:
        return len(things)
    except (TypeError, NotImplementedError):
        return None


def resolve(dataset: Any, index: Any) -> Any:
    """Return the index of a sample in the data set that a `Subset`, of a subset, is a part of."""
    while isinstance(dataset, Subset) and isinstance(index, int):
        index = int(dataset.indices[index])
        dataset = dataset.dataset
    return index


def hash_rows(batch: Any) -> Iterator[str]:
    """Return a hash per sample of a collated batch, for data sets without indices. Empty without tensors."""
    tensors = [each for each in find_leaves(batch) if isinstance(each, Tensor) and each.dim()]
    size = len(tensors[0]) if tensors else 0
    for row in range(size):
        values = [tensor[row].detach().cpu().reshape(-1).contiguous() for tensor in tensors if len(tensor) == size]
        yield hash_pieces(each.view(torch.uint8).numpy().tobytes() for each in values)[:16]
