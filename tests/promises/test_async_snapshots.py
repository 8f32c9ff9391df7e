"""Snapshots are written while the next steps run: always complete, never lost without a message, one at a time."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.runs import run_command
from support.snapshots import read_snapshot
from support.states import build_state
from support.tiny import Tiny, update
from support.waiting import DEADLINE_S
from torch import Tensor, nn

import samestep
from samestep.snapshot.async_copy import LARGE_BYTES
from samestep.snapshot.serialization import digest
from samestep.snapshot.store import Store

WIDTH = 512
NUM_STEPS = 8

# --- complete, with any change to the model by the script -------------------------------------------------------------


class Model(nn.Module):
    """With a weight large enough to be copied during the next step, and a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        assert self.weight.numel() * self.weight.element_size() >= LARGE_BYTES

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1.0)
        return x @ self.weight + self.bias


def train(run_dir: Path, changes: str) -> dict[int, str]:
    """Saves after every step. Returns the digests of the script's state, by the steps done."""
    digests = {}

    def before(t: Tiny) -> None:
        if changes == "only later" and t.step.number == 4:
            t.model.weight.data.mul_(0.99)
        if changes == "replaced" and t.step.number == 4:
            t.model.weight.data = t.model.weight.data * 0.99

    def then(t: Tiny) -> None:
        update(t)
        if changes == "after the update":
            t.model.weight.data.clamp_(-0.01, 0.01)
        done = t.step.number + 1
        digests[done] = digest(build_state(t.run, {"step": done, "epoch": done // 4}))

    optimizer = lambda params: torch.optim.AdamW(params, 1e-3)  # noqa: E731
    tiny = Tiny(run_dir, model=Model, optimizer=optimizer, batch_size=4, snapshot_every=1, keep_last=99)
    tiny.train(data=torch.randn(16, WIDTH), num_steps=NUM_STEPS, before=before, then=then)
    return digests


@pytest.mark.parametrize("changes", ["nothing", "only later", "replaced", "after the update"])
def test_it_holds_what_the_step_left(tmp_path: Path, changes: str, capfd: pytest.CaptureFixture[str]) -> None:
    digests = samestep.spawn(train, 1, (tmp_path, changes))
    store = Store(tmp_path)
    found = {snapshot.step: snapshot.manifest["digest"] for snapshot in store.snapshots()}
    missing = {4} if changes == "only later" else set()
    assert found == {step: digest for step, digest in digests.items() if step not in missing}
    assert len(set(found.values())) == len(found)
    assert ("the snapshot of step 4 is taken one step later" in capfd.readouterr().out) == bool(missing)
    for step in found:
        snapshot = store.find(step)
        assert snapshot is not None
        assert digest(read_snapshot(store, snapshot)) == found[step]


def reset_and_take_over(run_dir: Path) -> list[int]:
    """Resets the optimizer while its state is copied. Returns the steps of the snapshots of the second half."""

    def before(t: Tiny) -> None:
        if t.step.number == 4:
            for state in t.optimizer.state.values():
                state["exp_avg"].zero_()

    def then(t: Tiny) -> None:
        update(t)
        if t.step.number == 3:
            t.run.snapshot("best")
        if t.step.number == 4 and t.run.rank == 0:  # as if it took over from a rank that died now
            t.run._services.snapshotter.take_over()

    optimizer = lambda params: torch.optim.AdamW(params, 1e-3)  # noqa: E731
    every = {"snapshot_every": 4, "compare_every": 4}
    tiny = Tiny(run_dir, model=Model, optimizer=optimizer, batch_size=4, keep_last=99, **every)
    tiny.train(data=torch.randn(16, WIDTH), num_steps=6, before=before, then=then)
    return [snapshot.step for snapshot in Store(run_dir).snapshots()]


def test_ranks_agree_whether_it_is_taken_later(tmp_path: Path) -> None:
    """Rank 0 alone copies the state of the optimizer. A named snapshot that is taken later is not lost."""
    assert samestep.spawn(reset_and_take_over, 2, (tmp_path,)) == [5, 5, 6]


# --- while the steps run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["launch", "python"])
def test_an_exception_makes_no_snapshot_that_is_not_finite(tmp_path: Path, how: str) -> None:
    """The script checks its loss itself, and ends before samestep has checked the copy."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, samestep, torch\n"
        "run = samestep.Run(sys.argv[1], batch_size=4, micro_batch_size=1, snapshot_every=1, device='cpu')\n"
        "model = torch.nn.Linear(512, 512)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "run.prepare(model=model, optimizer=optimizer)\n"
        "for step in run.steps(torch.randn(8, 512), 4):\n"
        "    for x in step:\n"
        "        loss = model(x).square().mean()\n"
        "        if not loss.isfinite():\n"
        "            raise RuntimeError('diverged')\n"
        "        step.backward(loss)\n"
        "    if step.number == 1:\n"
        "        model.weight.grad[3, 3] = float('inf')\n"
        "    optimizer.step()\n"
    )
    start = [sys.executable, *(["-m", "samestep", "launch"] if how == "launch" else [])]
    done = run_command(*start, script, tmp_path / "run", cwd=tmp_path)
    assert "diverged" in done.stderr
    assert [(snapshot.step, snapshot.problem) for snapshot in Store(tmp_path / "run").snapshots()] == [(1, None)]


# --- failures in the background ---------------------------------------------------------------------------------------


def train_with(run_dir: Path, patch: Callable[[Any], None], **arguments: Any) -> list[int | None]:
    """Returns the step of the newest snapshot, as this rank knows it, before each step."""
    tiny = Tiny(run_dir, batch_size=4, **arguments)
    patch(tiny.run)
    saved: list[int | None] = []
    tiny.train(num_steps=NUM_STEPS, before=lambda t: saved.append(t.run._services.snapshotter.saved_step))
    return saved


# --- by the clock -----------------------------------------------------------------------------------------------------


def test_rank_0_s_clock_decides_for_all(tmp_path: Path) -> None:
    def patch(run: Any) -> None:
        from samestep.snapshot import snapshotter

        # A step takes 10 s on rank 0, and no time on rank 1.
        snapshotter.time = SimpleNamespace(monotonic=lambda: 10.0 * run.steps_done * (run.rank == 0))  # type: ignore[attr-defined]

    def train_and_gather(run_dir: Path) -> list[list[int | None]]:
        import torch.distributed as dist

        saved = train_with(run_dir, patch, snapshot_every="25s", keep_last=9)
        gathered: list[list[int | None]] = [[], []]
        dist.all_gather_object(gathered, saved)
        return gathered

    ours, theirs = samestep.spawn(train_and_gather, 2, (tmp_path,))
    # Voted on within a step: after 30 s, in the fourth.
    assert ours == theirs == [None, None, None, None, 4, 4, 4, 4]
    assert [snapshot.step for snapshot in Store(tmp_path).snapshots()] == [4, 8]


def test_steps_go_on_while_it_is_written(tmp_path: Path) -> None:
    """The disk hangs at step 3 until step 5 is done, and no snapshot is found until then."""

    def train() -> list[bool]:
        is_there, go_on = list[bool](), threading.Event()
        prepare, tiny = Store.prepare, Tiny(tmp_path / "run", snapshot_every=3)

        def hang_and_prepare(*arguments: Any) -> Any:
            assert go_on.wait(DEADLINE_S)
            return prepare(*arguments)

        def before(t: Tiny) -> None:
            if t.step.number == 5:
                is_there.append(bool(Store(tmp_path / "run").snapshots()))
                go_on.set()

        Store.prepare = hang_and_prepare  # type: ignore[method-assign]
        tiny.train(num_steps=6, before=before)
        return is_there

    assert samestep.spawn(train, 1) == [False]
    assert [snapshot.step for snapshot in Store(tmp_path / "run").snapshots()] == [3, 6]


def test_without_memory_for_a_copy_the_step_waits(tmp_path: Path) -> None:
    def patch(run: Any) -> None:
        def fail(tensors: Any) -> None:
            raise RuntimeError("CUDA error: out of memory")

        run._services.snapshotter._staging.take = fail

    samestep.spawn(train_with, 2, (tmp_path / "without", patch), {"snapshot_every": 2, "keep_last": 9})
    samestep.spawn(train_with, 2, (tmp_path / "with", lambda run: None), {"snapshot_every": 2, "keep_last": 9})
    ours, theirs = (
        [(each.step, each.manifest["digest"]) for each in Store(tmp_path / name).snapshots()]
        for name in ("without", "with")
    )
    assert ours == theirs
    assert [step for step, _ in ours] == [2, 4, 6, 8]
