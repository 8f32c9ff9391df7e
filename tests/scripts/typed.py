"""A script that uses every part of the public API. Strict type checkers accept it, and it runs."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import samestep


class Printer:
    """A tracker that prints what a run logs."""

    def start(self, info: samestep.TrackerInfo) -> None:
        print(f"{info.name} starts at step {info.resumed_step}")

    def log(self, values: Mapping[str, Any], step: int) -> None:
        print(step, *sorted(values))

    def finish(self, status: str) -> None:
        print(status)


def score(batch: tuple[Tensor, Tensor]) -> Mapping[str, Any]:
    inputs, targets = batch
    return {"error": (inputs.mean() - targets.mean()).abs(), "size": [1.0] * len(inputs)}


def train(run_dir: str, epochs: int = 2) -> float:
    run: samestep.Run = samestep.Run(
        run_dir,
        batch_size=8,
        micro_batch_size=2,
        precision="bf16",
        device=torch.device("cpu"),
        snapshot_every="2epochs",
        log_every="1epochs",
        compare_every=4,
        trackers=[Printer()],
    )
    data = TensorDataset(torch.rand(16, 20), torch.rand(16, 1))
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model=model, optimizer=optimizer)
    loss = torch.zeros(())
    for epoch in run.epochs(data, epochs, shuffle=True):
        for step in epoch:
            for inputs, targets in step:
                with run.autocast():
                    error = nn.functional.mse_loss(model(inputs), targets)
                step.backward(error, weight=len(inputs))
                step.log({"size": len(inputs)}, error=error)
            norm: Tensor = run.clip_grad_norm_(model.parameters(), max_norm=1.0)
            step.log(norm=norm)
            optimizer.step()
            loss = step.loss
        scores: dict[str, Any] = run.evaluate(score, data)
        run.log({"error": scores["error"]})
        averages: dict[str, float] = epoch.metrics
        run.print(run.rank, run.world_size, run.steps_done, sorted(averages))
        run.snapshot("best")
    path: str = run.once(str, run_dir)
    run.restore("best")
    run.print(path)
    return float(loss)


if __name__ == "__main__":
    try:
        value: float = samestep.spawn(train, nprocs=2, args=(sys.argv[1],), kwargs={"epochs": 1}, device="cpu")
    except (samestep.Error, samestep.PeerFailed, samestep.Stuck, samestep.WorkerDied) as problem:
        raise SystemExit(str(problem)) from None
    print(f"loss {value:.3f}")
