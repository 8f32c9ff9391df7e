"""What the main thread of this process is at, seen from another of its threads: Python's frames and Linux's /proc."""

import importlib.util
import os
import platform
import sys
import sysconfig
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType


def _find_package(name: str) -> str:
    spec = importlib.util.find_spec(name)
    return f"{Path(spec.origin).parent}/" if spec is not None and spec.origin else f"/{name}/"


OWN, TORCH = _find_package("samestep"), _find_package("torch")
# Frames of these wait for other ranks, when they are the innermost that are not torch's or Python's.
EXCHANGES = (f"{OWN}engine/routes.py", f"{OWN}world/group.py", f"{OWN}world/local_sockets.py")
DISTRIBUTED = f"{TORCH}distributed/"
COMPILERS = (f"{TORCH}_dynamo/", f"{TORCH}_inductor/", f"{TORCH}_functorch/")
STDLIB = sysconfig.get_path("stdlib")
INSTALLED = ("/site-packages/", "/dist-packages/")

# Linux's numbers of the calls in which a thread can hang, on the two machines that there are.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 7: "poll", 20: "write", 23: "poll", 35: "sleep", 42: "connect",
        43: "accept", 44: "send", 45: "receive", 46: "send", 47: "receive", 61: "child", 72: "lock", 73: "lock",
        74: "sync", 75: "sync", 202: "futex", 230: "sleep", 232: "poll", 247: "child", 257: "open", 270: "poll",
        271: "poll", 281: "poll", 288: "accept",
    },
    "aarch64": {
        25: "lock", 32: "lock", 63: "read", 64: "write", 66: "write", 72: "poll", 73: "poll", 82: "sync", 83: "sync",
        95: "child", 98: "futex", 101: "sleep", 115: "sleep", 22: "poll", 56: "open", 202: "accept", 203: "connect",
        206: "send", 207: "receive", 211: "send", 212: "receive", 242: "accept", 260: "child",
    },
}  # fmt: skip
_KINDS = _CALLS.get(platform.machine(), {})
_WORDS = {
    "futex": "waiting for a lock",
    "sleep": "asleep",
    "child": "waiting for a process that it has started",
    "poll": "waiting for a message",
    "open": "opening a file (a pipe whose other end nobody opens?)",
    "connect": "waiting for a connection to be taken",
    "accept": "waiting for somebody to connect",
}


@dataclass(frozen=True)
class Symptoms:
    """As in `judge.Beat`; `cpu_s` and `num_faults` (major page faults) count from the thread's start."""

    waits_in: str = ""
    place: str = ""
    ails: str = ""
    is_compiling: bool = False
    cpu_s: float = 0.0
    num_faults: int = 0


def look(ident: int, native_id: int) -> Symptoms:
    """What a thread of this process is at.

    Args:
        ident, native_id: of the thread, as in `threading.Thread`.
    """
    frames = sys._current_frames()
    main = frames.get(ident)
    stack = _walk(main)
    waits_in = _find_exchange(stack)
    if not waits_in:  # on a GPU, torch runs a backward's hooks in a thread of its own, which `threading` does not know
        # Those it knows are left out: to walk the frames of a thread that was ending has crashed CPython 3.11 once.
        known = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
        for other in frames.keys() - known - {ident}:
            if any(part.f_code.co_filename == EXCHANGES[0] for part in _walk(frames[other])):
                waits_in = "the reduction"
    state, cpu_s, num_faults = _read_stat(native_id)
    return Symptoms(
        waits_in=waits_in,
        place=_find_place(stack),
        ails="waiting for the disk" if state == "D" else _find_call(native_id) if state == "S" else "",
        is_compiling=any(part.f_code.co_filename.startswith(COMPILERS) for part in stack) and not waits_in,
        cpu_s=cpu_s,
        num_faults=num_faults,
    )


def _walk(frame: FrameType | None) -> list[FrameType]:
    """From the innermost frame out."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _find_exchange(stack: list[FrameType]) -> str:
    """The exchange with other ranks that a thread is in; "" for none."""
    name = ""
    for frame in stack:
        file = frame.f_code.co_filename
        if file.startswith(DISTRIBUTED):
            if not file.endswith("c10d_logger.py"):  # which wraps all of them
                name = frame.f_code.co_name
            continue
        if name:
            is_own = file.startswith(OWN)
            return name if not is_own else "the reduction" if _is_in_reduction(stack) else "the exchange"
        if file in EXCHANGES:
            return "the reduction" if _is_in_reduction(stack) else "the exchange"
        if file.startswith(STDLIB) and not any(part in file for part in INSTALLED):
            continue
        if not file.startswith(TORCH):
            return ""
    return ""


def _is_in_reduction(stack: list[FrameType]) -> bool:
    return any(frame.f_code.co_filename.startswith(f"{OWN}engine/") for frame in stack)


def _find_place(stack: list[FrameType]) -> str:
    """The innermost line that a person has written; else that of whoever's library."""
    fallback = ""
    for frame in stack:
        file = frame.f_code.co_filename
        if file.startswith((OWN, TORCH, "<")):
            continue
        place = f"{os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}".removesuffix(" in <module>")
        if any(part in file for part in INSTALLED):
            fallback = fallback or place
        elif not file.startswith(STDLIB):
            return place
    return fallback


def _read_stat(native_id: int) -> tuple[str, float, int]:
    """Its state (R, S, D ...), the seconds it has computed, its major page faults."""
    try:
        with open(f"/proc/self/task/{native_id}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", 0.0, 0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(fields[9])


def _find_call(native_id: int) -> str:
    """What a sleeping thread waits for, as its system call tells."""
    try:
        with open(f"/proc/self/task/{native_id}/syscall") as file:
            number, *arguments = file.read().split()
    except (OSError, ValueError):
        return ""
    kind = _KINDS.get(int(number), "") if number.lstrip("-").isdecimal() else ""
    if kind in ("read", "write", "lock", "sync", "send", "receive"):
        return _describe_file(kind, int(arguments[0], 16))
    return _WORDS.get(kind, "")


def _describe_file(kind: str, number: int) -> str:
    target = "a file"
    with suppress(OSError):
        target = os.readlink(f"/proc/self/fd/{number}")
    if target.startswith("pipe:"):
        return "writing into a pipe that is full" if kind == "write" else "reading from a pipe that is empty"
    if target.startswith("socket:"):
        return "sending to a socket" if kind in ("write", "send") else "reading from a socket"
    words = {"read": "reading", "write": "writing", "lock": "waiting for a lock on", "sync": "bringing to the disk"}
    return f"{words.get(kind, 'waiting for')} {target}"


def find_system() -> str:
    """What tells apart where a process's number means the same process: the kernel's boot, and its process namespace.

    Hosts may well have one name, as machines of one image have, or containers on the network of their host.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read(8)}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return platform.node()


def find_fate(pid: int) -> str:
    """How it stands with a process of this host: "stopped", "dead" or "alive"."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "dead" if os.path.isdir("/proc/self") else ""
    return {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}.get(state, "alive")


def count_written() -> int:
    """Bytes that this process has written to files so far; 0 where that is not to be known."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/io") as file:
        return int(file.read().split("wchar:")[1].split()[0])
    return 0
