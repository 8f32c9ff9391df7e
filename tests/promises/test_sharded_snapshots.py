"""Each rank of a sharded run writes a file of its own, and reads what it needs of the files of any number of ranks."""

import errno
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from support.tiny import Tiny, tiny_run

import samestep
from samestep.snapshot.manifest import name_part
from samestep.snapshot.store import Store

DIVIDED = {"SAMESTEP_SHARD": "optimizer"}
SHARDED = {"SAMESTEP_SHARD": "fsdp2"}
MODES: dict[str, dict[str, str]] = {"none": {}, "optimizer": DIVIDED, "fsdp2": SHARDED}
MB = 1 << 20


# --- bytes --------------------------------------------------------------------------------------------------------


def read_counter() -> int:
    """The bytes that this process has read from files so far."""
    line, *_ = Path("/proc/self/io").read_text().splitlines()
    return int(line.removeprefix("rchar: "))


def count_read(run_dir: Path) -> list[int]:
    """Start or resume a run with 4 MB of parameters and 8 MB of optimizer state. Returns the bytes that each rank read
    in `run.prepare`.
    """
    import torch.distributed.fsdp

    run = samestep.Run(run_dir, batch_size=8, micro_batch_size=2, snapshot_every=1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    before = read_counter()
    run.prepare(model=model, optimizer=optimizer)
    num_read = read_counter() - before
    for step in run.steps(torch.ones(64, 512), run.steps_done + 1):
        for x in step:
            step.backward(model(x).square().mean())
        optimizer.step()
    return run._context.group.gather(num_read)


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("written") / "run"
    samestep.spawn(count_read, 3, (run_dir,), env=SHARDED)
    return run_dir


def test_each_rank_writes_what_it_holds(sharded_run: Path) -> None:
    path = sharded_run / "snapshots" / "step-00000001"
    sizes = [(path / name_part(rank)).stat().st_size for rank in range(3)]
    assert sum(sizes) == pytest.approx(12 * MB, rel=0.01)
    assert max(sizes) < 4.1 * MB


@pytest.mark.parametrize(("mode", "world_size", "needed_mb"), [("fsdp2", 2, 6), ("optimizer", 4, 4 + 2)])
def test_each_rank_reads_what_it_needs(
    mode: str, world_size: int, needed_mb: int, sharded_run: Path, tmp_path: Path
) -> None:
    """Besides, the ranks together check every byte once."""
    shutil.copytree(sharded_run, tmp_path / "run")
    counts = samestep.spawn(count_read, world_size, (tmp_path / "run",), env=MODES[mode])
    checked_mb = 12 / world_size
    for count in counts:
        assert needed_mb * MB <= count <= (needed_mb + checked_mb + 1.5) * MB
    assert sum(counts) >= (needed_mb * world_size + 12) * MB


# --- faults -------------------------------------------------------------------------------------------------------


def train_on_full_disk(run_dir: Path, rank: int, step: int) -> None:
    """Train, on a disk that is full when one rank writes the snapshot of one step."""
    prepare = Store.prepare
    is_full = True

    def prepare_or_fail(store: Store, draft: str, tensors: Any, own: int) -> Any:
        nonlocal is_full
        if is_full and own == rank and f"step-{step:08d}" in draft:
            is_full = False
            raise OSError(errno.ENOSPC, "No space left on device")
        return prepare(store, draft, tensors, own)

    Store.prepare = prepare_or_fail  # type: ignore[method-assign]
    tiny_run(run_dir, num_steps=8, snapshot_every=2, keep_last=9, model=lambda: torch.nn.Linear(4, 1))


@pytest.mark.parametrize(("step", "saved"), [(4, [2, 6, 8]), (8, [2, 4, 6])])
def test_the_disk_of_one_rank_is_full(
    step: int, saved: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run continues, rank 0 reports it, and nothing is left of the snapshot."""
    why = f"{name_part(2)} is missing: rank 2 could not write it ([Errno 28] No space left on device)"
    with nullcontext() if step < 8 else pytest.raises(samestep.Error, match=r"could not be written .* fix this"):
        samestep.spawn(train_on_full_disk, 3, (tmp_path, 2, step), env=DIVIDED)
    assert f"the snapshot of step {step} could not be written ({why})" in capfd.readouterr().out
    assert [snapshot.step for snapshot in Store(tmp_path).snapshots()] == saved
    assert sorted(os.listdir(tmp_path / "snapshots")) == [f"step-{each:08d}" for each in saved]


def spoil_one_rank(tiny: Tiny) -> None:
    """Let the shard of rank 1 become nan."""
    tiny.optimizer.step()
    if tiny.step.number == 3 and tiny.run.rank == 1:
        with torch.no_grad():
            tiny.model.weight.to_local().fill_(float("nan"))


def test_a_rank_whose_shard_is_not_finite(tmp_path: Path) -> None:
    given = {"num_steps": 8, "snapshot_every": 2, "model": lambda: torch.nn.Linear(4, 4), "then": spoil_one_rank}
    with pytest.raises(samestep.InvalidValue, match=r"model.weight is not finite after step 4"):
        samestep.spawn(tiny_run, 2, (tmp_path,), given, env=SHARDED)
    assert [snapshot.step for snapshot in Store(tmp_path).snapshots()] == [2]
