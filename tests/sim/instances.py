"""Copies of all modules of samestep, one for each simulated process at a time.

A copy imports simulated standard modules, because its `__import__` returns them. The library itself is unchanged.
"""

import builtins
import copy
import functools
import gc
import importlib
import itertools
import os
import pickle
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from sim.disk import Disk
from sim.network import Distributed, LocalSockets, Network, connect
from sim.planted import SOURCE, Planted
from sim.scheduler import Process
from sim.standard_library import EPOCH_S, Facade, Owner, build_modules, do_nothing

_STATE = (
    list, dict, set, itertools.count, weakref.WeakSet, weakref.WeakValueDictionary, bool, int, float, str, type(None),
)  # fmt: skip


@functools.cache
def _compile(name: str, planted: Planted | None = None) -> tuple[CodeType, str, bool] | None:
    """Return the code of a module, its file, and whether it is a package; None if there is none."""
    base = SOURCE.parent / name.replace(".", "/")
    for path, is_package in ((base / "__init__.py", True), (base.with_suffix(".py"), False)):
        if path.exists():
            text = path.read_text()
            if planted is not None:
                text = text.replace(planted.old, planted.new)
            return compile(text, str(path), "exec", dont_inherit=True), str(path), is_package
    return None


class Instance(Owner):
    """A copy of samestep's modules.

    Args:
        planted: a fault that it has.

    Attributes:
        start_rank: starts a rank on the machine of the process.
    """

    start_rank: Callable[..., Process]

    def __init__(self, planted: Planted | None) -> None:
        self._planted = planted
        self.distributed = Distributed()
        self._modules: dict[str, ModuleType] = {}
        self._initial: dict[str, dict[str, tuple[Any, Any]]] = {}  # module -> variable -> value, and a copy of it
        modules = build_modules(self, self.import_name, self.import_module)
        self._simulated = {**modules, "torch.distributed": self.distributed}
        self._builtins = self._simulated["builtins"].__dict__

    def begin(self, process: Process, disk: Disk, network: Network, start_rank: Callable[..., Process]) -> None:
        """Give the modules to a process."""
        self.process = process
        self.disk = disk
        self.start_rank = start_rank
        process.instance = self
        self.distributed.begin(process, network)
        self._simulated["os"].environ = process.variables
        system = self._simulated["sys"]
        system.modules = {**sys.modules, **self._modules, "__main__": ModuleType("__main__")}
        system.excepthook = sys.excepthook

    def end(self) -> None:
        """Reset the modules when their process has ended.

        Its objects are freed meanwhile. Their finalizers may raise: they still belong to a process that is dead.
        """
        report = sys.unraisablehook
        sys.unraisablehook = do_nothing
        try:
            self._reset()
        finally:
            sys.unraisablehook = report
        for descriptor in self.process.descriptors:  # as the kernel does, which releases a lock
            os.close(descriptor)

    def _reset(self) -> None:
        system = self._simulated["sys"].__dict__
        system.pop("modules")["__main__"].__dict__.clear()
        system.pop("last_value", None)
        self._restore_variables()
        gc.collect()
        self._restore_variables()  # a finalizer may have set them again

    def _restore_variables(self) -> None:
        for name, values in self._initial.items():
            for key, (value, content) in values.items():
                setattr(self._modules[name], key, _restore(value, content))

    def load(self, name: str) -> Any:
        """Import a module of samestep."""
        if name in self._modules:
            return self._modules[name]
        parent, _, last = name.rpartition(".")
        if parent:
            self.load(parent)
        is_planted = self._planted is not None and self._planted.module == name
        found = _compile(name, self._planted if is_planted else None)
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        code, path, is_package = found
        module = ModuleType(name)
        module.__dict__.update(__file__=path, __builtins__=self._builtins, __package__=name if is_package else parent)
        if is_package:
            module.__path__ = [os.path.dirname(path)]
        self._modules[name] = module
        with _installed({name: module}):  # where dataclasses look for the module of a class
            exec(code, module.__dict__)
        if parent:
            setattr(self._modules[parent], last, module)
        self._replace_parts(name, module)
        self._initial[name] = {
            key: (value, _remember(value)) for key, value in vars(module).items() if _is_state(key, value)
        }
        return module

    def _replace_parts(self, name: str, module: Any) -> None:
        """Replace what no standard module stands for."""
        if name == "samestep.world.local_sockets":
            module.connect = functools.partial(connect, self.distributed, module.PeerFailed)
            module.LocalSockets = LocalSockets
        elif name == "samestep.world.signed":
            both = {each.__name__: self._with_modules(each) for each in (pickle.dumps, pickle.loads)}
            module.pickle = SimpleNamespace(**both)
        elif name == "samestep.torch_internals":
            module.break_gloo_connections = self._break_connections
        elif name == "samestep.processes":
            module.run_captured = _refuse_program
        elif name == "samestep.launch.forkserver":
            module.ForkServer = _build_fork_server(self)

    def _with_modules(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Let a function of pickle find the classes of this copy."""

        def wrapped(value: Any) -> Any:
            with _installed(self._modules):
                return call(value)

        return wrapped

    def _break_connections(self) -> None:
        for endpoint in self.process.endpoints:
            endpoint.is_broken = True

    def set_constants(self, values: Mapping[str, Any]) -> None:
        """Set constants until the process ends: "module.NAME" -> value. Also where they were imported."""
        for full_name, value in values.items():
            module, _, name = full_name.rpartition(".")
            before = vars(self.load(f"samestep.{module}"))[name]
            for each in self._modules.values():
                if name in vars(each) and vars(each)[name] == before:
                    setattr(each, name, value)

    # --- imports ----------------------------------------------------------------------------------------------

    def import_name(self, name: str, package: str | None = None) -> Any:
        """As importlib.import_module."""
        return self.load(name) if name.startswith("samestep") else importlib.import_module(name, package)

    def import_module(self, name: str, globals: Any = None, locals: Any = None, names: Any = (), level: int = 0) -> Any:
        """As `__import__`."""
        root, _, rest = name.partition(".")
        if root == "samestep":
            module = self.load(name)
            for each in names or ():
                if not hasattr(module, each) and _compile(f"{name}.{each}") is not None:
                    self.load(f"{name}.{each}")
            return module if names else self._modules["samestep"]
        if name in self._simulated:
            simulated = self._simulated[name]
            return simulated if names or not rest else Facade(sys.modules[root], **{rest: simulated})
        module = builtins.__import__(name, globals, locals, names, level)
        return module if names or root not in self._simulated else self._simulated[root]


def _build_fork_server(own: Instance) -> type:
    """Build the class of the fork server of a launcher: it starts ranks, signals them, and reports their ends."""

    class ForkServer:
        def __init__(self, *, fork: bool = False) -> None:
            self._ranks: dict[int, Process] = {}
            self._signals: dict[int, list[int]] = {}  # those that each rank was sent
            self._events: deque[dict[str, Any]] = deque()

        def start(self, ranks: list[dict[str, Any]], **common: Any) -> None:
            for spec in ranks:
                rank = spec["rank"]
                self._ranks[rank] = own.start_rank(rank, variables=spec["variables"], **common)
                self._signals[rank] = []
            self._events.append({"started": {rank: process.pid for rank, process in self._ranks.items()}})

        def signal(self, signum: int, spared: Sequence[int] = ()) -> None:
            own.process.check()
            for rank, process in self._ranks.items():
                if rank in spared:
                    continue
                self._signals[rank].append(signum)
                process.receive(signum)

        def receive(self, timeout_s: float) -> dict[str, Any] | None:
            scheduler = own.process.scheduler
            own.process.wait(lambda: self._events or self._find_ended(), timeout_s, "launcher")
            for rank in self._find_ended():
                ended = {"rank": rank, "code": self._ranks.pop(rank).code, "signals": self._signals.pop(rank)}
                self._events.append({**ended, "time_s": EPOCH_S + scheduler.now_s})
            return self._events.popleft() if self._events else None

        def _find_ended(self) -> list[int]:
            return [rank for rank, process in self._ranks.items() if process.has_ended]

        def close(self) -> None:
            for process in self._ranks.values():
                process.end(-9)

    return ForkServer


@contextmanager
def _installed(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Make modules those of Python, for the block."""
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def _refuse_program(*_: Any, **__: Any) -> Any:
    raise FileNotFoundError(2, "no programs in a simulation")


def _is_state(name: str, value: Any) -> bool:
    return not name.startswith("__") and (isinstance(value, _STATE) or _is_own_object(value))


def _is_own_object(value: Any) -> bool:
    """Whether it is an object of a class of samestep with attributes, such as a lock."""
    kind = type(value)
    return kind.__module__.startswith("samestep.") and hasattr(value, "__dict__") and not isinstance(value, type)


def _remember(value: Any) -> Any:
    if isinstance(value, list | dict | set | itertools.count):
        return copy.copy(value)
    return {key: (each, _remember(each)) for key, each in vars(value).items()} if _is_own_object(value) else None


def _restore(value: Any, content: Any) -> Any:
    if isinstance(value, list):
        value[:] = content
    elif isinstance(value, dict | set):
        value.clear()
        value.update(content)
    elif isinstance(value, itertools.count):
        return copy.copy(content)
    elif isinstance(value, weakref.WeakSet | weakref.WeakValueDictionary):
        value.clear()
    elif _is_own_object(value):
        vars(value).clear()
        vars(value).update({key: _restore(*pair) for key, pair in content.items()})
    return value


class Pool:
    """Instances, for reuse: to import one takes as long as hundreds of steps. `planted`: a fault that they have."""

    def __init__(self, planted: Planted | None = None) -> None:
        self._planted = planted
        self._free: list[Instance] = []

    def take(self) -> Instance:
        """Take one, a new one if there is none."""
        return self._free.pop() if self._free else Instance(self._planted)

    def give_back(self, instance: Instance) -> None:
        """Return one whose process has ended."""
        self._free.append(instance)
