"""A small training run with faults, which are data:

    samestep launch --nproc-per-node 2 faulty.py D "{'fault': 'kill rank 1 at step 7 in forward'}"

The words after the script are the run directory and further arguments of `train`. A fault is an action of ACTIONS, its
ranks, the number of steps done, and a moment of MOMENTS. It strikes each of its ranks once, however often the command
is run. (The simulated runs kill ranks at any communication or file operation.)

The run has everything that a resume could lose: a BatchNorm, dropout, augmentation, an average of the model, a schedule
that reads the validation, a score that draws noise, `run.state`, a named snapshot, and rows of its own.
"""

import ast
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import get_worker_info

import samestep
from samestep.engine import exchange, ownership
from samestep.processes import wait_until
from samestep.snapshot.store import Store
from samestep.train.watchdog import Watchdog

BATCH_SIZE, MICRO_BATCH_SIZE, NUM_SAMPLES = 8, 2, 37  # 5 steps per epoch, the last one with 5 samples: 2 + 2 + 1
# "exchanging", "updating", "sending": the last gradients of a step are about to be sent, the optimizer to update, and a
# rank to send or get updated parameters (`shard`). "writing", "committing": a rank is about to write its part of a
# snapshot of this step, and rank 0 to make it visible. "worker": a DataLoader worker has read so many
# samples. "regrouping": a rank has joined the group without a dead rank, and no heartbeat there; its step is 0.
MOMENTS = (
    "forward", "exchanging", "updating", "sending", "validation", "writing", "committing", "worker", "regrouping"
)  # fmt: skip
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
ACTIONS = (*SIGNALS, "raise", "hold", "stop")
FAULT = re.compile(rf"({'|'.join(ACTIONS)}) (?:rank (\d+)|all ranks) at step (\d+) in ({'|'.join(MOMENTS)})")


class Faults:
    """The faults of one run, and the files by which a test watches them, in a directory beside the run's."""

    def __init__(self, faults: Sequence[str], directory: Path, rank: int) -> None:
        self._faults = [FAULT.fullmatch(text) for text in faults]
        self._directory = directory
        self._rank = rank
        self.run: Any = None
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"pid-{rank}").write_text(str(os.getpid()))

    def reach(self, moment: str, step: int | None = None) -> None:
        """Apply the faults of this rank at `moment`. `step`: of the moment; None: the number of steps done."""
        step = self.run.steps_done if step is None else step
        for fault in self._faults:
            action, rank, at_step, at_moment = fault.groups()
            if (at_moment, int(at_step)) == (moment, step) and rank in (None, str(self._rank)):
                self._strike(action, fault[0])

    def _strike(self, action: str, fault: str) -> None:
        if action == "stop":
            self.run.stop("by a fault")
            return
        try:
            (self._directory / f"struck-{fault.replace(' ', '-')}-{self._rank}").touch(exist_ok=False)
        except FileExistsError:
            return
        if action == "raise":
            raise RuntimeError(f"a fault: {fault}")
        if action == "hold":
            (self._directory / f"held-{self._rank}").touch()
            assert wait_until(self._is_released, within_s=60.0), "the test has not released the rank"
        else:
            os.kill(os.getpid(), SIGNALS[action])

    def _is_released(self) -> bool:
        if self.run._services.stopping.signals.heard:
            (self._directory / f"heard-{self._rank}").touch()
        return (self._directory / "go").exists()

    def watch(
        self, owner: Any, name: str, moment: str, find_step: Callable[..., int | None] = lambda *_, **__: None
    ) -> None:
        """Make this rank reach a moment before each call of a function. `find_step` gets the arguments."""
        method = getattr(owner, name)

        def reach_and_call(*arguments: Any, **more: Any) -> Any:
            self.reach(moment, find_step(*arguments, **more))
            return method(*arguments, **more)

        setattr(owner, name, reach_and_call)


