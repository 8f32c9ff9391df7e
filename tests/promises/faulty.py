"""A small training run with faults, which are data:

    samestep launch --nproc-per-node 2 faulty.py D --fault "kill rank 1 at step 7 in forward"

A fault is an action of ACTIONS, its ranks, the number of steps done, and a moment of MOMENTS. It strikes once, however
often the command is run. The run has everything that a resume could lose: a BatchNorm, dropout, augmentation, an
average of the model, a schedule that reads the validation, a score that draws noise, `run.state`, a named snapshot,
and rows of its own.
"""

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import get_worker_info

import samestep
from samestep.engine import buckets
from samestep.plan.tree import build_layout
from samestep.train.guards.watchdog import Watchdog

BATCH_SIZE, MICRO_BATCH_SIZE, NUM_SAMPLES = 8, 2, 37
STEPS_PER_EPOCH = 5  # the last one with 5 samples: 2 + 2 + 1
NUM_EPOCHS = 3
NUM_STEPS = NUM_EPOCHS * STEPS_PER_EPOCH
DEADLINE_S = 60.0
MOMENTS = (
    "start", "forward", "backward", "reduction", "update", "validation", "before schedule", "after schedule", "worker",
    "writing tensors", "writing manifest", "replacing best", "rewinding", "regrouping",
)  # fmt: skip
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
ACTIONS = (*SIGNALS, "raise", "hold", "stop")
FAULT = re.compile(rf"({'|'.join(ACTIONS)}) (?:rank (\d+)|all ranks) at step (\d+) in ({'|'.join(MOMENTS)})")


@dataclass(frozen=True)
class Fault:
    """An action, its rank (None: all) and its time.

    `step` is the number of steps done; at the moment "worker", of samples that this DataLoader worker has read.
    """

    action: str
    rank: int | None
    step: int
    moment: str

    @classmethod
    def parse(cls, text: str) -> "Fault":
        match = FAULT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no fault: {FAULT.pattern}")
        return cls(match[1], None if match[2] is None else int(match[2]), int(match[3]), match[4])

    def __str__(self) -> str:
        who = "all ranks" if self.rank is None else f"rank {self.rank}"
        return f"{self.action} {who} at step {self.step} in {self.moment}"


