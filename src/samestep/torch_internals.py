"""The private names of torch that samestep depends on, in one place.

None has a public equivalent that is as fast or does the same. If a torch release changes one of them, the test of it in
`tests/test_torch_internals.py` fails. It says what to use instead.
"""

import os
import socket
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from samestep.files import read_text

# Tensor -> how often its storage was written through it, `.data` excepted. There is no public accessor.
read_version: Callable[[Tensor], int] = attrgetter("_version")

# Module -> its own buffers by name, None included, as a live dict. `named_buffers` leaves out those that are None.
get_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")

# Module -> the names of its own buffers with `persistent=False`. `state_dict` leaves them out, but may be overridden.
get_non_persistent: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")

# The C++ function that torch.autograd.backward calls. The Python wrapper repeats checks that GradientPass has made;
# they take 30 us, a tenth of a small model's step.
run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward

# Tensors, order -> the norm of each. The kernel with which torch.nn.utils.get_total_norm begins; its bits differ from
# those of torch.linalg.vector_norm on a GPU.
compute_norms: Callable[[list[Tensor], float], Sequence[Tensor]] = torch._foreach_norm


# Adds lists of tensors, pair by pair, in place. A call per tensor takes longer than the sum of a small gradient.
add_all: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_add_


def group_by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group tensors by device and dtype, as torch.nn.utils.get_total_norm does: the groups' order follows from hashes.

    Returns:
        Per group, the numbers of its tensors.
    """
    if not tensors:
        return []
    groups = torch.utils._foreach_utils._group_tensors_by_device_and_dtype([[*tensors]], with_indices=True)
    return [indices for _, indices in groups.values()]


_norm_watchers: list[Callable[[Sequence[Tensor]], None]] = []
_decorated: Any = torch.nn.utils.clip_grad._get_total_norm
_total_norm_cell = _decorated.__closure__[0]  # where the decorator keeps the function
_get_total_norm: Callable[..., Tensor] = _total_norm_cell.cell_contents


def watch_norms(look: Callable[[Sequence[Tensor]], None]) -> Callable[[], None]:
    """Call `look` with the tensors of each `torch.nn.utils.clip_grad_norm_` or `get_total_norm`, however the script has
    imported it.

    Returns:
        A function that ends this.
    """
    _total_norm_cell.cell_contents = _look_and_get_total_norm
    _norm_watchers.append(look)
    return lambda: _norm_watchers.remove(look)


def _look_and_get_total_norm(tensors: Any, *args: Any, **options: Any) -> Tensor:
    tensors = [tensors] if isinstance(tensors, Tensor) else [*tensors]
    for look in _norm_watchers:
        look(tensors)
    return _get_total_norm(tensors, *args, **options)


@torch.no_grad()
def get_total_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Same as `torch.nn.utils.get_total_norm`, which nothing watches."""
    return _get_total_norm(tensors, norm_type)


_scaler_watchers: list[Callable[[Optimizer], None]] = []
_unscale: Callable[..., Any] = torch.amp.GradScaler._unscale_grads_


