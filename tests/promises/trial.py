"""A run under test: started in each way, hit by faults and signals, and compared with a run without them."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from promises.faulty import train
from support.commands import Popen
from support.hosts import Host
from support.runs import ask, clean_variables, digest, read_bits
from support.waiting import DEADLINE_S, wait_until

import samestep
from samestep.snapshot.store import Store
from samestep.watch.records import LOCK, RANKS

SCRIPT = Path(__file__).with_name("faulty.py")
HELD = "hold rank 0 at step 7 in forward"
KILLED = "kill all ranks at step 8 in forward"
PROMPTLY_S = 30.0  # from a fault to the end of all processes: 1 s on an idle machine


Outcome = tuple[str, str, bytes, bytes]
Undisturbed = Callable[..., Outcome]  # the fixture of this name


def read_outcome(run_dir: Path) -> Outcome:
    """The results of a complete run that must be the same after any faults. Audits its samples."""
    ask("inspect", run_dir, "--samples")
    return digest(run_dir, "best"), *read_bits(run_dir)


def read_tree(directory: Path) -> dict[str, str] | None:
    """The hash of every file by its path, and "directory" for a directory, but without what a refused start may write.

    None: there is no directory.
    """
    if not directory.exists():
        return None
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "directory"
        for path in sorted(directory.rglob("*"))
        if path.name not in (LOCK, RANKS)
    }


def read_restarts(run_dir: Path) -> list[dict[str, Any]]:
    """The record of each start but the first."""
    path = run_dir / "restarts.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert [row["restart"] for row in rows] == list(range(1, len(rows) + 1))
    for row in rows:
        began_s = datetime.strptime(row["time"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
        assert abs(time.time() - began_s) < 86400
    return rows


def enter_node(disks: Sequence[Path], num_ranks: int = 1) -> int:
    """Makes this process one of the `num_ranks` ranks of a node, which has a directory of its own. Returns the node."""
    node, local_rank = divmod(int(os.environ["RANK"]), num_ranks)
    disks[node].mkdir(exist_ok=True)
    os.chdir(disks[node])
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(num_ranks))
    return node


class Started(Popen):
    """A running program with its output."""

    def __init__(
        self, command: Sequence[str | Path], output: Path, env: Mapping[str, str], host: Host | None = None
    ) -> None:
        self.out, self.err = output.with_suffix(".out"), output.with_suffix(".err")
        variables = clean_variables(env)
        variables.pop("PYTHONUNBUFFERED", None)  # which is rarely set
        with open(self.out, "w") as out, open(self.err, "w") as err:
            super().__init__(
                command,
                host=host,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=output.parent,
                process_group=0,
            )

    def finish(self, deadline_s: float = DEADLINE_S) -> int:
        """Waits until the program and its descendants have ended. Returns its exit code."""
        try:
            code = self.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {deadline_s} s:\n{self.output}") from None
        wait_until(lambda: not self.processes(), "all its processes have ended")
        return code

    @property
    def output(self) -> str:
        return self.out.read_text() + self.err.read_text()


def fail(spawn: Callable[..., object], *words: Any, **arguments: Any) -> None:
    """Call a function that trains, and is ended by a fault."""
    with pytest.raises(Exception):  # noqa: B017, PT011
        spawn(*words, **arguments)


class Trial:
    """One run directory, and the starts and faults of its run.

    Attributes:
        dir: the run's directory.
        faults: the directory beside it in which the script and the test exchange files.
    """

    def __init__(self, run_dir: Path) -> None:
        self.dir = run_dir
        self.faults = run_dir.with_name(f"{run_dir.name}-faults")
        self._started: list[Started] = []
        self.faults.mkdir()

    # --- ways to start it -------------------------------------------------------------------------------------

    def start(
        self, how: str, num_ranks: int = 1, fault: str | Sequence[str] = (), *flags: str, host: Host | None = None,
        script: Path = SCRIPT, engine: Sequence[str] = (), **arguments: Any,
    ) -> Started:  # fmt: skip
        """Starts the script. `how` is "launch" (with its `flags`), "torchrun", "agent" (under torchrun) or "python".

        Args:
            host: another host.
            engine: the flags of torchrun, for "agent".
            arguments: of `faulty.train`.
        """
        before: dict[str, list[str]] = {
            "launch": ["-m", "samestep", "launch", "--nproc-per-node", str(num_ranks), *flags],
            "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)],
            "agent": [
                "-m", "torch.distributed.run", "--nproc-per-node", "1", *engine,
                "-m", "samestep.node", "--nproc-per-node", str(num_ranks), *flags,
            ],
            "python": [],
        }  # fmt: skip
        env = {
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",  # as `samestep launch` sets it
            "SAMESTEP_RDZV_SECRET": "known-to-all-nodes",
            **({"GLOO_SOCKET_IFNAME": "lo"} if host is None else {}),
        }
        output = self.faults / f"output-{len(self._started)}"
        words = [script, self.dir, repr({"fault": fault, **arguments})]
        started = Started([sys.executable, *before[how], *words], output, env, host)
        self._started.append(started)
        return started

    def run(self, how: str, *words: Any, code: int = 0, **more: Any) -> Started:
        """Starts the script and waits for its end with exit code `code`."""
        started = self.start(how, *words, **more)
        found = started.finish()
        assert found == code, f"{how} ended with {found}, not {code}:\n{started.output}"
        return started

    def spawn(
        self, num_ranks: int = 1, fault: str | Sequence[str] = (), *, env: Mapping[str, str] = {}, **arguments: Any
    ) -> Path:
        """Trains by `samestep.spawn`, which raises the exceptions of ranks. Returns the run's directory."""
        return samestep.spawn(train, num_ranks, (self.dir, fault), arguments, env=env)

    # --- faults and signals ------------------------------------------------------------------------------------

    def assert_struck(self, *faults: str) -> None:
        """Faults have struck, and all processes have ended promptly."""
        for fault in faults:
            struck_s = [path.stat().st_mtime for path in self.faults.glob(f"struck-{fault.replace(' ', '-')}-*")]
            assert struck_s, f"{fault} did not strike"
            assert time.time() - max(struck_s) < PROMPTLY_S, f"{fault}: all ended too late"

    def wait_held(self, rank: int = 0) -> None:
        """Waits until the fault holds the rank."""
        held, last = self.faults / f"held-{rank}", self._started[-1]
        wait_until(lambda: held.exists() or last.poll() is not None, f"rank {rank} is held")
        assert held.exists(), last.output

    def go_on(self) -> None:
        """Releases the ranks that a fault holds."""
        (self.faults / "go").touch()

    def pid(self, rank: int) -> int:
        return int((self.faults / f"pid-{rank}").read_text())

    # --- results -----------------------------------------------------------------------------------------------

    @property
    def snapshots(self) -> list[str]:
        """The names of the sound snapshots, oldest first."""
        return [snapshot.path.name for snapshot in Store(self.dir).snapshots() if snapshot.problem is None]

    @property
    def num_ends(self) -> int:
        """The number of times that the code after the loop has run."""
        path = self.faults / "after"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def outcome(self) -> Outcome:
        return read_outcome(self.dir)

    def close(self) -> None:
        left = [process for started in self._started for process in started.processes()]
        for started in self._started:
            started.kill_all()
        assert not left, f"left behind: {left}"


def resume_is_from(output: str) -> int:
    """The step from which a run prints that it resumes; 0 if it begins."""
    _, found, after = output.partition("; resumed at step ")
    return int(after.split()[0]) if found else 0
