"""Builds a model of which each rank keeps its part only: `Run.sharded_init`.

The script's code runs as it does without sharding: on real tensors, in its order, with its random draws. So the values
are those of an unsharded model. A model on the meta device, whose parts are initialized later, would have other values.
But a parameter is whole only while its module creates its parameters, or while an operation uses it. Then each rank
keeps a part of its memory, and frees the rest. An operation on a parameter that is not whole gathers it, unless it
overwrites all of it, as `normal_` does. So a second initialization, such as `model.apply(...)`, works, too.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from samestep.errors import UsageError
from samestep.hashing import hash_bytes, hash_pieces
from samestep.tagged import view_bytes
from samestep.torch_internals import count_memory_uses, get_buffers, get_memory, watch_operations
from samestep.world.group import Group

# They overwrite the tensor on which they are called, without reading it.
OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in ("bernoulli", "copy", "exponential", "fill", "log_normal", "normal", "random", "uniform", "zero")
)
NAMES = ("aten::alias", "aten::detach")  # they only return another name of a tensor
# They read memory without an operation.
READS = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__reduce_ex__,
}
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# What a script may ask of a parameter that is not whole. Attributes may be read, except those that are views.
ASKED = {
    torch.Tensor.__hash__,
    torch.Tensor.__len__,
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.get_device,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.ndimension,
    torch.Tensor.nelement,
    torch.Tensor.numel,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.requires_grad_,
    torch.Tensor.size,
    torch.Tensor.stride,
}
VIEWS = ("H", "T", "data", "imag", "mH", "mT", "real")

COPY_BYTES = 1 << 16
ALIGNMENT = 16  # bytes of the largest element


class PartialParameter(nn.Parameter):
    """The class of a parameter of which this rank keeps a part, outside of the block that built it."""

    def begin(self: nn.Parameter) -> None:
        """Make a parameter one of this class."""
        self.__class__ = PartialParameter

    def end(self: nn.Parameter) -> None:
        """Make it an ordinary one."""
        self.__class__ = nn.Parameter

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartialParameter(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attribute = type(func).__name__ == "method-wrapper" and func.__self__.__name__ not in VIEWS
        if not is_attribute and func not in ASKED:
            name = getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", repr(func))
            raise UsageError(
                f"a parameter that run.sharded_init has divided was used ({name}), and this rank has a part of it: "
                "initialize and copy models inside of the with block, leave moves to the device to run.prepare, and "
                "then take parameters from model.parameters()",
                code="SS611",
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@dataclass
class _Part:
    """The memory of a parameter that is not whole.

    Attributes:
        num_bytes: the size of the whole.
        own: this rank's bytes; those of the last ranks are padded.
        mark: a hash of the whole content.
    """

    num_bytes: int
    own: Tensor
    mark: str


class ShardedInit:
    """Divides parameters among the ranks while the script builds them. See the module.

    All ranks must run the same operations on them.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._whole: WeakKeyDictionary[torch.UntypedStorage, None] = WeakKeyDictionary()
        self._parts: WeakKeyDictionary[torch.UntypedStorage, _Part] = WeakKeyDictionary()
        self._params: dict[int, ref[nn.Parameter]] = {}
        self._builder: ref[nn.Module] | None = None  # the module that creates its parameters
        self._built: WeakKeyDictionary[torch.UntypedStorage, None] = WeakKeyDictionary()  # these parameters
        self._is_busy = False

    @contextmanager
    def building(self) -> Iterator[None]:
        """Divide the parameters that are created inside the block."""
        for param in self._list_params():
            PartialParameter.end(param)
        try:
            with ExitStack() as stack:
                stack.callback(register_module_parameter_registration_hook(self._take_param).remove)
                stack.callback(register_module_module_registration_hook(self._take_module).remove)
                stack.enter_context(watch_operations(self._before, self._after))
                stack.enter_context(_Reads(self))
                yield
        finally:
            self._builder = None
            self._built.clear()
            self._end()

    def _list_params(self) -> list[nn.Parameter]:
        return [param for each in self._params.values() if (param := each()) is not None]

    def _end(self) -> None:
        """Divide what is whole, and let the parameters refuse to be read."""
        holders: dict[torch.UntypedStorage, list[nn.Parameter]] = {}
        for param in self._list_params():
            holders.setdefault(param.untyped_storage(), []).append(param)
        self._divide([storage for storage in self._whole if storage in holders])
        gc.collect()  # so that all ranks have the same tensors
        for storage in [*self._parts]:
            # Another tensor has this memory, which would be read without a check.
            if len(holders.get(storage, ())) < count_memory_uses(storage):
                self._make_whole(storage)
        self._whole.clear()
        for storage, params in holders.items():
            for param in params if storage in self._parts else ():
                PartialParameter.begin(param)

    # --- in the block -----------------------------------------------------------------------------------------------

    def _take_param(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """Note a parameter that a module gets. The parameters of the module before it are complete."""
        if type(param) is not nn.Parameter or param.is_meta or param.layout is not torch.strided:
            return
        if self._builder is None or self._builder() is not module:
            self._builder = ref(module)
            self._built.clear()
            self._divide([*self._whole])
        self._note(param)
        self._built[param.untyped_storage()] = None

    def _take_module(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        """Note the parameters of a module that was copied, which calls no hook."""
        for param in [] if part is None else part.parameters():
            if param.untyped_storage() in self._whole or param.untyped_storage() in self._parts:
                self._note(param)

    def _note(self, param: nn.Parameter) -> None:
        self._params[id(param)] = ref(param)
        storage = param.untyped_storage()
        if storage not in self._parts:
            self._whole[storage] = None

    def _before(self, operation: str, tensors: list[Tensor]) -> None:
        """Make whole what an operation uses, and divide what it does not use."""
        if self._is_busy or operation in NAMES:
            return
        used = [self._find(each) for each in tensors]
        if all(each is None for each in used):
            return
        self._divide([each for each in self._whole if each not in used and each not in self._built])
        for number, (tensor, storage) in enumerate(zip(tensors, used, strict=True)):
            if storage is not None and storage in self._parts:
                overwrites = number == 0 and operation in OVERWRITES and storage not in used[1:]
                is_read = not overwrites or tensor.nbytes != self._parts[storage].num_bytes
                self._make_whole(storage, is_read=is_read)

    def _after(self, operation: str, tensors: list[Tensor], result: Any) -> None:
        """Note copies of parameters, such as those of `copy.deepcopy`."""
        if not self._is_busy and operation == "aten::clone" and self._find(tensors[0]) is not None:
            self._whole[result.untyped_storage()] = None

    def _find(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """Return the memory of a tensor if it is that of a parameter."""
        if tensor.layout is not torch.strided or tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        return storage if storage in self._whole or storage in self._parts else None

    def read(self, tensors: Iterable[Tensor]) -> None:
        """Make whole what is read without an operation."""
        self._before("", [*tensors])

    def note_moved(self, param: Any) -> None:
        """Note that a parameter has got other memory, such as by `model.to(...)`."""
        if id(param) in self._params:
            self._divide([*self._whole])
            self._note(param)

    def _divide(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Keep this rank's part of each memory, and free the rest."""
        with self._working():
            for storage in storages:
                del self._whole[storage]
                if not storage.resizable():  # NumPy has it, too
                    continue
                content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                size = self._find_size(len(content))
                own = torch.zeros_like(content[:size])
                mine = content[self._group.rank * size :][:size]
                own[: len(mine)] = mine
                copies = (content[at : at + COPY_BYTES].clone() for at in range(0, len(content), COPY_BYTES))
                mark = hash_pieces(view_bytes(each) for each in copies)  # of copies: see the check above
                self._parts[storage] = _Part(len(content), own, mark)
                storage.resize_(0)

    def _find_size(self, num_bytes: int) -> int:
        """Return the bytes of each rank's part, which holds whole elements."""
        return -(-num_bytes // (self._group.world_size * ALIGNMENT)) * ALIGNMENT

    def _make_whole(self, storage: torch.UntypedStorage, *, is_read: bool = True) -> None:
        """Allocate a memory, with its content if that will be read."""
        part = self._parts.pop(storage)
        self._whole[storage] = None
        with self._working():
            storage.resize_(part.num_bytes)
            if is_read:
                content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                gathered = self._group.gather_parts(part.own)
                content.copy_(gathered[: part.num_bytes])
                gathered.untyped_storage().resize_(0)  # gloo's thread may refer to it for a moment longer

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Look at no operation inside the block."""
        was_busy, self._is_busy = self._is_busy, True
        try:
            with torch.no_grad():
                yield
        finally:
            self._is_busy = was_busy

    # --- after it ---------------------------------------------------------------------------------------------------

    def describe(self, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
        """Return a hash of each model's divided parameters. It is the same on all ranks if they have built the same."""
        marks = {
            name: [self._parts[get_memory(param)].mark for param in module.parameters() if is_partial(param)]
            for name, module in modules.items()
        }
        return {f"the initial value of {name}": hash_bytes(repr(of_one).encode()) for name, of_one in marks.items()}

    def holds(self, param: nn.Parameter) -> bool:
        """Return whether a parameter is divided, or will be, and has its memory for itself."""
        storage = get_memory(param)
        is_held = storage in self._parts or storage in self._whole
        num_bytes = self._parts[storage].num_bytes if storage in self._parts else storage.nbytes()
        return is_held and param.is_contiguous() and param.numel() * param.element_size() == num_bytes

    def set_part(self, param: nn.Parameter, read: Callable[[int, int], Tensor], mark: str) -> None:
        """Set this rank's part of a parameter.

        Args:
            read: returns the elements between two numbers.
            mark: names the values, the same on all ranks.
        """
        storage = get_memory(param)
        if storage in self._whole:
            self._divide([storage])
        if storage not in self._parts:  # NumPy has it, too
            param.data.copy_(read(0, param.numel()).view_as(param))
            return
        part = self._parts[storage]
        num_elements = len(part.own) // param.element_size()
        first = min(self._group.rank * num_elements, param.numel())
        with self._working():
            own = read(first, min(first + num_elements, param.numel())).to(param.dtype)
            part.own.view(param.dtype)[: len(own)] = own
        part.mark = mark

    @contextmanager
    def whole(self, params: Iterable[nn.Parameter]) -> Iterator[None]:
        """Make parameters whole, on the device of this rank, for a block that replaces them.

        After the block, they have no memory.
        """
        held = [param for param in params if is_partial(param)]
        storages = {get_memory(param): None for param in held}
        for param in held:
            PartialParameter.end(param)
        for storage in storages:
            self._make_whole(storage)
            del self._whole[storage]
        for param in held:
            param.data = param.data.to(self._group.device)
        yield
        for param in held:
            param.untyped_storage().resize_(0)
            PartialParameter.begin(param)


def is_partial(thing: Any) -> bool:
    """Return whether a parameter, or one of a model, is not whole."""
    if isinstance(thing, nn.Module):
        return any(is_partial(param) for param in thing.parameters())
    return isinstance(thing, PartialParameter)


def move(module: nn.Module, device: torch.device) -> None:
    """Move a model to a device, without the parameters that are not whole."""
    if not is_partial(module):
        module.to(device)
        return
    for part in module.modules():
        for param in part.parameters(recurse=False):
            if not is_partial(param):
                param.data = param.data.to(device)
        buffers = get_buffers(part)
        buffers |= {name: each.to(device) for name, each in buffers.items() if each is not None}


class _Reads(TorchFunctionMode):
    """Watches what reads the memory of tensors, or replaces it, without an operation."""

    def __init__(self, init: ShardedInit) -> None:
        super().__init__()
        self._init = init

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in READS:
            self._init.read(each for each in args if isinstance(each, Tensor))
        result = func(*args, **(kwargs or {}))
        if func == SET_DATA:
            self._init.note_moved(args[0])
        return result