class Faults:
    """The faults of one run, and the files by which a test watches them, in a directory beside the run's."""

    def __init__(self, faults: Sequence[str], directory: Path) -> None:
        self._faults = [Fault.parse(text) for text in faults]
        self._directory = directory
        self._struck: set[Fault] = set()
        self._struck_before: set[str] = set()  # names of the files of faults that struck an earlier start
        self.rank = 0
        self.run: Any = None
        directory.mkdir(parents=True, exist_ok=True)

    def join(self, rank: int) -> None:
        """Writes the pid of this rank. All ranks have done so before `samestep.Run` returns on any."""
        self.rank = rank
        self._struck_before = {path.name for path in self._directory.glob("struck-*")}
        (self._directory / f"pid-{rank}").write_text(str(os.getpid()))

    def reach(self, moment: str, step: int | None = None) -> None:
        """Applies the faults of this rank at `moment`."""
        step = self.run.steps_done if step is None else step
        for fault in self._faults:
            if (fault.moment, fault.step) == (moment, step) and fault.rank in (None, self.rank):
                if fault.action == "stop":
                    self.run.stop("by a fault")
                elif self._is_first(fault):
                    self._strike(fault)

    def _is_first(self, fault: Fault) -> bool:
        if fault in self._struck:
            return False
        self._struck.add(fault)
        path = self._directory / f"struck-{str(fault).replace(' ', '-')}"
        if fault.action == "raise" and fault.rank is None:  # once on each rank
            path.write_text(str(fault))
            return True
        try:
            with open(path, "x") as file:
                file.write(str(fault))
        except FileExistsError:
            while fault.action == "kill" and path.name not in self._struck_before:  # the first rank kills this
                signal.pause()
            return False
        return True

    def _strike(self, fault: Fault) -> None:
        if fault.action == "raise":
            raise RuntimeError(f"a fault: {fault}")
        if fault.action == "hold":
            (self._directory / f"held-{self.rank}").touch()
            deadline_s = time.monotonic() + DEADLINE_S
            while not (self._directory / "go").exists():
                if self.run._services.stopping.signals.heard:
                    (self._directory / f"heard-{self.rank}").touch()
                if time.monotonic() > deadline_s:
                    raise TimeoutError("the test has not released the rank")
                time.sleep(0.005)
            return
        others = set(self.run._context.group.members) - {self.rank} if fault.rank is None else set()
        pids = [*(int((self._directory / f"pid-{rank}").read_text()) for rank in others), os.getpid()]
        for pid in pids if fault.action == "freeze" else []:
            (self._directory / f"frozen-{pid}").touch()
        for pid in pids:
            os.kill(pid, SIGNALS[fault.action])

    def watch_regrouping(self) -> None:
        """Makes a rank reach that moment when it has joined the group without a dead rank, before its heartbeat there.

        The step of a fault is 0.
        """

        def reach_and_change(watchdog: Watchdog, change: Any = Watchdog.change_group) -> None:
            self.reach("regrouping", 0)
            change(watchdog)

        Watchdog.change_group = reach_and_change  # type: ignore[method-assign]

    def watch_saving(self) -> None:
        """Makes a rank reach those of the moments in saving that it has, at which no line of a script runs.

        Most of them come during later steps. The step of a fault is that of the snapshot.
        """

        def on_event(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and "/.tmp-step-" in (file := str(args[0])):
                if file.endswith(("state.json", ".partial")):  # or a receipt of a rank: only the tensors are complete
                    self.reach("writing tensors", read_step(Path(file).parent))
                if file.endswith("manifest.json"):
                    self.reach("writing manifest", read_step(Path(file).parent))
            elif event == "os.rename":
                source, target = Path(str(args[0])), Path(str(args[1]))
                if target.parent.name == "abandoned":
                    self.reach("rewinding", 0)  # whichever step the run goes back to
                elif source.name.startswith(".tmp-best.") and target.name.startswith("best."):
                    self.reach("replacing best", read_step(target))

        sys.addaudithook(on_event)


def read_step(snapshot: Path) -> int:
    """The step of a snapshot, from its name, which may not be final."""
    return int(snapshot.name.partition("step-")[2].partition(".")[0])


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
    run_dir: str | Path, fault: str | Sequence[str] = (), *, epochs: int = NUM_EPOCHS, num_workers: int = 0,
    settled: bool = False, **arguments: Any,
) -> Path:  # fmt: skip
    """Trains a run, or the rest of it. Returns its directory.

    Args:
        fault: one or several faults.
        settled: each step waits until all snapshots are complete, so that a fault cannot interrupt one.
        arguments: for `samestep.Run`.
    """
    directory = Path(run_dir).with_name(f"{Path(run_dir).name}-faults")
    faults = Faults([fault] if isinstance(fault, str) else fault, directory)
    names = ("RANK", "SLURM_PROCID")
    faults.join(int(next((os.environ[name] for name in names if name in os.environ), "0")))
    defaults = {"batch_size": BATCH_SIZE, "micro_batch_size": MICRO_BATCH_SIZE, "log_every": 2, "seed": 5}
    buckets.MAX_BYTES = 512  # so that some gradients are sent while others are still computed
    run = faults.run = samestep.Run(run_dir, **defaults | arguments, device="cpu")  # type: ignore[arg-type]
    faults.watch_regrouping()
    if run.rank == 0 or "SAMESTEP_SHARD" in os.environ:
        faults.watch_saving()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    run.prepare(model=model, optimizer=optimizer, schedule=schedule, average=average)
    samples, held_out = Images(NUM_SAMPLES, faults), Images(11, faults)
    num_begun = 0

    def on_first_grad(_: Tensor) -> None:
        # One of the last gradients of a backward: in the rank's last micro-batch, most buckets have been sent.
        if num_begun == len(build_layout(num_micro_batches(run.steps_done), run.world_size).ranges[run.rank]):
            faults.reach("reduction")

    def watch_output(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(on_first_grad)  # type: ignore[no-untyped-call]

    first_layer = next(part for part in model.modules() if [*part.parameters(recurse=False)])
    first_layer.register_forward_hook(watch_output)

    def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        faults.reach("validation")
        images, kinds = batch
        scores = average(images + 0.3 * torch.randn_like(images))
        return {"loss": F.cross_entropy(scores, kinds), "accuracy": (scores.argmax(1) == kinds).float().mean()}

    def train_step(step: Any) -> None:
        nonlocal num_begun
        num_begun = 0
        if settled:
            run._services.snapshotter.wait_until_written()
            run._context.group.barrier()
        for images, kinds in step:
            num_begun += 1
            scores = model(images)
            faults.reach("forward")
            scores.register_hook(lambda _: faults.reach("backward"))
            step.backward(F.cross_entropy(scores, kinds))
            step.log(accuracy=(scores.argmax(1) == kinds).float().mean())
        run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        faults.reach("update")

    def validate(steps_done: int) -> None:
        validation = run.evaluate(score, held_out)
        again = run.evaluate(score, held_out)  # draws other noise
        faults.reach("before schedule")
        schedule.step(validation["loss"])
        jitter = torch.rand(()).item()  # the same on all ranks and after every resume
        run.log({f"validation/{name}": value for name, value in validation.items()} | {"jitter": jitter})
        run.log({"again/loss": again["loss"]})
        run.state.setdefault("losses", []).append(validation["loss"])
        if validation["loss"] <= min(run.state["losses"]):
            run.state["best_step"] = steps_done
            run.snapshot("best")
        faults.reach("after schedule")

    faults.reach("start")
    for epoch in run.epochs(samples, epochs, num_workers=num_workers):
        for step in epoch:
            train_step(step)
        validate(run.steps_done)
    if run.rank == 0:
        with open(directory / "after", "a") as file:
            print(run.steps_done, file=file)
    assert run.dir is not None
    return run.dir


def num_micro_batches(step: int) -> int:
    """The number of micro-batches of a step. The last step of an epoch is short."""
    is_last = step % STEPS_PER_EPOCH == STEPS_PER_EPOCH - 1
    size = NUM_SAMPLES - (STEPS_PER_EPOCH - 1) * BATCH_SIZE if is_last else BATCH_SIZE
    return -(-size // MICRO_BATCH_SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--epochs", type=int, default=NUM_EPOCHS)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--settled", action="store_true")
    args = parser.parse_args()
    options = {"epochs": args.epochs, "num_workers": args.num_workers, "settled": args.settled}
    train(args.run_dir, args.fault, **options)


if __name__ == "__main__":
    main()
