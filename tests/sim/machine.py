"""A simulated machine: it runs `samestep launch`, and injects faults."""

import gc
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sim.disk import Disk
from sim.instances import Pool
from sim.network import Network
from sim.scenarios import Fault, Round
from sim.scheduler import Process, Scheduler, Task


@dataclass
class Launch:
    """One start of the run, under way or ended.

    Attributes:
        began: the number of points before it.
        launcher: its process.
        ranks: by number, those that were started last.
        processes: all ranks that were started.
        waiting: faults that have not happened.
        struck: those that have.
        counts: label of a waiting fault -> how many such points there were.
        flipped: the file of which a byte has changed; "" for none.
    """

    round: Round
    began: int
    launcher: Process
    ranks: dict[int, Process] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    waiting: list[Fault] = field(default_factory=list)
    struck: list[Fault] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    flipped: str = ""


@dataclass
class Machine:
    """A machine.

    Attributes:
        script: the training script.
        options: of `samestep launch`.
        constants: of samestep: see `Instance.set_constants`.
        pace: seconds that each step takes.
        slow: probability that a message is late.
    """

    scheduler: Scheduler
    pool: Pool
    script: Path
    options: Mapping[str, str]
    constants: Mapping[str, Any]
    pace: int = 0
    slow: float = 0.0

    def __post_init__(self) -> None:
        self.network = Network(self.scheduler, self.slow)
        self.disk = Disk(self.scheduler)
        self._launch: Launch | None = None
        self._num_launches = 0
        self.scheduler.strike = self._strike
        self.scheduler.on_end = self._clean_up
        tempfile.tempdir = str(self.disk.root)

    def close(self) -> None:
        """Remove its disk."""
        tempfile.tempdir = None
        self.disk.close()

    def run(self, round_: Round) -> Launch:
        """Run `samestep launch` to its end. Raises Hang, or the error of a task."""
        gc.freeze()  # what is there now need not be looked at again
        self._num_launches += 1
        self.scheduler.note(f"start {self._num_launches}: {round_}")
        launcher = self._build_process("launcher", -1, {"PYTHONHASHSEED": "0", "PACE_S": f"{self.pace}"})
        self._launch = Launch(round_, self.scheduler.num_points, launcher, waiting=[*round_.faults])
        options = {"run-dir": str(self.disk.run_dir), "nproc-per-node": str(round_.num_ranks), **self.options}
        if round_.restarts:
            options["max-restarts"] = str(round_.restarts)
        words = ["launch", *(["--heal"] if round_.heals else [])]
        words += [word for name, value in options.items() for word in (f"--{name}", value)]
        launcher.start(partial(_run_launcher, launcher, [*words, str(self.script)]))
        self.scheduler.run()
        choose = random.Random(f"{self.scheduler.seed} {round_}")
        kinds = {fault.kind for fault in self._launch.struck}
        if "power" in kinds:
            self.scheduler.note(f"the power is back, and left are: {self.disk.cut_power(choose)}")
        if "flip" in kinds:
            self._launch.flipped = self.disk.flip_byte(choose)
            self.scheduler.note(f"a byte has changed in {self._launch.flipped}")
        self.disk.full_until_s = 0.0
        return self._launch

    def start_rank(self, rank: int, **arguments: Any) -> Process:
        """Start a rank. `arguments`: of `samestep.launch.rank_process.run_rank`."""
        launch = self._launch
        assert launch is not None
        process = self._build_process(f"rank{rank}", rank, {})
        launch.ranks[rank] = process
        launch.processes.append(process)
        run_rank = process.instance.load("samestep.launch.rank_process").run_rank
        process.start(partial(run_rank, rank=rank, **arguments))
        return process

    def _build_process(self, name: str, rank: int, variables: Mapping[str, str]) -> Process:
        """Build a process with a copy of samestep's modules."""
        process = Process(self.scheduler, f"{self._num_launches}.{name}", rank, variables)
        instance = self.pool.take()
        instance.begin(process, self.disk, self.network, self.start_rank)
        instance.set_constants(self.constants)
        return process

    def _clean_up(self, process: Process) -> None:
        """All threads of a process have ended."""
        process.exit_functions.clear()
        process.handlers.clear()
        process.torch_globals = None
        process.instance.end()
        self.pool.give_back(process.instance)
        process.instance = None
        if self._launch is not None and process is self._launch.launcher:  # its fork server kills them
            for each in self._launch.processes:
                each.end(-int(signal.SIGKILL))

    # --- faults -----------------------------------------------------------------------------------------------

    def _strike(self, task: Task, label: str) -> None:
        launch = self._launch
        if launch is None or not launch.waiting:
            return
        for name in {fault.label for fault in launch.waiting if fault.label and label.startswith(fault.label)}:
            launch.counts[name] += 1
        launch.counts[""] = self.scheduler.num_points - launch.began
        for fault in [*launch.waiting]:
            is_due = launch.counts[fault.label] >= fault.count and label.startswith(fault.label)
            if is_due and (fault.rank is not None or task.process.rank >= 0):
                launch.waiting.remove(fault)
                launch.struck.append(fault)
                self.scheduler.note(f"{fault}: {task.name} is at {label}")
                self._inject(fault, task, launch)

    def _inject(self, fault: Fault, task: Task, launch: Launch) -> None:
        victim = task.process if fault.rank is None else launch.ranks.get(fault.rank, launch.launcher)
        if fault.kind == "stop":
            (launch.launcher if fault.rank is None else victim).receive(signal.SIGTERM)
        elif fault.kind == "full":
            self.disk.full_until_s = self.scheduler.now_s + fault.seconds
        elif fault.kind == "freeze":
            victim.frozen_until_s = self.scheduler.now_s + fault.seconds
        elif fault.kind == "kill":
            victim.receive(signal.SIGKILL)
        else:
            for process in [launch.launcher, *launch.processes]:
                process.receive(signal.SIGKILL)


def _run_launcher(process: Process, words: list[str]) -> None:
    code = process.instance.load("samestep.cli").main(words)
    process.instance.import_module("atexit")._run_exitfuncs()
    process.end(code)
