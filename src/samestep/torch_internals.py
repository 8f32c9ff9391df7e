"""The private names of torch that samestep depends on, in one place.

Each has no public equivalent that is as fast. A torch release that changes one of them breaks here, and
`tests/test_torch_internals.py` says which.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

# Tensor -> how often its storage was written through it, `.data` excepted. There is no public accessor.
read_version: Callable[[Tensor], int] = attrgetter("_version")

# Module -> its own buffers by name, None included, as a live dict. `named_buffers` leaves out those that are None.
get_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")

# The C++ function that torch.autograd.backward calls. The Python wrapper repeats checks that GradientPass has made;
# they take 30 us, a tenth of a small model's step.
run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward

# The iterator over a DataLoader. `_next_index` returns the indices of the next batch, `_reset` begins another pass.
LoaderIterator: Any = torch.utils.data.dataloader._BaseDataLoaderIter

_get_storage_pointer: Callable[[Any], int] = attrgetter("_cdata")


def get_storage(tensor: Tensor) -> int:
    """The address of the tensor's storage object: equal for tensors that share memory."""
    return _get_storage_pointer(tensor.untyped_storage())


def count_storage_uses(storage: int) -> int:
    """How many tensors use the storage that `get_storage` returned."""
    return torch._C._storage_Use_Count(storage)


@contextmanager
def as_worker(worker: int | None, num_workers: int, dataset: Any) -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info` report this worker of so many inside the block; None: no worker."""
    workers = torch.utils.data._utils.worker
    before = torch.utils.data._utils.worker._worker_info
    info: Any = None
    if worker is not None:
        info = workers.WorkerInfo(id=worker, num_workers=num_workers, seed=torch.initial_seed(), dataset=dataset)
    torch.utils.data._utils.worker._worker_info = info
    try:
        yield
    finally:
        torch.utils.data._utils.worker._worker_info = before
