"""A run whose steps take about 20 ms, for benchmarks of what is done beside the steps."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import samestep

NUM_MICRO_BATCHES, MICRO_BATCH_SIZE, WIDTH = 8, 16, 512
STEP_S = 0.020


def build_paced_run(run_dir: str | None, **arguments: Any) -> tuple[samestep.Run, Iterator[None]]:
    """On each rank: return a run and its steps, which end with each `next`. Further arguments are for `Run`."""
    batch_size = NUM_MICRO_BATCHES * MICRO_BATCH_SIZE
    run = samestep.Run(run_dir, batch_size=batch_size, micro_batch_size=MICRO_BATCH_SIZE, device="cpu", **arguments)
    model = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    run.prepare(model=model, optimizer=optimizer)
    data = [torch.ones(WIDTH)] * (4 * batch_size)
    repeats = 1

    def train() -> Iterator[None]:
        for step in run.steps(data, 10**9):
            for x in step:
                for _ in range(repeats - 1):  # so that a step takes about as long as it should
                    with torch.no_grad():
                        model(x)
                step.backward(model(x).square().mean())
            optimizer.step()
            yield

    steps = train()
    for _ in range(5):
        next(steps)
    times_s = []
    for count in (1, 3):
        repeats = count
        began_s = time.perf_counter()
        for _ in range(10):
            next(steps)
        times_s.append((time.perf_counter() - began_s) / 10)
    own = 1 + round(max(0.0, STEP_S - times_s[0]) / max((times_s[1] - times_s[0]) / 2, 1e-4))
    repeats = run._context.group.gather_number(own)[0]
    return run, steps