class Images(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Blurred stripes of three kinds, with new noise in each read."""

    def __init__(self, num_samples: int, faults: Faults) -> None:
        generator = torch.Generator().manual_seed(num_samples)
        self.kinds = torch.randint(3, (num_samples,), generator=generator)
        self.images = torch.randn(num_samples, 1, 4, 4, generator=generator) + self.kinds.view(-1, 1, 1, 1)
        self._faults = faults
        self._num_read = 0

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if get_worker_info() is not None:
            self._faults.reach("worker", self._num_read)
        self._num_read += 1
        return self.images[index] + 0.3 * torch.randn(1, 4, 4), self.kinds[index]


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(4 * 4 * 4, 3),
    )


def train(
    run_dir: str | Path, fault: str | Sequence[str] = (), *, epochs: int = 3, num_workers: int = 0,
    settled: bool = False, **arguments: Any,
) -> Path:  # fmt: skip
    """Trains a run, or the rest of it. Returns its directory.

    Args:
        fault: one or several faults.
        settled: each step waits until all snapshots are complete, so that a fault cannot interrupt one.
        arguments: for `samestep.Run`.
    """
    directory = Path(run_dir).with_name(f"{Path(run_dir).name}-faults")
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    faults = Faults([fault] if isinstance(fault, str) else fault, directory, rank)
    faults.watch(exchange.Exchange, "finish", "exchanging")
    faults.watch(ownership, "_pass_on", "sending")
    faults.watch(Store, "prepare", "writing", lambda store, draft, *_: int(re.findall(r"\d+", draft)[0]))
    faults.watch(Store, "commit", "committing", lambda *_, step, **__: step)
    faults.watch(Watchdog, "change_group", "regrouping", lambda *_: 0)
    exchange.MAX_BUCKET_BYTES = 512  # so that some gradients are sent while others are still computed
    defaults = {"batch_size": BATCH_SIZE, "micro_batch_size": MICRO_BATCH_SIZE, "log_every": 2, "seed": 5}
    run = faults.run = samestep.Run(run_dir, **defaults | arguments, device="cpu")  # type: ignore[arg-type]
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    optimizer.register_step_pre_hook(lambda *_: faults.reach("updating"))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    run.prepare(model=model, optimizer=optimizer, schedule=schedule, average=average)
    samples, held_out = Images(NUM_SAMPLES, faults), Images(11, faults)

    def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        faults.reach("validation")
        images, kinds = batch
        scores = average(images + 0.3 * torch.randn_like(images))
        return {"loss": F.cross_entropy(scores, kinds), "accuracy": (scores.argmax(1) == kinds).float().mean()}

    for epoch in run.epochs(samples, epochs, num_workers=num_workers):
        for step in epoch:
            if settled:
                run._services.snapshotter.wait_until_written()
                run._context.group.gather_number(0)
            for images, kinds in step:
                scores = model(images)
                faults.reach("forward")
                step.backward(F.cross_entropy(scores, kinds))
                step.log(accuracy=(scores.argmax(1) == kinds).float().mean())
            run.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average.update_parameters(model)
        validation = run.evaluate(score, held_out)
        again = run.evaluate(score, held_out)  # draws other noise
        schedule.step(validation["loss"])
        jitter = torch.rand(()).item()  # the same on all ranks and after every resume
        run.log({f"validation/{name}": value for name, value in validation.items()} | {"jitter": jitter})
        run.log({"again/loss": again["loss"]})
        run.state.setdefault("losses", []).append(validation["loss"])
        if validation["loss"] <= min(run.state["losses"]):
            run.state["best_step"] = run.steps_done
            run.snapshot("best")
    if run.rank == 0:
        with open(directory / "after", "a") as file:
            print(run.steps_done, file=file)
    assert run.dir is not None
    return run.dir


if __name__ == "__main__":
    train(sys.argv[1], **ast.literal_eval(sys.argv[2]))
