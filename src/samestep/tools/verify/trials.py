"""Runs the script, each time in new processes and in a separate directory."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from samestep.config import Overrides
from samestep.console import format_ranks
from samestep.files import read_tail
from samestep.launch.target import Target
from samestep.plan.ledger import Entry
from samestep.snapshot.logs import read_records
from samestep.snapshot.store import Store
from samestep.tools.traced_script import find_errors, run_traced
from samestep.tools.verify.traces import Traced, read_traces
from samestep.watch.records import HEALS, LEDGER, read_rows

TRACE = "samestep.tools.verify.trace:Trace"
SHOWN_LINES = 30


class Setup(NamedTuple):
    """What differs between the starts of a run.

    Attributes:
        world_size: number of ranks.
        shard: the value of the option `shard`; None: that of the script.
    """

    world_size: int
    shard: str | None

    def __str__(self) -> str:
        """Return it in words, such as "2 ranks with shard=fsdp2". One rank has nothing to divide."""
        is_divided = self.world_size > 1 and self.shard not in (None, "none")
        return format_ranks(self.world_size) + (f" with shard={self.shard}" if is_divided else "")


@dataclass(frozen=True)
class TrialOutcome:
    """The result of one start of a run.

    Attributes:
        code: the launcher's exit code.
        output: output of the launcher and rank 0.
        trace: the traces of the ranks.
        final: the digest of the newest snapshot.
        ledger: the record of each step.
        num_lost: the number of ranks that have died while others continued.
    """

    setup: Setup
    code: int
    seconds: float
    output: str
    trace: Traced
    final: str | None
    ledger: tuple[Entry, ...]
    num_lost: int

    @property
    def last_words(self) -> str:
        """The error at the end; without one, the end of the output."""
        return "\n".join(find_errors(self.output) or self.output.rstrip().splitlines()[-SHOWN_LINES:])


@dataclass
class Trials:
    """Starts runs of one target, each in a numbered directory in `home`.

    Attributes:
        overrides: options of `Run` that replace those of the script.
    """

    target: Target
    overrides: Overrides
    home: Path
    num_steps: int
    snapshot_every: int
    _count: int = 0

    def run(
        self,
        setup: Setup,
        *,
        run_dir: Path | None = None,
        hash_seed: str = "0",
        interceptor: str = TRACE,
        flags: Sequence[str] = (),
        **trace: Any,
    ) -> TrialOutcome:
        """Start the script and wait for its end.

        Args:
            run_dir: the directory of an earlier start; None: a new one.
            hash_seed: PYTHONHASHSEED, unless it is set for this process.
            interceptor: an interceptor, "module:class". `Trace` and its subclasses write the traces.
            flags: options of the launcher.
            trace: options of the interceptor.
        """
        self._count += 1
        directory = self.home / f"{self._count:02}-on-{setup.world_size}"
        directory.mkdir()
        run_dir = run_dir or directory / "run"
        options = {
            **self.overrides,
            "run_dir": run_dir,
            "max_steps": self.num_steps,
            "snapshot_every": self.snapshot_every,
            "compare_every": 1,
        }
        if setup.shard is not None:
            options["shard"] = setup.shard
        command = self.target.to_full_command(setup.world_size, *flags)
        began_s = time.monotonic()
        code = run_traced(command, directory, interceptor, options, hash_seed=hash_seed, **trace)
        store = Store(run_dir)
        final = store.find("latest", warn=lambda _: None) if run_dir.exists() else None
        return TrialOutcome(
            setup=setup,
            code=code,
            seconds=time.monotonic() - began_s,
            output=read_tail(directory / "output"),
            trace=read_traces(directory),
            final=None if final is None else store.read_digest(final),
            ledger=tuple(read_records(run_dir / LEDGER)),
            num_lost=sum(len(row["lost"]) for row in read_rows(run_dir / HEALS)),
        )
