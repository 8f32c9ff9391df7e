"""What the ledger's checksum costs, by the step; and a replay of step 9,999 against running all steps again.

The checksum: of the gradients of the `digits` recipe's model and of a transformer of 10 million parameters, on one
rank, in turns with steps. The replay: a small network, with snapshots every 1,000 steps; whole commands.
"""

from __future__ import annotations  # cloudpickle does not see the names in a local class's annotations

import io
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from common import Times, build_contestant, build_parser, compute_ratio, measure, print_json, print_machine, print_table
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import samestep
from samestep.engine.gradient_checksum import compute_checksum
from samestep.recipes.digits import CNN, load_data

TARGET = 0.005  # of a step; one of `digits` takes about 20 ms
STEP, CHECKSUM = "step", "checksum"
WIDTH, LENGTH = 512, 64
SCRIPT = """
import samestep, torch, torch.nn.functional as F
from torch.utils.data import TensorDataset

run = samestep.Run("run", batch_size=32, micro_batch_size=32, snapshot_every={every}, keep_last=2)
data = TensorDataset(torch.rand(512, 20), torch.rand(512, 1))
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
run.prepare(model=model, optimizer=optimizer)
for step in run.steps(data, {steps}):
    for x, y in step:
        step.backward(F.mse_loss(model(x), y))
    optimizer.step()
"""


def build_task(name: str) -> tuple[nn.Module, Dataset[object], int]:
    """A model, its data and its batch size."""
    if name == "digits":
        return CNN(), load_data()[0], 96
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, LENGTH, WIDTH))
    return model, TensorDataset(torch.randn(64, LENGTH, WIDTH), torch.randint(10, (64,))), 8


def measure_checksum(name: str, num_rounds: int, steps_per_block: int) -> tuple[Times, int]:
    """In a new process: steps and checksums in turns. Also returns the number of the model's parameters."""
    sys.stdout = io.StringIO()  # samestep's own lines, up to the end of the process
    run = samestep.Run(None, batch_size=96 if name == "digits" else 8, device="cpu")
    model, data, _ = build_task(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.prepare(model=model, optimizer=optimizer)

    def train() -> Iterator[None]:
        for epoch in run.epochs(data, 10**6):
            for step in epoch:
                for inputs, targets in step:
                    step.backward(F.cross_entropy(model(inputs), targets))
                optimizer.step()
                yield

    def compute() -> Iterator[None]:
        for number in itertools.count():
            compute_checksum([param.grad for param in model.parameters()], number)()
            yield

    steps = train()
    next(steps)
    contestants = [build_contestant(STEP, steps, deterministic=True), build_contestant(CHECKSUM, compute())]
    times = measure(contestants, num_rounds=num_rounds, steps_per_block=steps_per_block)
    return times, sum(param.numel() for param in model.parameters())


def measure_replay(num_steps: int) -> dict[str, float]:
    """Seconds of whole commands: the run, the run again, and replays of two of its steps."""
    every = num_steps // 10
    with tempfile.TemporaryDirectory() as home:
        Path(home, "train.py").write_text(SCRIPT.format(every=every, steps=num_steps))

        def run(*words: str) -> float:
            began_s = time.perf_counter()
            subprocess.run([sys.executable, "-m", "samestep", *words], cwd=home, check=True, capture_output=True)
            return time.perf_counter() - began_s

        run("launch", "--nproc-per-node", "1", "train.py")
        replay = ("replay", "run", "train.py")
        again_s = run("launch", "--nproc-per-node", "1", "--run-dir", "again", "train.py")
        return {
            "run again": again_s,
            f"replay, {every} steps after a snapshot": run(*replay[:2], "--step", str(num_steps - 1), replay[2]),
            "replay, the step after a snapshot": run(*replay[:2], "--step", str(num_steps - every), replay[2]),
        }


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each, after one to warm up")
    parser.add_argument("--steps", type=int, default=10_000, help="of the run that is replayed")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps = 2, 40
    if not args.json:
        print_machine()
    results: dict[str, dict[str, float]] = {}
    for name, steps_per_block in (("digits", 20), ("transformer", 4)):
        times, num_params = samestep.spawn(measure_checksum, 1, (name, args.rounds, steps_per_block), device="cpu")
        cost_s = statistics.median(times[CHECKSUM])
        results[name] = {
            "parameters": num_params,
            "step_ms": statistics.median(times[STEP]) * 1e3,
            "checksum_us": cost_s * 1e6,
            "of a step": compute_ratio(times, CHECKSUM, STEP),
        }
    replays = measure_replay(args.steps)
    if args.json:
        print_json(checksum=results, replay=replays, target=TARGET)
        return
    for name, values in results.items():
        share = values["of a step"]
        rows = [
            ["step", f"{values['step_ms']:,.1f} ms"],
            ["checksum", f"{values['checksum_us']:,.0f} us"],
            ["checksum by step", f"{share:.2%} (<= {TARGET:.1%} {'met' if share <= TARGET else 'MISSED'})"],
        ]
        print_table([f"{name}, {values['parameters']:,.0f} parameters", ""], rows)
    again_s = replays["run again"]
    rows = [[name, f"{seconds:.1f} s", f"{seconds / again_s:.2f}"] for name, seconds in replays.items()]
    print_table([f"{args.steps:,} steps", "time", "by running again"], rows)


if __name__ == "__main__":
    main()
