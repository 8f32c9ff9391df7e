"""The private names of torch that samestep depends on, in one module.

None has a public equivalent that is as fast or does the same. If a torch release changes one of them, tests fail.
Where a comment begins with "Without", it describes what works instead.
"""

import os
import socket
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.files import read_text

# Tensor -> how often its storage was written through it, `.data` excepted. Without it: compare copies of the values, as
# for buffers on the CPU; slower, the same results.
read_version: Callable[[Tensor], int] = attrgetter("_version")

# Module -> its own buffers by name, None included, as a live dict. Without it: `named_buffers`, which leaves out those
# that are None, `get_buffer` and `setattr`.
get_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")

# Module -> the names of its own buffers with `persistent=False`. `state_dict` leaves them out, but may be overridden.
get_non_persistent: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")


def get_grad_hooks(param: Any) -> dict[Any, Callable[[Tensor], None]]:
    """Return the functions of `register_post_accumulate_grad_hook`, in their order, as a live dict."""
    if param._post_accumulate_grad_hooks is None:
        param._post_accumulate_grad_hooks = OrderedDict()
    hooks: dict[Any, Callable[[Tensor], None]] = param._post_accumulate_grad_hooks
    return hooks


# The C++ function that torch.autograd.backward calls. Without it: that wrapper, which repeats checks that PassAttempt
# has made; they take 30 us, a tenth of a small model's step.
run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward

# Tensors, order -> the norm of each. The kernel with which torch.nn.utils.get_total_norm begins. Without it:
# torch.linalg.vector_norm, whose bits differ on a GPU.
compute_norms: Callable[[list[Tensor], float], Sequence[Tensor]] = torch._foreach_norm


# Multiplies each tensor of a list by a number, in place.
multiply_all: Callable[[list[Tensor], float], None] = torch._foreach_mul_

# In place: divides each tensor of a list by a number of its own; rounds each tensor of a list to whole numbers.
divide_all: Callable[[list[Tensor], list[int]], None] = torch._foreach_div_
round_all: Callable[[list[Tensor]], None] = torch._foreach_round_

# Adds lists of tensors, pair by pair, in place. A call per tensor takes longer than the sum of a small gradient.
add_all: Callable[[list[Any], list[Any]], None] = torch._foreach_add_

# Lists of tensors -> the difference of each pair. Without it: a call per tensor, as without the next one.
subtract_all: Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]] = torch._foreach_sub

# Copies lists of tensors, pair by pair, to the first one.
copy_all: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_


def group_by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group tensors by device and dtype, as torch.nn.utils.get_total_norm does: the groups' order follows from hashes.

    Without it: group in order of occurrence, whose bits differ from torch's if gradients have several dtypes.

    Returns:
        Per group, the numbers of its tensors.
    """
    if not tensors:
        return []
    groups = torch.utils._foreach_utils._group_tensors_by_device_and_dtype([[*tensors]], with_indices=True)
    return [indices for _, indices in groups.values()]


# Of the process, as the function of torch that they follow is. Each is of an object that removes it at its end.
_norm_observers: list[Callable[[Sequence[Tensor]], None]] = []
_decorated: Any = torch.nn.utils.clip_grad._get_total_norm
_total_norm_cell = _decorated.__closure__[0]  # where the decorator keeps the function
_get_total_norm: Callable[..., Tensor] = _total_norm_cell.cell_contents


def observe_norms(look: Callable[[Sequence[Tensor]], None]) -> Callable[[], None]:
    """Call `look` with the tensors of each `torch.nn.utils.clip_grad_norm_` or `get_total_norm`, however the script has
    imported it.

    Without `_get_total_norm`: replace these two functions, which misses scripts that import them.

    Returns:
        A function that ends this.
    """
    _total_norm_cell.cell_contents = _look_and_get_total_norm
    _norm_observers.append(look)
    return lambda: _norm_observers.remove(look)


def _look_and_get_total_norm(tensors: Any, *args: Any, **options: Any) -> Tensor:
    tensors = [tensors] if isinstance(tensors, Tensor) else [*tensors]
    for look in _norm_observers:
        look(tensors)
    return _get_total_norm(tensors, *args, **options)


@torch.no_grad()
def get_total_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Same as `torch.nn.utils.get_total_norm`, which nothing observes."""
    return _get_total_norm(tensors, norm_type)


