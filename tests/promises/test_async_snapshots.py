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
from support.snapshots import build_state, list_steps, read_snapshot
from support.tiny import Hook, Tiny, nothing, update
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


def build(run_dir: Path, **arguments: Any) -> Tiny:
    optimizer = lambda params: torch.optim.AdamW(params, 1e-3)  # noqa: E731
    return Tiny(run_dir, model=Model, optimizer=optimizer, batch_size=4, keep_last=99, **arguments)


def train(run_dir: Path, before: Hook, then: Hook) -> dict[int, str]:
    """Saves after every step. Returns the digests of the script's state, by the steps done."""
    digests = {}

    def note(t: Tiny) -> None:
        then(t)
        done = t.step.number + 1
        digests[done] = digest(build_state(t.run, {"step": done, "epoch": done // 4, "order": None, "lanes": []}))

    build(run_dir, snapshot_every=1).train(data=torch.randn(16, WIDTH), num_steps=NUM_STEPS, before=before, then=note)
    return digests


def replace(t: Tiny) -> None:
    if t.step.number == 4:
        t.model.weight.data = t.model.weight.data * 0.99


# What the script changes, before and after a step, and the steps whose snapshots are taken later.
CHANGES: dict[str, tuple[Hook, Hook, set[int]]] = {
    "nothing": (nothing, update, set()),
    "only later": (lambda t: t.step.number == 4 and t.model.weight.data.mul_(0.99), update, {4}),
    "replaced": (replace, update, set()),
    "after the update": (nothing, lambda t: [update(t), t.model.weight.data.clamp_(-0.01, 0.01)], set()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_holds_what_the_step_left(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    before, then, missing = CHANGES[name]
    digests = samestep.spawn(train, 1, (tmp_path, before, then))
    store = Store(tmp_path)
    found = {snapshot.step: digest(read_snapshot(store, snapshot)) for snapshot in store.snapshots()}
    assert found == {step: digest for step, digest in digests.items() if step not in missing}
    assert found == {snapshot.step: snapshot.manifest["digest"] for snapshot in store.snapshots()}
    assert len(set(found.values())) == len(found)
    assert ("the snapshot of step 4 is taken one step later" in capfd.readouterr().out) == bool(missing)


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

    tiny = build(run_dir, snapshot_every=4, compare_every=4)
    tiny.train(data=torch.randn(16, WIDTH), num_steps=6, before=before, then=then)
    return list_steps(run_dir)


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
    assert "diverged" in run_command(*start, script, tmp_path / "run", cwd=tmp_path).stderr
    assert [(snapshot.step, snapshot.problem) for snapshot in Store(tmp_path / "run").snapshots()] == [(1, None)]


# --- failures in the background ---------------------------------------------------------------------------------------


def train_with(run_dir: Path, patch: Callable[[Any], None], **arguments: Any) -> Any:
    """Returns of each rank the step of the newest snapshot that it knows before each step."""
    tiny = Tiny(run_dir, batch_size=4, keep_last=9, **arguments)
    patch(tiny.run)
    saved: list[int | None] = []
    tiny.train(num_steps=NUM_STEPS, before=lambda t: saved.append(t.run._services.snapshotter.saved_step))
    return tiny.run._context.group.gather(saved)


# --- by the clock -----------------------------------------------------------------------------------------------------


def test_rank_0_s_clock_decides_for_all(tmp_path: Path) -> None:
    def patch(run: Any) -> None:
        from samestep.snapshot import snapshotter

        # A step takes 10 s on rank 0, and no time on rank 1.
        snapshotter.time = SimpleNamespace(monotonic=lambda: 10.0 * run.steps_done * (run.rank == 0))  # type: ignore[attr-defined]

    ours, theirs = samestep.spawn(train_with, 2, (tmp_path, patch), {"snapshot_every": "25s"})
    # Voted on within a step: after 30 s, in the fourth.
    assert ours == theirs == [None, None, None, None, 4, 4, 4, 4]
    assert list_steps(tmp_path) == [4, 8]


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
    assert list_steps(tmp_path / "run") == [3, 6]


def test_without_memory_for_a_copy_the_step_waits(tmp_path: Path) -> None:
    def patch(run: Any) -> None:
        def fail(tensors: Any) -> None:
            raise RuntimeError("CUDA error: out of memory")

        run._services.snapshotter._staging.take = fail

    digests = []
    for name, change in (("without", patch), ("with", lambda run: None)):
        samestep.spawn(train_with, 2, (tmp_path / name, change), {"snapshot_every": 2})
        digests.append([snapshot.manifest["digest"] for snapshot in Store(tmp_path / name).snapshots()])
        assert list_steps(tmp_path / name) == [2, 4, 6, 8]
    assert digests[0] == digests[1]
