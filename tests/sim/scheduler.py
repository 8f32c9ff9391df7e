"""Simulated processes and their threads, of which exactly one runs at a time, in virtual time.

Each thread of a simulated process is a real thread, a `Task`. A task runs until it reaches a point: a communication, a
file operation, a wait or a sleep. There the scheduler may let another task continue, and a fault may happen. One
seeded generator makes every decision, so a seed reproduces a whole run.
"""

import _thread
import itertools
import random
import signal
from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

from sim.torch_globals import TorchGlobals

FOREVER = float("inf")
BEGIN_S = 1000.0  # of virtual time
STALL_S = 200.0  # without a point of a rank's main thread: the ranks wait for each other
LIMIT_S = 50_000.0
MAX_POINTS = 1_000_000


class Killed(BaseException):
    """Unwinds the threads of a process that has ended. Every further simulated call of theirs raises it again."""


class Exited(BaseException):
    """Raised by os._exit."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Hang(Exception):
    """No task can continue, or the run takes too long."""


class Process:
    """A simulated process.

    Attributes:
        rank: -1 for the launcher.
        code: exit code, or minus the signal that has killed it; None while it runs.
        random: the source of its secrets and unique names.
        frozen_until_s: until then, none of its tasks runs.
        signals: signals that its main thread has not handled yet.
        output: the lines that it has printed.
        num_lines_before: how many there were when it got its first signal; None without one.
        descriptors: open files that no file object closes.
        torch_globals: its values of torch's global state, while another process runs.
        instance: its copy of samestep's modules.
        main_thread: what `threading.main_thread` returns.
    """

    def __init__(self, scheduler: "Scheduler", name: str, rank: int, variables: Mapping[str, str]) -> None:
        self.scheduler = scheduler
        self.name = name
        self.rank = rank
        self.pid = next(scheduler.pids)
        self.variables = type("Environ", (dict,), {})(variables)  # a class of its own: samestep may change it
        self.random = random.Random(f"{scheduler.seed}/{self.pid}")
        self.tasks: list[Task] = []
        self.is_dead = False
        self.code: int | None = None
        self.frozen_until_s = 0.0
        self.exit_functions: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.handlers: dict[int, Any] = {}
        self.signals: list[int] = []
        self.output: list[str] = []
        self.num_lines_before: int | None = None
        self.descriptors: set[int] = set()
        self.endpoints: list[Any] = []
        self.torch_globals: TorchGlobals | None = None
        self.instance: Any = None
        self.main_thread = SimpleNamespace(is_alive=lambda: not self.is_dead)

    @property
    def has_ended(self) -> bool:
        """Whether it is dead, and all of its threads have unwound."""
        return self.is_dead and not self.tasks

    def start(self, fn: Callable[[], object], name: str = "main", *, daemon: bool = False) -> "Task":
        """Start a thread."""
        task = Task(self, name, fn, daemon=daemon)
        self.tasks.append(task)
        self.scheduler.tasks.append(task)
        return task

    def check(self) -> None:
        """Raise Killed if the process has ended. Every simulated call does so first."""
        if self.is_dead:
            raise Killed

    def point(self, label: str) -> None:
        """Let another task run, or a fault happen, as the seed decides."""
        self.scheduler.point(self, label)

    def wait(self, condition: Callable[[], Any], timeout_s: float | None, label: str) -> bool:
        """Wait for a condition, in virtual time. Returns whether it holds."""
        return self.scheduler.wait(self, condition, timeout_s, label)

    def receive(self, signum: int) -> None:
        """Send it a signal."""
        if signum == signal.SIGKILL:
            self.end(-signum)
        elif not self.is_dead:
            self.signals.append(signum)
            if self.num_lines_before is None:
                self.num_lines_before = len(self.output)

    def end(self, code: int) -> None:
        """End the process now. Its connections close; its threads unwind when each of them runs next."""
        if not self.is_dead:
            self.is_dead = True
            self.code = code
            self.scheduler.note(f"{self.name} ends with {code}")


class Task:
    """A thread of a simulated process.

    Attributes:
        condition, deadline_s: what it waits for, and until when; no condition: it can run.
        label: of its last point.
    """

    def __init__(self, process: Process, name: str, fn: Callable[[], object], *, daemon: bool) -> None:
        self.process = process
        self.name = f"{process.name}.{name}"
        self.daemon = daemon
        self.fn: Callable[[], object] | None = fn
        self.is_main = name == "main"
        self.is_started = self.is_done = False
        self.condition: Callable[[], Any] | None = None
        self.deadline_s = FOREVER
        self.label = "start"
        self.ident = 0
        self.turn = _thread.allocate_lock()  # locked until it is this task's turn
        self.turn.acquire()


class Scheduler:
    """Decides which task runs next.

    Args:
        seed: of every decision.
        switch: probability of letting another task run at a point where nobody has to wait.
        tick_s: virtual time between two points.

    Attributes:
        strike: called at each point; may inject faults.
        on_end: called when all threads of a process have ended.
        history: what has happened, for a person.
        pids: the ids of processes.
    """

    def __init__(self, seed: str, *, switch: float = 0.15, tick_s: float = 2e-5) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now_s = BEGIN_S
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.num_points = 0
        self.pids = itertools.count(100_001)
        self.history: list[str] = []
        self.problem: BaseException | None = None
        self.strike: Callable[[Task, str], None] = lambda task, label: None
        self.on_end: Callable[[Process], None] = lambda process: None
        self._switch = switch
        self._tick_s = tick_s
        self._moved_s = self.now_s  # when the main thread of a rank last reached a point
        self._owner: Process | None = None  # whose values torch's global state has
        self._is_over = _thread.allocate_lock()
        self._is_over.acquire()

    def note(self, text: str) -> None:
        """Add a line to the history."""
        self.history.append(f"{self.num_points:6d} {self.now_s - BEGIN_S:9.3f} s  {text}")

    def run(self) -> None:
        """Run until no task is left. Raises Hang, or the error of a condition or of a fault."""
        self.problem = None
        if self.tasks:
            self._hand_over(self._choose())
            self._is_over.acquire()
        self._owner = None
        TorchGlobals.reset()
        if self.problem is not None:
            raise self.problem

    # --- called by tasks --------------------------------------------------------------------------------------

    def is_current(self, process: Process) -> bool:
        """Whether the calling thread is this process's, and not a finalizer in the thread of another one."""
        task = self.current
        return task is not None and task.process is process and task.ident == _thread.get_ident()

    def point(self, process: Process, label: str) -> None:
        """Let another task run, or a fault happen, as the seed decides."""
        process.check()
        task = self.current
        if task is None or not self.is_current(process):
            return
        self._record(task, label)
        if process.is_dead or process.frozen_until_s > self.now_s or self.random.random() < self._switch:
            self._give_way(task)
        process.check()
        if process.signals and task.is_main:
            self._handle_signals(process)

    def wait(self, process: Process, condition: Callable[[], Any], timeout_s: float | None, label: str) -> bool:
        """Wait for a condition, in virtual time. Returns whether it holds."""
        process.check()
        task = self.current
        if task is None or not self.is_current(process):
            return bool(condition())
        self._record(task, label)
        deadline_s = FOREVER if timeout_s is None else self.now_s + max(0.0, timeout_s)
        while True:
            process.check()
            task.condition = condition
            task.deadline_s = deadline_s
            try:
                self._give_way(task)
            finally:
                task.condition = None
                task.deadline_s = FOREVER
            process.check()
            has_signal = bool(process.signals) and task.is_main
            if has_signal:
                self._handle_signals(process)
            if (holds := bool(condition())) or self.now_s >= deadline_s or not has_signal:
                return holds

    def _handle_signals(self, process: Process) -> None:
        while process.signals:
            signum = process.signals.pop(0)
            handler = process.handlers.get(signum)
            if callable(handler):
                handler(signum, None)
            elif handler != signal.SIG_IGN:
                process.end(-signum)
                process.check()

    def _record(self, task: Task, label: str) -> None:
        task.label = label
        if task.is_main and task.process.rank >= 0:
            self._moved_s = self.now_s
        self.num_points += 1
        self.now_s += self._tick_s if self.random.random() < 0.999 else 1.0
        self.strike(task, label)

    def _choose(self) -> Task:
        """Return the task that runs next. If none can continue, the simulation ends, and all tasks unwind."""
        try:
            return self._find_next()
        except BaseException as problem:  # a hang, or a mistake in a condition
            self._fail(problem)
            return self.tasks[0]

    def _find_next(self) -> Task:
        """Return a task that can run. Moves the clock if all wait. Raises Hang if none ever can."""
        while True:
            for task in self.tasks:
                if task.process.is_dead:
                    return task
            ready = []
            now_s = self.now_s
            next_s = FOREVER  # when another task can run
            for task in self.tasks:
                process = task.process
                if process.frozen_until_s > now_s:
                    self._moved_s = now_s
                    next_s = min(next_s, process.frozen_until_s)
                elif (
                    (process.signals and task.is_main)
                    or task.condition is None
                    or task.deadline_s <= now_s
                    or task.condition()
                ):
                    ready.append(task)
                else:
                    next_s = min(next_s, task.deadline_s)
            is_stuck = self.now_s - self._moved_s > STALL_S or self.num_points > MAX_POINTS
            if is_stuck or (not ready and next_s > LIMIT_S):
                raise Hang("; ".join(f"{task.name} at {task.label}" for task in self.tasks if task.is_main))
            if ready:
                return ready[0] if len(ready) == 1 else self.random.choice(ready)
            self.now_s = max(self.now_s, next_s)

    def _give_way(self, task: Task) -> None:
        chosen = self._choose()
        if chosen is not task:
            self._hand_over(chosen)
            task.turn.acquire()

    def _fail(self, problem: BaseException) -> None:
        self.problem = self.problem or problem
        for each in self.tasks:
            each.process.end(-99)

    def _hand_over(self, task: Task) -> None:
        process = task.process
        if process is not self._owner:
            if self._owner is not None:
                self._owner.torch_globals = TorchGlobals()
            if process.torch_globals is None:
                TorchGlobals.reset()
            else:
                process.torch_globals.restore()
            self._owner = process
        self.current = task
        if task.is_started:
            task.turn.release()
        else:
            task.is_started = True
            _thread.start_new_thread(_run_task, (self, task))

    def end_task(self, task: Task, error: BaseException | None) -> None:
        """Let the next task run, at the end of this one. `error`: that has ended it unexpectedly."""
        if error is not None:
            self._fail(error)
        task.is_done = True
        task.fn = None
        process = task.process
        self.tasks.remove(task)
        process.tasks.remove(task)
        if not process.tasks:
            process.end(0)
            if self._owner is process:  # hooks in torch refer to its run
                TorchGlobals.reset()
                self._owner = None
            try:
                self.on_end(process)
            except Exception as problem:
                self._fail(problem)
        if not self.tasks:
            self.current = None
            self._is_over.release()
            return
        self._hand_over(self._choose())


def _run_task(scheduler: Scheduler, task: Task) -> None:
    task.ident = _thread.get_ident()
    unexpected: BaseException | None = None
    try:
        task.process.check()
        if task.fn is not None:
            task.fn()
    except Killed:
        pass
    except Exited as end:
        task.process.end(end.code)
    except BaseException as error:
        unexpected = error
    scheduler.end_task(task, unexpected)


# samestep looks for generators in the variables of all running functions that are not its own.
_run_task = FunctionType(_run_task.__code__, {**globals(), "__name__": "samestep.simulated"})
