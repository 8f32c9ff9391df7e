"""The beats of a rank: what it does, since when, and what its main thread waits for. Observed by another thread."""

import faulthandler
import importlib.util
import os
import re
import sysconfig
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from samestep.decoding import Count, Number
from samestep.files import read_text

# Phase -> its description, after "rank 3 has".
PHASES = {
    "starting": "been starting",
    "loading": "been loading data",
    "forward": "been computing",
    "backward": "been in the backward",
    "reducing": "been in the reduction",
    "updating": "been updating",
    "saving": "been saving",
    "validating": "been validating",
    "script": "been in the script's own code between two steps",
    "left": "been outside the loop",
    "ended": "ended",
}
NEW_GROUP = "the new group"  # after a death, ranks wait in it for all others
WARM_UP = 2  # the first phases of each kind: they compile, open files, start workers

# Row of the table at the end -> its phases.
SUMMARY = {
    "data": ("loading",),
    "compute": ("forward", "backward"),
    "gradient reduction": ("reducing",),
    "update": ("updating",),
    "snapshots": ("saving",),
    "validation": ("validating",),
    "other": ("script", "left"),
}


class ThreadState(Struct, frozen=True, kw_only=True):
    """The state of a thread.

    Attributes:
        waits_in: the current exchange with other ranks, such as "the reduction" or "all_reduce"; "" if there is none.
        line: the innermost line of the user's code, such as "train.py:31 in load".
        is_compiling: torch.compile is active.
        cpu_s: CPU time since the thread's start.
    """

    waits_in: str = ""
    line: str = ""
    is_compiling: bool = False
    cpu_s: Number = 0.0


class Beat(ThreadState, frozen=True, kw_only=True):
    """The state of a rank. The rank publishes it; the leader adds the last three attributes.

    Ranks exchange it, and `ranks.json` has it, as JSON.

    Attributes:
        number: sequence number.
        system: identifies the system in which `pid` is valid.
        step, phase: the current step, and a key of PHASES.
        for_s: seconds without progress: no change of phase or micro-batch, no bytes written to a snapshot.
        num_seen, longest_s: how often this phase has ended, and its longest duration after WARM_UP.
        is_busy: it uses the CPU.
        spent_s: phase -> total seconds since the start.
        num_micro_batches: of this start, so far.
        age_s: seconds since this arrived.
        is_silent: the next beat is overdue.
        process: state of its process: "stopped", "dead", "alive", or "" on another host.
    """

    rank: Count
    host: str
    pid: Count
    number: Count
    step: Count
    phase: str
    for_s: Number
    system: str = ""
    num_seen: Count = 0
    longest_s: Number = 0.0
    is_busy: bool = False
    spent_s: dict[str, Number] = {}
    num_micro_batches: Count = 0
    age_s: Number = 0.0
    is_silent: bool = False
    process: str = ""

    @property
    def still_s(self) -> float:
        """Seconds without progress."""
        return self.for_s + self.age_s


@dataclass(slots=True)
class PhaseTally:
    """How often a phase has ended, its total duration, and its longest duration without the first `WARM_UP`."""

    num: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0


class PhaseClock:
    """Measures the phases of the main thread. `enter` is called 4 times per micro-batch and takes 0.4 us.

    Attributes:
        now: (phase, step, time of the last change on the monotonic clock). Replaced as a whole, for other threads.
        tallies: by phase.
    """

    def __init__(self) -> None:
        self.now: tuple[str, int, float] = ("starting", 0, time.monotonic())
        self.tallies = {phase: PhaseTally() for phase in PHASES}

    def enter(self, phase: str, step: int) -> None:
        """Start `phase` of step `step`."""
        now_s = time.monotonic()
        before, _, since_s = self.now
        tally = self.tallies[before]
        took_s = now_s - since_s
        tally.num += 1
        tally.total_s += took_s
        if took_s > tally.longest_s and tally.num > WARM_UP:
            tally.longest_s = took_s
        self.now = (phase, step, now_s)

    def move(self, before: str, after: str, seconds: float) -> None:
        """Reassign some seconds from the phase `before` to `after`."""
        self.tallies[before].total_s -= seconds
        self.tallies[after].total_s += seconds

    def spent_s(self) -> dict[str, float]:
        """Return the total seconds of each phase, without the current one."""
        return {phase: tally.total_s for phase, tally in self.tallies.items() if tally.num}


def describe_spent(spent_s: Mapping[str, float]) -> str:
    """Format the shares of the time, the largest first, such as "compute 71 %, data 12 %"."""
    shares = sorted([(share, name) for name, share in share_spent(spent_s).items() if share >= 0.005], reverse=True)
    return ", ".join([f"{name} {share:.0%}".replace("%", " %") for share, name in shares])


def share_spent(spent_s: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each row of `SUMMARY` in the total time; {} if there is none."""
    spans_s = {name: sum(spent_s.get(phase, 0.0) for phase in phases) for name, phases in SUMMARY.items()}
    total_s = sum(spans_s.values())
    return {name: span_s / total_s for name, span_s in spans_s.items()} if total_s > 0 else {}


# --- the main thread and its process ----------------------------------------------------------------------------------


def _find_package(name: str) -> str:
    spec = importlib.util.find_spec(name)
    return f"{Path(spec.origin).parent}/" if spec is not None and spec.origin else f"/{name}/"


OWN = _find_package("samestep")
TORCH = _find_package("torch")
REDUCTION = f"{OWN}engine/"
# A thread waits for other ranks if its innermost frame outside torch and the standard library is in one of these.
ROUTES = f"{OWN}engine/routes.py"
MEMBERSHIP = f"{OWN}world/membership.py"
EXCHANGES = (ROUTES, *(f"{OWN}world/{name}.py" for name in ("transport", "group", "local_sockets", "process_group")))
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
        line=_find_line(stack),
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
        if frame.file.startswith(STDLIB) and not _is_installed(frame):
            continue
        if not frame.file.startswith(TORCH):
            return ""
    return ""


def _find_line(stack: list[Frame]) -> str:
    """Return the innermost line of the user's code; "" if there is none."""
    for frame in stack:
        if not (frame.file.startswith((OWN, TORCH, STDLIB, "<")) or _is_installed(frame)):
            return f"{os.path.basename(frame.file)}:{frame.line} in {frame.function}".removesuffix(" in <module>")
    return ""


def _is_installed(frame: Frame) -> bool:
    return any(directory in frame.file for directory in INSTALLED)


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
