"""Standard modules of a simulated process: clocks, threads, locks, files, signals and the end of the process.

A `Facade` has a few names of its own, and all others of the real module.
"""

import atexit
import builtins
import collections
import faulthandler
import gc
import importlib
import io
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from sim.disk import Disk, build_open
from sim.scheduler import Exited, Killed, Process, Task

EPOCH_S = 1_700_000_000.0
LAUNCHER_PID = 99_999
HOLDERS = ("Lock.__init__", "AppendLog.__init__", "Reports.__init__")  # hold descriptors that no file object closes


class Facade(ModuleType):
    """A module that has some names of its own, and all others of a real one."""

    def __init__(self, real: ModuleType, **own: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(own, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class Owner:
    """The process to which modules belong now, and the disk of its machine."""

    process: Process
    disk: Disk


def build_modules(
    own: Owner, import_name: Callable[..., Any], import_module: Callable[..., Any]
) -> dict[str, Any]:
    """Build the modules of one process at a time: name -> module.

    Args:
        import_name: in the place of `importlib.import_module`.
        import_module: in the place of `__import__`.
    """
    return {
        "time": _build_time(own),
        "os": _build_os(own),
        "sys": _build_sys(),
        "builtins": _build_builtins(own, import_module),
        "threading": _build_threading(own),
        "queue": _build_queue(own),
        "signal": _build_signal(own),
        "atexit": _build_atexit(own),
        "gc": Facade(gc, get_objects=list),  # most objects are of other processes, and a weak reference changes them
        "faulthandler": Facade(faulthandler, enable=do_nothing),
        "socket": Facade(
            socket,
            create_server=lambda *_, **__: SimpleNamespace(getsockname=lambda: ("127.0.0.1", 0), detach=lambda: -1),
        ),
        "secrets": Facade(
            secrets,
            token_bytes=lambda n=32: own.process.random.randbytes(n),
            token_hex=lambda n=32: own.process.random.randbytes(n).hex(),
        ),
        "uuid": Facade(uuid, uuid4=lambda: uuid.UUID(bytes=own.process.random.randbytes(16), version=4)),
        "importlib": Facade(importlib, import_module=import_name),
        "concurrent.futures": Facade(
            futures, ThreadPoolExecutor=lambda _: nullcontext(SimpleNamespace(map=map))
        ),
    }


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in the place of a call without a meaning in a simulation."""


def _build_time(own: Owner) -> Facade:
    def read_monotonic() -> float:
        return own.process.scheduler.now_s

    def read_wall_ns() -> int:
        own.process.scheduler.now_s += 1e-6  # no two are equal
        return int((EPOCH_S + read_monotonic()) * 1e9)

    def gmtime() -> Any:
        return time.gmtime(EPOCH_S + read_monotonic())

    return Facade(
        time,
        monotonic=read_monotonic,
        perf_counter=read_monotonic,
        time=lambda: EPOCH_S + read_monotonic(),
        time_ns=read_wall_ns,
        sleep=lambda seconds: own.process.wait(bool, seconds, "sleep"),
        gmtime=gmtime,
        strftime=lambda form, at=None: time.strftime(form, at or gmtime()),
    )


def _build_os(own: Owner) -> Facade:
    def leave(code: int) -> None:
        own.process.end(code)
        raise Exited(code)

    def open_descriptor(path: Any, *args: Any, **options: Any) -> int:
        descriptor = os.open(path, *args, **options)
        if sys._getframe(2).f_code.co_qualname in HOLDERS:
            own.process.descriptors.add(descriptor)
        return descriptor

    def close(descriptor: int) -> None:
        own.process.check()
        own.process.descriptors.discard(descriptor)
        os.close(descriptor)

    def create_in_memory(name: str) -> int:
        descriptor = os.memfd_create(name)
        if sys._getframe(1).f_code.co_qualname in HOLDERS:
            own.process.descriptors.add(descriptor)
        return descriptor

    def fsync(descriptor: int) -> None:
        own.process.point("fsync")
        own.disk.sync(descriptor)

    def write(descriptor: int, data: Any) -> int:
        own.process.point("write")
        if descriptor in (1, 2):
            own.process.output.append(bytes(data).decode())
            return len(data)
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:"):
            return os.write(descriptor, data)
        own.disk.check_space(own.process)
        size = own.process.random.randint(1, len(data)) if own.process.random.random() < 0.05 else len(data)
        return os.write(descriptor, data[:size])

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        own.process.point("pwrite")
        own.disk.check_space(own.process)
        return os.pwrite(descriptor, data, offset)

    def truncate(descriptor: int, size: int) -> None:
        own.process.point("truncate")
        os.ftruncate(descriptor, size)

    def kill(pid: int, signum: int) -> None:
        own.process.check()
        if pid == own.process.pid:
            own.process.end(-signum)
        own.process.check()

    return Facade(
        os,
        environ={},
        getpid=lambda: own.process.pid,
        getppid=lambda: LAUNCHER_PID,
        _exit=leave,
        open=open_descriptor,
        memfd_create=create_in_memory,
        close=close,
        fsync=fsync,
        write=write,
        pwrite=pwrite,
        ftruncate=truncate,
        kill=kill,
        killpg=kill,
        setpriority=do_nothing,
        register_at_fork=do_nothing,
        dup2=do_nothing,
        chdir=do_nothing,
    )


def _build_sys() -> Facade:
    output = io.StringIO()  # gets nothing: see `print` of the builtins
    return Facade(
        sys,
        stdout=output,
        stderr=output,
        __stderr__=output,
        argv=["train.py"],
        orig_argv=["python", "train.py"],
        path=[*sys.path],
    )


def _build_builtins(own: Owner, import_module: Callable[..., Any]) -> Facade:
    def show(*words: Any, sep: str | None = " ", **_: Any) -> None:
        if text := (" " if sep is None else sep).join(map(str, words)).rstrip("\n"):
            own.process.output.append(text)
        if words[:1] == ("step",):  # a step of a script begins
            own.process.wait(bool, float(own.process.variables["PACE_S"]), "sleep")

    open_file = build_open(lambda: own.process, lambda: own.disk)
    return Facade(builtins, **{**vars(builtins), "print": show, "open": open_file, "__import__": import_module})


def _build_atexit(own: Owner) -> Facade:
    def register(fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
        own.process.exit_functions.append((fn, args))
        return fn

    def unregister(fn: Callable[..., Any]) -> None:
        own.process.exit_functions[:] = [each for each in own.process.exit_functions if each[0] != fn]

    def run_all() -> None:
        while own.process.exit_functions:
            fn, args = own.process.exit_functions.pop()
            try:
                fn(*args)
            except Exception as error:  # as Python does
                own.process.output.append(f"atexit: {error!r}")

    return Facade(atexit, register=register, unregister=unregister, _run_exitfuncs=run_all)


def _build_signal(own: Owner) -> Facade:
    def get(signum: int) -> Any:
        default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
        return own.process.handlers.get(signum, default)

    def install(signum: int, handler: Any) -> Any:
        own.process.check()
        before = get(signum)
        own.process.handlers[signum] = handler
        return before

    return Facade(signal, signal=install, getsignal=get, alarm=do_nothing, pthread_sigmask=lambda *_: set())


def _build_threading(own: Owner) -> Facade:
    class Lock:
        """Tasks change places only at points, so it needs none of its own."""

        def __init__(self) -> None:
            self._is_held = False

        def __enter__(self) -> None:
            if self._is_held:
                own.process.wait(lambda: not self._is_held, None, "lock")
            self._is_held = True

        def __exit__(self, *_: object) -> None:
            self._is_held = False

    class Event:
        def __init__(self) -> None:
            self._is_set = False

        def is_set(self) -> bool:
            return self._is_set

        def set(self) -> None:
            self._is_set = True
            own.process.point("event.set")

        def wait(self, timeout: float | None = None) -> bool:
            return own.process.wait(self.is_set, timeout, "event.wait")

    class Condition(Lock):
        """Of forks that wait for threads, and threads for forks: a simulated process does not fork."""

        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> None:
            assert predicate()

        def notify_all(self) -> None:
            """Do nothing: no thread waits."""

    class Thread:
        def __init__(
            self, target: Callable[..., Any] = do_nothing, args: Sequence[Any] = (), *, name: str, daemon: bool = False
        ) -> None:
            self.name = name
            self.daemon = daemon
            self._call = partial(target, *args)
            self._task: Task | None = None

        def start(self) -> None:
            self._task = own.process.start(self._begin, self.name, daemon=self.daemon)
            own.process.point(f"start {self.name}")

        def _begin(self) -> None:
            try:
                self.run()
            except Exited:
                raise Killed from None

        def run(self) -> None:
            self._call()

        def is_alive(self) -> bool:
            return self._task is not None and not self._task.is_done

        def join(self, timeout: float | None = None) -> None:
            task = self._task
            if task is not None and own.process.scheduler.current is not task:
                own.process.wait(lambda: task.is_done, timeout, f"join {self.name}")

    class Timer(Thread):
        def __init__(self, interval: float, function: Callable[..., Any], args: Sequence[Any]) -> None:
            super().__init__(function, args, name="timer")
            self._interval_s = interval
            self._is_cancelled = Event()

        def cancel(self) -> None:
            self._is_cancelled.set()

        def run(self) -> None:
            if not self._is_cancelled.wait(self._interval_s):
                super().run()

    def current_thread() -> Any:
        task = own.process.scheduler.current
        return own.process.main_thread if task is None or task.is_main else task

    def shut_down() -> None:
        current = own.process.scheduler.current
        for task in [each for each in own.process.tasks if not each.daemon and each is not current]:
            own.process.wait(lambda task=task: task.is_done, None, "shutdown")

    return Facade(
        threading,
        Lock=Lock,
        Event=Event,
        Condition=Condition,
        Thread=Thread,
        Timer=Timer,
        main_thread=lambda: own.process.main_thread,
        current_thread=current_thread,
        get_native_id=lambda: own.process.pid,
        _shutdown=shut_down,
    )


def _build_queue(own: Owner) -> Facade:
    class SimpleQueue:
        def __class_getitem__(cls, _: Any) -> type:
            return cls

        def __init__(self) -> None:
            self._items: collections.deque[Any] = collections.deque()

        def put(self, item: Any) -> None:
            self._items.append(item)
            own.process.point("queue.put")

        def get(self) -> Any:
            own.process.wait(lambda: self._items, None, "queue.get")
            return self._items.popleft()

    return Facade(queue, SimpleQueue=SimpleQueue)
