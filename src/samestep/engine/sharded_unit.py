"""The units of a model that torch's `fully_shard` (FSDP2) gathers and frees. Uses public names of torch only.

FSDP2 gathers the parameters when a unit runs, and again for its backward pass. Its reduction of gradients is off: a
unit passes on the whole gradients, and frees the parameters, as soon as the unit's backward pass is complete.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from samestep.errors import UsageError
from samestep.torch_internals import get_local

Edge = tuple[Any, int]  # a node of autograd's graph, and the number of one of its outputs in the forward pass


class ShardedUnit:
    """The parameters that `fully_shard` gathers together. Calls it on a module, after those inside it.

    FSDP2 passes the unit's inputs through a node of its own, whose backward finds out that the unit's backward pass is
    complete. There, the gradients of an input that the unit uses twice are added to each other before that of a use
    outside the unit, and the sum has other bits. So the unit gets its inputs without this node. Hooks of the unit's own
    nodes find out as early that its backward pass is complete.

    Args:
        mesh: the ranks, as a `DeviceMesh`.

    Attributes:
        name: for messages.
        receive: to call when a backward pass has computed the unit's gradients. None: refuse backward passes.
    """

    def __init__(self, name: str, module: nn.Module, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        self.name = name
        self.receive: Callable[[], None] | None = None
        self._inputs: tuple[Any, Any] = (), {}
        self._edges: set[Edge] = set()  # of the inputs
        self._whole: list[nn.Parameter] = []
        self._handles: list[Any] = []
        self._num_left = 0  # nodes that have not run yet in the backward pass
        hide: Callable[..., Any] = torch.compiler.disable
        # In this order before each forward pass: _note_inputs, FSDP2, _restore_inputs.
        module.register_forward_pre_hook(hide(self._restore_inputs), prepend=True, with_kwargs=True)
        self._module: Any = fully_shard(module, mesh=mesh)
        module.register_forward_pre_hook(hide(self._note_inputs), prepend=True, with_kwargs=True)
        module.register_forward_hook(hide(self._note_outputs))
        self._module.set_requires_gradient_sync(False)
        owners = {id(getattr(owner, key)): (owner, key) for owner, key in _list_owners(module)}
        self._owners = [*owners.values()]
        self._num_chunks = mesh.size()

    @property
    def params(self) -> list[nn.Parameter]:
        """The sharded parameters, while they are not gathered."""
        return [getattr(owner, key) for owner, key in self._owners]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the trained parameters."""
        return next(param.dtype for param in self.params if param.requires_grad)

    @property
    def has_grads(self) -> bool:
        """Whether there are whole gradients that were not taken yet."""
        return any(param.grad is not None for param in self._whole)

    def free_gathered(self) -> None:
        """Free the whole parameters, if they are gathered, and forget the forward passes. `requires_grad` of the next
        ones is that of the sharded ones now.
        """
        for handle in self._handles:  # nodes that accumulate gradients outlive their graph
            handle.remove()
        self._handles.clear()
        self._num_left = 0
        self._module.reshard()
        for whole, param in zip(self._whole, self.params, strict=bool(self._whole)):
            whole.requires_grad_(param.requires_grad)

    def take_grads(self) -> list[Tensor | None]:
        """Return the whole gradients, of which this unit keeps none, and free the whole parameters."""
        grads = [param.grad for param in self._whole] or [None] * len(self._owners)
        for param in self._whole:
            param.grad = None
        self.free_gathered()
        return grads

    def pack(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the gradients of the trained parameters as one flat chunk per rank, a row each.

        An absent gradient becomes -0.0, which changes no sum.
        """
        sizes = self._find_sizes()
        flat = torch.full((self._num_chunks, sum(sizes)), -0.0, dtype=self.dtype, device=self.params[0].device)
        for grad, chunks, size in zip(grads, torch.split(flat, sizes, dim=1), sizes, strict=True):
            if grad is not None and size:
                values = (grad if grad.layout is torch.strided else grad.to_dense()).reshape(-1)
                num_full, rest = divmod(len(values), size)
                chunks[:num_full] = values[: num_full * size].view(num_full, size)
                chunks[num_full : num_full + 1, :rest] = values[num_full * size :]
        return flat

    def split(self, chunk: Tensor) -> list[Tensor | None]:
        """Return the slices of this rank's chunk that belong to each parameter; None for frozen ones."""
        sizes = self._find_sizes()
        slices = zip(self.params, torch.split(chunk, sizes), sizes, strict=True)
        return [values[: get_local(param).numel()].view(get_local(param).shape) if size else None
                for param, values, size in slices]  # fmt: skip

    def _find_sizes(self) -> list[int]:
        """Return the number of elements of each parameter in a chunk; 0 for frozen ones."""
        return [
            ceil(param.shape[0] / self._num_chunks) * param.shape[1:].numel() if param.requires_grad else 0
            for param in self.params
        ]

    def _note_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs = args, kwargs
        self._edges = {*_list_edges(self._inputs)} if torch.is_grad_enabled() else set()

    def _restore_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._whole = self.params
        inputs = self._inputs
        self._inputs = (), {}
        return inputs

    def _note_outputs(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # In a backward pass, an activation checkpoint computes it again.
        if self.receive is not None or not torch.is_grad_enabled():
            return
        for tensor in _find_differentiable(output):
            tensor.register_hook(self._refuse_outside)
        # Without differentiable inputs, its backward pass is complete at the end of that of the model.
        new = [node.register_hook(self._count) for node in self._find_last_nodes(output)] if self._edges else []
        self._handles += new
        self._num_left += len(new)

    def _refuse_outside(self, _: Tensor) -> None:
        if self.receive is None:
            raise UsageError(
                "a backward pass ran outside of step.backward (loss.backward(), or torch.autograd.grad for a gradient "
                'penalty), which shard="fsdp2" does not support: use step.backward alone, or shard="optimizer"',
                code="SS609",
            )

    def _count(self, *_: Any) -> None:
        self._num_left -= 1
        if self._num_left == 0 and self.receive is not None:
            self.receive()

    def _find_last_nodes(self, output: Any) -> list[Any]:
        """Return the nodes that have run when a backward pass has computed the gradients of parameters and inputs.

        They are the nodes that use the unit's inputs, and those that accumulate its parameters' gradients.
        """
        own = {id(param) for param in self._whole}
        last: dict[Any, None] = {}
        stack = [node for node, number in _list_edges(output) if (node, number) not in self._edges]
        seen = {*stack}
        while stack:
            node = stack.pop()
            for following, number in node.next_functions:
                if following is None:
                    continue
                if (following, number) in self._edges:
                    last[node] = None
                elif type(following).__name__ == "AccumulateGrad":
                    last[following if id(following.variable) in own else node] = None
                elif following not in seen:
                    seen.add(following)
                    stack.append(following)
        return [*last]


@dataclass(frozen=True, eq=False)
class ShardedModels:
    """The models of a run whose parameters are sharded.

    Attributes:
        units: their units.
        process_group: the ranks.
        block_size: ranks per block; the ranks of a block are on one host.
        stream: for the exchanges of gradients on a GPU; None on the CPU.
    """

    units: Sequence[ShardedUnit]
    process_group: Any
    block_size: int
    stream: torch.cuda.Stream | None

    def free_gathered(self) -> None:
        """Free whole parameters. A forward pass without a backward pass leaves some, and an update would not change
        them.
        """
        for unit in self.units:
            unit.free_gathered()

    def direct(self, receive: Callable[[int], None] | None) -> None:
        """Call `receive` with the number of each unit whose gradients a backward pass has computed from now on."""
        for k, unit in enumerate(self.units):
            unit.receive = None if receive is None else partial(receive, k)


def _list_owners(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the parameters of a module, without those of units inside it, as their module and name."""
    from torch.distributed.fsdp import FSDPModule

    for key, _ in module.named_parameters(recurse=False):
        yield module, key
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _list_owners(child)


def _find_differentiable(value: Any) -> list[Tensor]:
    """Return the tensors in a structure of which a backward pass computes gradients."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor) and each.requires_grad]


def _list_edges(value: Any) -> list[Edge]:
    """Return the edges of the graph at which the tensors in a structure are computed."""
    edges: list[GradientEdge] = [get_gradient_edge(tensor) for tensor in _find_differentiable(value)]
    return [(edge.node, edge.output_nr) for edge in edges]
