"""Every test leaves the process as it was: no child process, no variable of a launcher, no other working directory."""

import functools
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest
from support.commands import prepare
from support.hosts import Host, open_hosts, why_not

from samestep.launch import spawn

LAUNCHERS = ("SAMESTEP_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # of these, a run changes the handlers
GRACE_S = 20.0
PID = os.getpid()
LONG = ("test_slurm.py", "test_docs.py", "test_simulation.py")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started with & by a shell; tests and their children need it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests, and not one that only distributes them to workers of pytest-xdist."""
    if getattr(config.option, "tx", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # of the workers
    else:
        prepare()
        from hypothesis import HealthCheck, settings  # not in the process that only distributes the tests

        # The time that an example takes depends on what runs beside it.
        settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("tests")


def find_children() -> dict[int, psutil.Process]:
    """The descendants of this process by pid, except idle fork servers and the resource tracker of multiprocessing."""
    idle = {server._pid for server in spawn._idle_servers} | {resource_tracker._resource_tracker._pid}
    found: dict[int, psutil.Process] = {}
    seek = [os.getpid()]
    for pid in seek:  # grows
        for child in _list_children(pid):
            with suppress(psutil.Error):
                process = psutil.Process(child)
                seek.append(child)
                if child not in idle and process.status() != psutil.STATUS_ZOMBIE:
                    found[child] = process
    return found


def _list_children(pid: int) -> list[int]:
    """The children of a process. psutil would read the state of every process of this machine."""
    found: list[int] = []
    with suppress(OSError):  # It has ended.
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):  # This thread has ended, and others have not.
                found += map(int, children.read_text().split())
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves something behind."""
    directory, variables = os.getcwd(), dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    before = find_children()
    yield
    deadline_s = time.monotonic() + GRACE_S
    while (left := {pid: p for pid, p in find_children().items() if pid not in before}) and (
        time.monotonic() < deadline_s
    ):
        time.sleep(0.02)
    faults = []
    if left:
        faults.append(f"child processes {[*left.values()]}")
        for process in left.values():
            process.kill()
    changed = {name for name, _ in {*variables.items()} ^ {*os.environ.items()} if name.startswith(LAUNCHERS)}
    if changed:
        faults.append(f"variables {changed}")
        os.environ.clear()
        os.environ.update(variables)
    if os.getcwd() != directory:
        faults.append(f"the current directory {os.getcwd()}")
        os.chdir(directory)
    if any(signal.getsignal(number) != handler for number, handler in handlers.items()):
        gc.collect()  # a traceback holds a run, which restores them when nothing refers to it
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            faults.append(f"a handler of {number.name}: {signal.getsignal(number)}")
            signal.signal(number, handler)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        faults.append("a process group")
        distributed.destroy_process_group()
    assert not faults, "the test has left behind: " + "; ".join(faults)


@pytest.fixture(scope="module")
def all_hosts() -> Iterator[list[Host]]:
    """Three machines, as network namespaces."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with open_hosts(3) as opened:
        yield opened


@functools.cache
def has_gpu() -> bool:
    """Whether torch can use a GPU. Checked in another process, because a process that has initialized CUDA cannot fork
    ranks.
    """
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return False
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not has_gpu():
        pytest.skip("no GPU that torch can use")


@pytest.hookimpl(tryfirst=True)  # before -m selects by the mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use network namespaces. Start the longest tests first: they would run alone at the end."""
    for item in items:
        if "all_hosts" in getattr(item, "fixturenames", ()):
            item.add_marker("packages")
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONG))


def pytest_collection_finish() -> None:
    """Let the garbage collector leave out the tests themselves, here and in all processes that tests fork."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """End a child that a test has forked: it would otherwise run the next tests as a second worker."""
    if os.getpid() != PID:
        print("a forked child has left its test", call.excinfo and call.excinfo.getrepr(), file=sys.stderr, flush=True)
        os._exit(1)
