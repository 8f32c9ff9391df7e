"""The state of this process's main thread, observed from another thread: its stack and /proc of Linux."""

import faulthandler
import importlib.util
import os
import re
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from samestep.files import read_text
from samestep.watch.stall_diagnosis import NEW_GROUP, ThreadState


def _find_package(name: str) -> str:
    spec = importlib.util.find_spec(name)
    return f"{Path(spec.origin).parent}/" if spec is not None and spec.origin else f"/{name}/"


OWN = _find_package("samestep")
TORCH = _find_package("torch")
REDUCTION = f"{OWN}engine/"
# A thread waits for other ranks if its innermost frame outside torch and the standard library is in one of these.
ROUTES = f"{OWN}engine/routes.py"
MEMBERSHIP = f"{OWN}world/membership.py"
EXCHANGES = (ROUTES, *(f"{OWN}world/{name}.py" for name in ("transport", "group", "local_sockets", "waiter")))
DISTRIBUTED = f"{TORCH}distributed/"
COMPILERS = (f"{TORCH}_dynamo/", f"{TORCH}_inductor/", f"{TORCH}_functorch/")
STDLIB = sysconfig.get_path("stdlib")
INSTALLED = ("/site-packages/", "/dist-packages/")

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


@dataclass(frozen=True)
class Frame:
    """One frame of a Python stack."""

    file: str
    line: str
    function: str


def read_stacks() -> dict[int, list[Frame]]:
    """Return the stack of each thread, innermost frame first, by thread ident.

    faulthandler writes them in C without releasing the GIL. A walk over the frames in Python would let their threads
    run meanwhile, and has crashed CPython 3.11.
    """
    with os.fdopen(os.memfd_create("stacks"), "wb+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.read().decode(errors="replace").splitlines()
    stacks: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in lines:
        if thread := _THREAD.match(line):
            frames = stacks.setdefault(int(thread[1], 16), [])
        elif frame := _FRAME.match(line):
            frames.append(Frame(*frame.groups()))
    return stacks


def read_thread_state(ident: int, native_id: int) -> ThreadState:
    """Return the state of a thread of this process. Arguments: see the attributes of `threading.Thread`."""
    stacks = read_stacks()
    stack = stacks.pop(ident, [])
    waits_in = _find_exchange(stack)
    # On a GPU, torch runs the hooks of a backward in a thread of its own.
    if not waits_in and any(frame.file == ROUTES for other in stacks.values() for frame in other):
        waits_in = "the reduction"
    return ThreadState(
        waits_in=waits_in,
        place=_find_place(stack),
        is_compiling=any(frame.file.startswith(COMPILERS) for frame in stack) and not waits_in,
        cpu_s=_read_cpu_s(native_id),
    )


def _find_exchange(stack: list[Frame]) -> str:
    """Return the exchange with other ranks in which a thread is; "" for none."""
    if any(frame.file == MEMBERSHIP for frame in stack):
        return NEW_GROUP
    name = ""
    for frame in stack:
        if frame.file.startswith(DISTRIBUTED):
            if not frame.file.endswith("c10d_logger.py"):  # wraps all collectives
                name = frame.function
            continue
        if frame.file.startswith(OWN if name else EXCHANGES):
            return "the reduction" if any(each.file.startswith(REDUCTION) for each in stack) else "the exchange"
        if name:
            return name
        if frame.file.startswith(STDLIB) and not any(part in frame.file for part in INSTALLED):
            continue
        if not frame.file.startswith(TORCH):
            return ""
    return ""


def _find_place(stack: list[Frame]) -> str:
    """Return the innermost line of the user's code; "" if there is none."""
    for frame in stack:
        is_own = frame.file.startswith((OWN, TORCH, STDLIB, "<")) or any(part in frame.file for part in INSTALLED)
        if not is_own:
            return f"{os.path.basename(frame.file)}:{frame.line} in {frame.function}".removesuffix(" in <module>")
    return ""


def _read_cpu_s(native_id: int) -> float:
    """Return a thread's CPU seconds."""
    try:
        fields = read_text(Path(f"/proc/self/task/{native_id}/stat")).rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_process_state(pid: int) -> str:
    """Return the state of a process of this host: "stopped", "dead" or "alive"; "" if it cannot be known."""
    try:
        state = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[0]
    except OSError:
        return "dead" if os.path.isdir("/proc/self") else ""
    return {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}.get(state, "alive")


def count_written() -> int:
    """Return the number of bytes that this process has written to files; 0 if it cannot be known."""
    with suppress(OSError, ValueError, IndexError):
        return int(read_text(Path("/proc/self/io")).split("wchar:")[1].split()[0])
    return 0
