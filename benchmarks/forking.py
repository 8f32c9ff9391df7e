"""Forks while all threads of a run are at work."""

from __future__ import annotations  # cloudpickle does not see the names in a local class's annotations

import hashlib
import io
import os
import signal
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from common import build_parser, print_json, print_machine, print_table
from torch import Tensor, nn
from torch.utils.data import Dataset

import samestep
from samestep import processes
from samestep.watch import diagnosis

STUCK_S = 60
FIGURES = {"forks": 0, "at_work": 0, "stuck": 0, "fork_ms": 1, "most_ms": 1}  # and how many digits are printed


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((64,), float(index)) + torch.rand(64)


def build(run_dir: str | None, width: int, **arguments: Any) -> tuple[samestep.Run, nn.Module, torch.optim.Optimizer]:
    sys.stdout = io.StringIO()  # samestep's own lines, up to the end of the process
    run = samestep.Run(run_dir, batch_size=32, micro_batch_size=8, device="cpu", **arguments)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-9, momentum=0.9)
    run.prepare(model=model, optimizer=optimizer)
    return run, model, optimizer


def use_libraries() -> None:
    """What a loader worker may do first: allocate, compute, hash, import, draw."""
    torch.rand(1000, 10).sort(0)
    hashlib.sha256(b"x" * 100_000).digest()
    torch.manual_seed(1)
    import colorsys  # noqa: F401
    import wave  # noqa: F401


def fork_under_load(num_forks: int, run_dir: str, is_gated: bool) -> dict[str, Any]:
    """On each rank: forks between the steps of a run that takes a snapshot at each, with 100 heartbeats a second."""
    diagnosis.INTERVAL_S = 0.01
    if not is_gated:
        processes.FORK_LIMIT_S = 0.0
    at_work, began, took_s, stuck = 0, 0.0, [], 0

    def look() -> None:
        nonlocal at_work
        at_work += bool(processes._gate._at_work)

    os.register_at_fork(before=lambda: None, after_in_parent=look)
    run, model, optimizer = build(run_dir, 1024, snapshot_every=1, keep_last=1)
    for step in run.steps(Samples(), 10**9, num_workers=1):
        for x in step:
            step.backward(model(x).mean())
        optimizer.step()
        for _ in range(20):
            began = time.perf_counter()
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(STUCK_S)
                use_libraries()
                os._exit(0)
            took_s.append(time.perf_counter() - began)
            stuck += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
        if len(took_s) >= num_forks:
            run.stop()
    most_ms = 1000 * max(took_s)
    return {"forks": len(took_s), "at_work": at_work, "stuck": stuck, "fork_ms": 1000 * statistics.median(took_s),
            "most_ms": most_ms}  # fmt: skip


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--forks", type=int, default=2000, help="per rank")
    args = parser.parse_args()
    if args.quick:
        args.forks = 20
    forks = {}
    for is_gated in (True, False):
        with tempfile.TemporaryDirectory() as directory:
            forks["gate" if is_gated else "no gate"] = samestep.spawn(
                fork_under_load, 2, (args.forks, os.path.join(directory, "run"), is_gated)
            )
    if args.json:
        print_json(forks=forks)
        return
    print_machine()
    rows = [
        [name, *(f"{told[key]:.{digits}f}" for key, digits in FIGURES.items())]
        for name, told in forks.items()
    ]  # fmt: skip
    print_table(["forks of rank 0", "all", "a thread at work", "stuck", "median ms", "most ms"], rows)


if __name__ == "__main__":
    main()
