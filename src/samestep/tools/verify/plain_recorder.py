"""Records what the ranks of a script that does not use samestep do: samples, gradients and weights.

Each process that trains writes a `PlainRank` after each update and at its end.

Tensors are recorded as their dot products with a few fixed random vectors. These are linear, so that the projection of
a mean of gradients is the mean of the projections, and two tensors with equal projections are equal with probability 1.
"""

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

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Subset

from samestep.files import replace_file
from samestep.hashing import find_leaves, hash_content
from samestep.processes import Held, hold, leave_now, wait_until
from samestep.tools.verify.plain_checks import Pass, PlainRank, Update
from samestep.torch_internals import LoaderIterator
from samestep.world.environment import read_rank

NUM_VECTORS = 4
MAX_ELEMENTS = 1 << 14  # of a tensor, evenly spread, that are projected
LEAVE_S = 10.0  # for the other ranks to complete the last step
ENDED = "ended-"  # a file: a rank has made its last step


def begin(options: Mapping[str, Any]) -> None:
    """Install the hooks in this process, which keep the recorder.

    Args:
        options: "dir" for the records; "steps", after which the script is ended.
    """
    Recorder(Path(options["dir"]), options["steps"]).install()


@cache
def draw_vectors(number: int, size: int) -> Tensor:
    """Return the random vectors for a tensor of a list. They do not come from the global generators."""
    return torch.randn((NUM_VECTORS, size), generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def project(number: int, tensor: Tensor) -> Tensor:
    """Project the tensor of this number in a list. Returns NUM_VECTORS numbers in float64, on the CPU."""
    flat = tensor.detach().to_dense().flatten()
    flat = flat[:: math.ceil(len(flat) / MAX_ELEMENTS) or 1].to("cpu", torch.float64)
    return (draw_vectors(number, len(flat)) * flat).sum(1)


def project_all(tensors: Iterable[Tensor | None]) -> Tensor:
    """Project a list of tensors; None counts as zeros."""
    projections = [project(number, tensor) for number, tensor in enumerate(tensors) if tensor is not None]
    return sum(projections, torch.zeros(NUM_VECTORS, dtype=torch.float64))


class OptimizerTracker:
    """Follows one optimizer: the gradients that this rank computes, and those with which it updates.

    `_computed` is the projection of the gradients that this rank has computed since the gradients were zero; None if
    there was no backward pass since the last update.
    """

    def __init__(self, number: int, optimizer: Optimizer) -> None:
        self._number = number
        self._optimizer = optimizer
        self._hooked: set[int] = set()
        self._computed: Tensor | None = None

    @property
    def _params(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def before_backward(self) -> None:
        """Restart from the gradients in `.grad`, if the script has updated or set them to zero since."""
        for number, param in enumerate(self._params):
            if param.requires_grad and number not in self._hooked:
                self._hooked.add(number)
                # It gets the gradient of this rank, before DDP averages it.
                param.register_hook(partial(self._add_gradient, number))
        left = self._project_grads()
        if self._computed is None or not left.any():
            self._computed = left

    def _add_gradient(self, number: int, gradient: Tensor) -> None:
        if self._computed is not None:
            self._computed = self._computed + project(number, gradient)

    def _project_grads(self) -> Tensor:
        return project_all([param.grad for param in self._params])

    def end_update(self, num_samples: float) -> Update:
        """Describe an update. A closure has computed the gradients in the update itself."""
        update = Update(
            optimizer=self._number,
            num_elements=sum(param.numel() for param in self._params),
            num_samples=num_samples,
            computed=None if self._computed is None else self._computed.tolist(),
            used=self._project_grads().tolist(),
            after=project_all(self._params).tolist(),
        )
        self._computed = None
        return update


class Recorder(Held):
    """Records passes over loaders, their batches, backward passes and updates of this process.

    Args:
        directory: for the file.
        num_steps: updates of an optimizer after which the process ends with exit code 0.
    """

    def __init__(self, directory: Path, num_steps: int) -> None:
        self._directory = directory
        self._path = directory / f"{os.getpid()}.record"
        self._num_steps = num_steps
        self._record = PlainRank()
        self._trackers: dict[Optimizer, OptimizerTracker] = {}
        # id -> number and data set, which is kept, so that no other gets its id
        self._datasets: dict[int, tuple[int, Any]] = {}
        self._indices: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()  # iterator -> of requested batches
        self._passes: WeakKeyDictionary[Any, tuple[Pass, Any]] = WeakKeyDictionary()  # iterator -> pass, data set
        self._latest: Pass | None = None  # the pass of the last batch
        self._num_samples = 0.0  # of the backward passes since the last update

    def install(self) -> None:
        """Wrap the functions of torch that are recorded."""
        hold(self)
        register_optimizer_step_post_hook(self._after_step)
        _wrap_after(Optimizer, "__init__", self._find_tracker)
        _wrap_after(DataLoader, "__iter__", self._begin_pass)
        _wrap_after(LoaderIterator, "_next_index", self._add_index)
        _wrap_after(LoaderIterator, "_reset", self._forget_indices)
        _wrap_after(dist, "init_process_group", self._wrap_accelerate)
        next_batch = LoaderIterator.__next__
        backward = torch.autograd.backward

        def take(iterator: Any) -> Any:
            try:
                batch = next_batch(iterator)
            except StopIteration:
                if iterator in self._passes:
                    self._passes[iterator][0].is_ended = True
                raise
            self._add_batch(iterator, batch)
            return batch

        def run_backward(*args: Any, **options: Any) -> None:
            for tracker in self._trackers.values():
                tracker.before_backward()
            backward(*args, **options)
            self._count_backward()

        LoaderIterator.__next__ = take
        torch.autograd.backward = run_backward

    def close(self) -> None:
        """Write the record so far."""
        replace_file(self._path, msgspec.msgpack.encode(self._record))

    # --- data ---------------------------------------------------------------------------------------------------------

    def _add_index(self, index: Any, iterator: Any) -> None:
        self._indices.setdefault(iterator, deque()).append(index)

    def _forget_indices(self, _: None, iterator: Any, *__: Any) -> None:
        self._indices.pop(iterator, None)

    def _begin_pass(self, iterator: Any, loader: Any) -> None:
        if not isinstance(iterator, LoaderIterator):  # a generator of a subclass, which calls this again
            return
        dataset = loader.dataset
        number, _ = self._datasets.setdefault(id(dataset), (len(self._datasets), dataset))
        begun = Pass(
            dataset=number,
            length=count(dataset),
            num_batches=count(loader),
            drop_last=any(getattr(each, "drop_last", False) for each in (loader, loader.sampler, loader.batch_sampler)),
            is_subset=isinstance(dataset, Subset),
        )
        self._record.passes.append(begun)
        self._passes[iterator] = begun, dataset

    def _add_batch(self, iterator: Any, batch: Any) -> None:
        if iterator not in self._passes or not self._indices.get(iterator):
            return
        index = self._indices[iterator].popleft()
        self._latest, dataset = self._passes[iterator]
        indices = list(index) if isinstance(index, list | tuple | Tensor) else [index]
        has_indices = all(each is not None for each in indices)
        self._latest.ids.append([resolve(dataset, each) for each in indices] if has_indices else [*hash_rows(batch)])
        self._latest.is_grad |= torch.is_grad_enabled()

    def _count_backward(self) -> None:
        """Count a backward pass for the open passes: several, if a loop takes batches from several loaders."""
        newest = {each.dataset: each for each in self._record.passes}
        for each in newest.values():
            if each.is_grad and (each is self._latest or not each.is_ended):
                batch = each.ids[each.num_backwards : each.num_backwards + 1]  # later ones are fetched ahead
                self._num_samples += len(batch[0]) if batch else math.nan
                each.num_backwards += 1

    def _wrap_accelerate(self, *_: Any, **__: Any) -> None:
        """Notice that Accelerate removes padding. Trainer binds the method when the group has been opened."""
        accelerator = getattr(sys.modules.get("accelerate"), "Accelerator", None)
        if accelerator is not None:
            _wrap_after(accelerator, "gather_for_metrics", self._trim)

    def _trim(self, *_: Any, **__: Any) -> None:
        if self._latest is not None:
            self._latest.is_trimmed = True

    # --- updates ------------------------------------------------------------------------------------------------------

    def _find_tracker(self, _: None, optimizer: Optimizer, *__: Any, **___: Any) -> OptimizerTracker:
        return self._trackers.setdefault(optimizer, OptimizerTracker(len(self._trackers), optimizer))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        tracker = self._find_tracker(None, optimizer)
        self._record.rank = dist.get_rank() if dist.is_initialized() else read_rank()
        self._record.updates.append(tracker.end_update(self._num_samples))
        self._num_samples = 0.0
        self._record.is_cut = self._record.num_steps >= self._num_steps
        self.close()
        if self._record.is_cut:
            self._leave()

    def _leave(self) -> None:
        """End the process, once the other ranks have made this step too: they may still receive from this one."""
        (self._directory / f"{ENDED}{os.getpid()}").touch()
        size = dist.get_world_size() if dist.is_initialized() else 1
        wait_until(lambda: len(list(self._directory.glob(f"{ENDED}*"))) >= size, LEAVE_S)
        for child in multiprocessing.active_children():  # workers of loaders
            child.kill()
        leave_now(0)


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


def resolve(dataset: Any, index: Any) -> int | str:
    """Return the index of a sample in the data set that a `Subset`, or a subset of it, is taken from."""
    if not hasattr(index, "__index__"):
        return str(index)
    number = int(index)
    while isinstance(dataset, Subset):
        number = int(dataset.indices[number])
        dataset = dataset.dataset
    return number


def hash_rows(batch: Any) -> Iterator[str]:
    """Return a hash per sample of a collated batch, for data sets without indices. Empty without tensors."""
    tensors = [each for each in find_leaves(batch) if isinstance(each, Tensor) and each.dim()]
    size = len(tensors[0]) if tensors else 0
    for row in range(size):
        yield hash_content([tensor[row] for tensor in tensors if len(tensor) == size])