def watch_scalers(look: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Call `look` with the optimizer of whose gradients a `torch.amp.GradScaler` is about to find infinite ones.

    Returns:
        A function that ends this.
    """
    torch.amp.GradScaler._unscale_grads_ = _look_and_unscale  # type: ignore[assignment, method-assign]
    _scaler_watchers.append(look)
    return lambda: _scaler_watchers.remove(look)


def _look_and_unscale(scaler: Any, optimizer: Optimizer, *args: Any, **options: Any) -> Any:
    for look in _scaler_watchers:
        look(optimizer)
    return _unscale(scaler, optimizer, *args, **options)


# The iterator over a DataLoader. `_next_index` returns the indices of the next batch, `_reset` begins another pass.
LoaderIterator: Any = torch.utils.data.dataloader._BaseDataLoaderIter

# The process groups of this process, as the keys of a dict. Each counts the collectives that it has begun.
_get_groups: Callable[[Any], dict[Any, Any]] = attrgetter("_world.pg_map")

_get_storage_pointer: Callable[[Any], int] = attrgetter("_cdata")


def count_collectives() -> int | None:
    """How many collectives this process has begun, in all process groups; None if a backend does not count them."""
    try:
        groups = _get_groups(dist.distributed_c10d) if dist.is_initialized() else {}
        return sum(int(group._get_sequence_number_for_group()) for group in groups)
    except RuntimeError:
        return None


def get_storage(tensor: Tensor) -> int:
    """The address of the tensor's storage object: equal for tensors that share memory."""
    return _get_storage_pointer(tensor.untyped_storage())


def count_storage_uses(storage: int) -> int:
    """How many tensors use the storage that `get_storage` returned."""
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


# --- an iterator over a DataLoader with workers ---------------------------------------------------------------------

LOOK_S = 0.2  # how long an iterator waits for data before it checks whether the workers are alive


def count_received(iterator: Any) -> int:
    """How many batches the iterator has returned in this pass."""
    return int(iterator._rcvd_idx)


def list_worker_tasks(iterator: Any) -> list[tuple[BaseProcess, list[int]]]:
    """The workers, each with the numbers of the batches that were requested from it and not returned yet."""
    tasks: dict[int, tuple[Any, ...]] = iterator._task_info  # batch -> (worker,), or (worker, data) once it has arrived
    return [
        (process, [k for k, info in tasks.items() if info == (number,)])
        for number, process in enumerate(iterator._workers)
    ]


def watch_workers(iterator: Any) -> None:
    """Let the iterator look for dead workers every `LOOK_S` while it waits, in place of torch's SIGCHLD handler.

    That handler raises wherever the main thread is. Python prints an exception in a weak reference's callback or in
    `__del__`, and goes on; one in the script's own code ends a step half-way.
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


def end_on_feeder_error(end: Callable[[Exception], None]) -> None:
    """In a worker: call `end` if a result cannot be sent, in place of a traceback. The result is lost."""

    def report(error: Exception, result: object) -> None:
        end(error)

    Queue._on_queue_feeder_error = staticmethod(report)  # type: ignore[attr-defined]


def shut_down_workers(iterator: Any, limit_s: float) -> bool:
    """End the workers, and return True; False if one of them has held a lock for `limit_s`.

    torch sets an event, whose lock each worker takes at times, and waits for the workers' remaining data. A worker that
    was killed while it held the lock never releases it, and torch would wait forever.
    """
    lock = iterator._workers_done_event._cond
    if not lock.acquire(True, limit_s):
        return False
    lock.release()
    iterator._shutdown_workers()
    return True


def abandon_workers(iterator: Any) -> None:
    """Release torch's resources for workers that will be killed, without communicating with them."""
    forget_workers(iterator)
    _drop_pids(iterator)
    for queue in iterator._index_queues:
        queue.cancel_join_thread()
        queue.close()
    if hasattr(iterator, "_pin_memory_thread"):
        iterator._pin_memory_thread_done_event.set()


def _drop_pids(iterator: Any) -> None:
    """Prevent torch's SIGCHLD handler from raising for these workers."""
    if iterator._worker_pids_set:
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def forget_workers(iterator: Any) -> None:
    """Prevent torch's exit hook from stopping the workers."""
    iterator._shutdown = True


def add_gloo() -> None:
    """Let the process group exchange tensors in host memory, as "cpu:gloo,cuda:nccl" does, unless it already can."""
    group: Any = dist.group.WORLD
    if torch.device("cpu") in group._device_types:
        return
    store: Any = dist.PrefixStore("samestep/gloo", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    gloo = dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size(), dist.default_pg_timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)


def list_gloo_sockets() -> list[int]:
    """Return the file descriptors of the connections of all process groups of gloo in this process, on Linux.

    They are what gloo's threads wait for, with epoll. Unlike other libraries, gloo lets executed programs inherit it.
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
    """
    group: Any = dist.group.WORLD
    if group is not None:
        group._get_backend(torch.device("cuda")).abort()


def reset_group_names() -> None:
    """Let the next process group have the name that it has on other ranks, also if the creation of one has failed."""
    dist.distributed_c10d._world.group_count = 0


def set_timeout(timeout: timedelta) -> None:
    """Set the limit for exchanges of the process group."""
    dist.distributed_c10d._set_pg_timeout(timeout)


# --- fully_shard (FSDP2) ----------------------------------------------------------------------------------------------


def get_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, with its version and memory; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def is_sharded(tensor: Any) -> bool:
    """Return whether a value is a tensor of which each rank holds a part (`DTensor`)."""
    return hasattr(tensor, "_local_tensor")


def is_mixed(error: BaseException) -> bool:
    """Return whether an operation got a sharded and a whole tensor."""
    return isinstance(error, RuntimeError) and "got mixed torch.Tensor and DTensor" in str(error)


def gather_whole(tensor: Any) -> Tensor:
    """Return a sharded tensor as a whole, on all ranks; any other tensor as it is."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def find_first_row(tensor: Any) -> int:
    """Return the index of the first row that this rank holds of a sharded tensor."""
    num_rows = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(num_rows * tensor.device_mesh.get_local_rank(), tensor.shape[0])  # type: ignore[no-any-return]


def shard_like(param: Any, local: Tensor) -> Tensor:
    """Return a tensor that is sharded as `param` is, of which this rank's part is `local`."""
    from torch.distributed.tensor import DTensor

    sharded: Tensor = DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return sharded


def is_shardable(dtype: torch.dtype) -> bool:
    """Return whether `fully_shard` accepts parameters of this dtype. In torch 2.11, it must be one of gradients."""
    has_gradients = dtype.is_floating_point or dtype.is_complex
    return has_gradients or torch.torch_version.TorchVersion(torch.__version__) >= "2.12"


def shard_module(module: nn.Module, mesh: Any) -> None:
    """Call `fully_shard` on a module, after those inside it."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=mesh)


class ShardedUnit:
    """Parameters that `fully_shard` gathers, frees and reduces together.

    Args:
        module: a module on which `fully_shard` was called.
        param_group: one of its groups of parameters.

    Attributes:
        path: the path of the module in the model.
    """

    def __init__(self, path: str, module: Any, param_group: Any) -> None:
        self.path = path
        self._module = module
        self._group = param_group
        self._backward_end = _BackwardEnd(lambda: param_group.post_backward())  # as it is then: `intercept` replaces it

    @property
    def params(self) -> list[nn.Parameter]:
        """The sharded parameters."""
        return [each.sharded_param for each in self._group.fsdp_params]

    def free_gathered(self) -> None:
        """Free the whole parameters, if they are gathered. The next ones are frozen as the sharded ones are now."""
        self._backward_end.forget()
        self._module.reshard()
        for each in self._group.fsdp_params:
            if hasattr(each, "_unsharded_param"):  # created once, by the first gathering
                each._unsharded_param.requires_grad_(each.sharded_param.requires_grad)

    def intercept(self, before: Callable[[], None], reduce: Callable[[Tensor, Any], None]) -> None:
        """Replace the reduction of this unit's gradients.

        Args:
            before: called when a backward pass has computed the unit's gradients.
            reduce: called with these, flat, as one chunk per rank, and the process group. It must not change `.grad`.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

        class Replacement(ReduceScatter):  # type: ignore[misc]
            def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
                return torch.empty(*size, dtype=dtype, device=device)

            def __call__(
                self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
            ) -> None:
                reduce(input_tensor, group)

        self._module.set_custom_reduce_scatter(Replacement())
        # A sum instead of an average. The factor would be applied before and after the reduction.
        self._module.set_gradient_divide_factor(1.0)
        self._module.set_force_sum_reduction_for_comms(True)
        post_backward = self._group.post_backward

        def complete_and_reduce(*unused: Any) -> None:
            before()
            post_backward(*unused)

        self._group.post_backward = complete_and_reduce
        self._await_backward_by_nodes()

    def _await_backward_by_nodes(self) -> None:
        """Keep FSDP2 from adding a node to the graph of a backward pass, which would change the order of a sum.

        FSDP2 passes the unit's inputs through a node of its own, whose backward reduces the gradients. There, the
        gradients of an input that the unit uses twice are added to each other before that of a use outside the unit.
        Hooks of the unit's own nodes find out as early when its backward is complete, and add nothing.
        """
        group = self._group
        post_forward = group.post_forward
        first: int | None = None  # number of the forward pass's first node, if gradients of its inputs are needed

        def begin(args: Any, kwargs: Any) -> tuple[Any, Any]:
            nonlocal first
            is_needed = torch.is_grad_enabled() and _find_differentiable((args, kwargs))
            first = torch._C._autograd._get_sequence_nr() if is_needed else None
            return args, kwargs

        def end(module: Any, inputs: Any, output: Any) -> Any:
            nonlocal first
            result = post_forward(module, inputs, output)
            if first is not None and torch.is_grad_enabled():
                roots = [tensor.grad_fn for tensor in _find_differentiable(result)]
                self._backward_end.add(self._find_last_nodes(roots, first))
                first = None
            return result

        group._register_post_backward_hook = begin
        group.post_forward = end

    def _find_last_nodes(self, roots: Iterable[Any], first: int) -> list[Any]:
        """Return the nodes that have run when a backward pass has computed the gradients of parameters and inputs.

        They are the nodes that use tensors from outside of the unit, and those that accumulate its parameters'
        gradients.

        Args:
            roots: the nodes of the outputs.
            first: number of the first node of the unit's forward pass. Nodes of earlier ones have lower numbers.
        """
        own = {id(each._unsharded_param) for each in self._group.fsdp_params}
        last: dict[Any, None] = {}
        seen = set[Any]()
        stack = [node for node in roots if node is not None and node._sequence_nr() >= first]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if type(following).__name__ == "AccumulateGrad":
                    last[following if id(following.variable) in own else node] = None
                elif following._sequence_nr() < first:
                    last[node] = None
                else:
                    stack.append(following)
        return [*last]

    def complete_grads(self, *, keep: bool) -> list[bool]:
        """Give a gradient of -0.0, which changes no sum, to parameters without one; if not `keep`, to all.

        FSDP2 would reduce only the parameters that have a gradient on this rank.

        Returns:
            Per parameter, whether it had a gradient that is kept.
        """
        had = []
        for each in self._group.fsdp_params:
            whole = getattr(each, "_unsharded_param", None)
            if whole is None or not whole.requires_grad:
                had.append(False)
                continue
            if whole.grad is None:
                whole.grad = torch.full_like(whole, -0.0)
                had.append(False)
                continue
            if whole.grad.layout is not torch.strided:
                whole.grad = whole.grad.to_dense()
            if not keep:
                whole.grad = torch.full_like(whole.grad, -0.0)
            had.append(keep)
        return had

    def split(self, flat: Tensor) -> list[Tensor | None]:
        """Return the parts of this rank's chunk that belong to each parameter; None for frozen ones."""
        offset = 0
        parts: list[Tensor | None] = []
        for each in self._group.fsdp_params:
            if not each.sharded_param.requires_grad:
                parts.append(None)
                continue
            parts.append(flat.as_strided(each.sharded_size, each.contiguous_sharded_stride, offset))
            offset += each.padded_sharded_param_size.numel()
        return parts


def _find_differentiable(value: Any) -> list[Any]:
    """Return the tensors in a structure of which a backward pass computes gradients."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor) and each.requires_grad]


class _BackwardEnd:
    """Calls `act` when a backward pass has run the last nodes of all forward passes since the previous call."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._num_left = 0
        self._handles: list[Any] = []

    def add(self, nodes: Iterable[Any]) -> None:
        """Note the last nodes of a forward pass."""
        new = [node.register_hook(self._count) for node in nodes]
        self._handles += new
        self._num_left += len(new)

    def _count(self, *_: Any) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self.forget()
            self._act()

    def forget(self) -> None:
        """Forget all nodes. Those that accumulate gradients outlive their graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._num_left = 0


def list_units(module: nn.Module) -> list[ShardedUnit]:
    """Return the units of a model on which `fully_shard` was called, in the order of its modules."""
    from torch.distributed.fsdp import FSDPModule

    units = []
    for path, part in module.named_modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one
            if groups is None:
                groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
            units += [ShardedUnit(path, part, group) for group in groups]
    return units