# The iterator over a DataLoader. `_next_index` returns the indices of the next batch, `_reset` begins another pass.
# Without these: wrap the batch sampler, whose indices are equivalent (`verify --plain`).
LoaderIterator: Any = torch.utils.data.dataloader._BaseDataLoaderIter

_get_storage_pointer: Callable[[Any], int] = attrgetter("_cdata")


def get_storage(tensor: Tensor) -> int:
    """The address of the tensor's storage object: equal for tensors that share memory.

    Without `_cdata`: `untyped_storage().data_ptr()`.
    """
    return _get_storage_pointer(tensor.untyped_storage())


def list_storages(tensors: Sequence[Tensor]) -> list[int]:
    """The result of `get_storage` for each tensor, without a call in Python for each."""
    return [*map(_get_storage_pointer, map(Tensor.untyped_storage, tensors))]


def count_storage_uses(storage: int) -> int:
    """How many tensors use the storage that `get_storage` returned. Without it: copy gradients out of buckets."""
    return torch._C._storage_Use_Count(storage)


def rename_state(state: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return a module's state_dict with other keys. It keeps the versions of the modules, which have paths, too."""
    renamed: Any = type(state)()
    renamed.update((rename(key), value) for key, value in state.items())
    if (versions := getattr(state, "_metadata", None)) is not None:
        renamed._metadata = {rename(path): version for path, version in versions.items()}
    return renamed  # type: ignore[no-any-return]


@contextmanager
def as_worker(worker: int | None, num_workers: int, dataset: Any) -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info` report this worker of so many inside the block; None: no worker.

    Without `_worker_info`: read lanes in DataLoader workers only, which report themselves.
    """
    workers = torch.utils.data._utils.worker
    before = workers._worker_info
    info: Any = None
    if worker is not None:
        info = workers.WorkerInfo(id=worker, num_workers=num_workers, seed=torch.initial_seed(), dataset=dataset)
    workers._worker_info = info
    try:
        yield
    finally:
        workers._worker_info = before


# --- an iterator over a DataLoader with workers ---------------------------------------------------------------------

LOOK_S = 0.2  # how long an iterator waits for data before it checks whether the workers are alive


def look_for_dead_workers(iterator: Any) -> list[BaseProcess]:
    """Let the iterator look for dead workers every `LOOK_S` while it waits, in place of torch's SIGCHLD handler.

    That handler raises wherever the main thread is. Python prints an exception in a weak reference's callback or in
    `__del__`, and goes on; one in the script's own code ends a step half-way.

    Without `_try_get_data` or `_workers`: load with a `multiprocessing` pool, whose processes are public.

    Returns:
        The workers.
    """
    _drop_pids(iterator)
    # no cycle: torch's __del__ must run
    owner = weakref.proxy(iterator)
    try_once = type(iterator)._try_get_data

    def try_get_data(timeout: float = LOOK_S) -> tuple[bool, Any]:
        end_s = time.monotonic() + timeout
        while True:
            found = try_once(owner, min(timeout, LOOK_S))
            if found[0] or time.monotonic() >= end_s:
                return found  # type: ignore[no-any-return]

    iterator._try_get_data = try_get_data
    return [*iterator._workers]


def end_on_feeder_error(end: Callable[[Exception], None]) -> None:
    """In a worker: call `end` if a result cannot be sent, in place of a traceback. The result is lost."""

    def report(error: Exception, result: object) -> None:
        end(error)

    Queue._on_queue_feeder_error = staticmethod(report)  # type: ignore[attr-defined]


def abandon_workers(iterator: Any) -> None:
    """Release torch's resources for workers that will be killed, without communicating with them."""
    forget_workers(iterator)
    _drop_pids(iterator)
    for queue in iterator._index_queues:
        queue.cancel_join_thread()
    if hasattr(iterator, "_pin_memory_thread"):
        iterator._pin_memory_thread_done_event.set()


def end_feeders(iterator: Any) -> None:
    """Wait until the threads have ended that send to workers, which were killed. What they had to send is dropped."""
    for queue in iterator._index_queues:
        pipe = os.dup(queue._reader.fileno())
        queue.close()
        thread = queue._thread
        while thread not in (None, threading.current_thread()) and thread.is_alive():
            if wait([pipe], 0.001):  # a thread that sends more than a pipe holds would wait for ever
                os.read(pipe, 1 << 16)
        os.close(pipe)


def _drop_pids(iterator: Any) -> None:
    """Prevent torch's SIGCHLD handler from raising for these workers."""
    if iterator._worker_pids_set:
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def forget_workers(iterator: Any) -> None:
    """Prevent torch's exit hook from stopping the workers."""
    iterator._shutdown = True


def add_gloo() -> None:
    """Let the process group exchange tensors in host memory, as "cpu:gloo,cuda:nccl" does, unless it already can.

    Without `_register_backend`: refuse a group that cannot, and ask for that one.
    """
    group: Any = dist.group.WORLD
    if torch.device("cpu") in group._device_types:
        return
    store: Any = dist.PrefixStore("samestep/gloo", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    gloo = dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size(), dist.default_pg_timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)


def list_gloo_sockets() -> list[int]:
    """Return the file descriptors of the connections of all process groups of gloo in this process, on Linux.

    They are what gloo's threads wait for, with epoll. Unlike other libraries, gloo lets executed programs inherit it.
    Without it: the sockets that are open after `init_process_group`, and not before.
    """
    fds = []
    for path in Path("/proc/self/fdinfo").glob("*"):
        with suppress(OSError):  # that of the directory itself is closed by now
            lines = read_text(path).splitlines()
            if any(line.startswith("flags:") and int(line.split()[1], 8) & os.O_CLOEXEC for line in lines):
                continue
            waited_for = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
            fds += [fd for fd in waited_for if stat.S_ISSOCK(os.fstat(fd).st_mode)]
    return fds


def break_gloo_connections() -> None:
    """Let gloo report that every other rank is gone, in any thread: its waits then raise RuntimeError.

    Without this, a wait for a host that has vanished from the network does not end.
    """
    for fd in list_gloo_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            connection.getpeername()  # raises for the socket at which gloo listens
            connection.shutdown(socket.SHUT_RDWR)


def abort_nccl() -> None:
    """Let NCCL's kernels end that wait for other ranks, with wrong results, in any thread.

    Call it before the process group is destroyed. It does nothing if there is none, or if it was called before.
    Without `_get_backend`: `_abort_process_group`, which also destroys the group, so that a thread cannot call it while
    another one waits.
    """
    group: Any = dist.group.WORLD
    if group is not None:
        group._get_backend(torch.device("cuda")).abort()


def reset_group_names() -> None:
    """Let the next process group have the name that it has on other ranks, also if the creation of one has failed.

    Without it, ranks that meet after a death wait forever.
    """
    dist.distributed_c10d._world.group_count = 0


def set_timeout(timeout: timedelta) -> None:
    """Set the limit for exchanges of the process group."""
    dist.distributed_c10d._set_pg_timeout(timeout)


# --- DTensor (FSDP2) --------------------------------------------------------------------------------------------------


def get_local(tensor: Tensor) -> Tensor:
    """Return this rank's slice of a sharded tensor, with its version and memory; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def is_sharded(tensor: Any) -> bool:
    """Return whether a value is a tensor of which each rank has a slice (`DTensor`)."""
    return hasattr(tensor, "_local_tensor")


def gather_whole(tensor: Any) -> Tensor:
    """Return a sharded tensor as a whole, on all ranks; any other tensor as it is."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def find_first_row(tensor: Any) -> int:
    """Return the index of the first row that this rank has of a sharded tensor."""
    num_rows = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(num_rows * tensor.device_mesh.get_local_rank(), tensor.shape[0])  # type: ignore[no-any-return]


def shard_like(param: Any, local: Tensor) -> Tensor:
    """Return a tensor that is sharded as `param` is, of which this rank's slice is `local`."""
    from torch.distributed.tensor import DTensor

    sharded: Tensor = DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return sharded
