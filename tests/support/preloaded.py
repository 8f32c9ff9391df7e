"""Makes forks of a process that has imported torch cheap: 5 ms of CPU instead of 90, from the fork to the end."""

import ctypes
import importlib
import os
import sys
import weakref
from pathlib import Path
from typing import Any, NoReturn

HUGE_BYTES = 1 << 21
MADV_COLLAPSE = 25  # since Linux 6.1; where it is unknown, nothing changes
IMPORTED_BY_TESTS = ("pytest", "hypothesis", "hypothesis.strategies", "psutil")  # 0.2 to 0.4 s in each rank otherwise
SERVE = "from samestep.launch.forkserver import serve"


def make_forks_cheap() -> None:
    """Prepare this process, which has imported everything, for many forks."""
    # At exit, torch unregisters each of its operators, which takes 40 ms.
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        finalizer.atexit = False
    _use_huge_pages()


def import_for_tests() -> None:
    """Import what the modules of tests import. A rank imports such a module when its function is in there."""
    for name in IMPORTED_BY_TESTS:
        importlib.import_module(name)


def _use_huge_pages() -> None:
    """Move this process's private memory to huge pages: a fork copies the page table, of 57,000 entries otherwise."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_, name = (*line.split(maxsplit=5), "")[:6]
        if not mode.startswith("rw-p") or name.startswith(("/", "[stack", "[v")):
            continue
        begin, end = (int(address, 16) for address in span.split("-"))
        for address in range(-(-begin // HUGE_BYTES) * HUGE_BYTES, end - HUGE_BYTES + 1, HUGE_BYTES):
            madvise(address, HUGE_BYTES, MADV_COLLAPSE)


def use_for_spawn() -> None:
    """Prepare the fork servers that this process starts for `samestep.spawn`, too."""
    posix_spawn, tests = os.posix_spawn, str(Path(__file__).parents[1])

    def start(path: Any, words: list[str], *more: Any, **options: Any) -> int:
        own = f"sys.path.append({tests!r}); from support.preloaded import serve"
        return posix_spawn(path, [word.replace(SERVE, own) for word in words], *more, **options)

    os.posix_spawn = start


def serve(client: Any) -> NoReturn:
    """Run a fork server for `samestep.spawn`, as `forkserver.serve` does."""
    from samestep.launch import forkserver

    preload = forkserver.preload

    def preload_and_prepare() -> None:
        import_for_tests()
        preload()
        make_forks_cheap()

    forkserver.preload = preload_and_prepare
    forkserver.serve(client)


def fork_server() -> None:
    """Fork the server for the first `samestep.spawn` from this process, which is a fork of a command server."""
    from samestep.launch import forkserver
    from support.command_server import keep_files, show

    serve = forkserver.serve

    def serve_apart(client: Any) -> NoReturn:
        forkserver.serve = serve
        keep_files(client.fileno())
        show("arguments", [sys.executable, "from support.preloaded import serve;"])
        serve(client)

    forkserver.serve = serve_apart
    forkserver.give_back_server(forkserver.ForkServer(fork=True))
    forkserver.serve = serve
