"""What comparing the ranks' models costs: the `digits` recipe's training on 2 ranks, by the step.

Parameters, Adam's state and the exchange of 8 bytes, every 100 steps and once per epoch, before its snapshot.
"""

from __future__ import annotations  # cloudpickle does not see the names in a local class's annotations

import io
import itertools
import statistics
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from common import Times, build_contestant, build_parser, compute_ratio, measure, print_json, print_machine, print_table

import samestep
from samestep.recipes.digits import CNN, load_data

EVERY = 100  # Run's default
NEVER = 10**9  # steps
TARGET = 0.005
STEP, COMPARISON = "step", "comparison"


def run_rank(num_rounds: int, steps_per_block: int) -> Times:
    """On each rank: sets a run up and measures its steps and its comparisons, in turns."""
    sys.stdout = io.StringIO()  # samestep's own lines, up to the end of the process
    run = samestep.Run(None, batch_size=96, micro_batch_size=24, device="cpu", compare_every=NEVER)
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    run.prepare(model=model, optimizer=optimizer)
    data, _ = load_data()

    def train() -> Iterator[None]:
        for epoch in run.epochs(data, 10**6):
            for step in epoch:
                for images, digits in step:
                    step.backward(F.cross_entropy(model(images), digits))
                run.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                yield

    def compare() -> Iterator[None]:
        assert run._prepared is not None
        for number in itertools.count():
            run._prepared.replicas.compare_if_due(NEVER * (number + 1), None)
            yield

    steps = train()
    next(steps)  # the optimizer has a state from here on
    contestants = [build_contestant(STEP, steps, deterministic=True), build_contestant(COMPARISON, compare())]
    return measure(contestants, num_rounds=num_rounds, steps_per_block=steps_per_block)


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each, after one to warm up")
    parser.add_argument("--steps", type=int, default=30, help="per block: two epochs")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps = 2, 3
    if not args.json:
        print_machine()
    steps_per_epoch = -(-len(load_data()[0]) // 96)
    results = {}
    for world_size in args.ranks:
        times = samestep.spawn(run_rank, nprocs=world_size, args=(args.rounds, args.steps), device="cpu")
        ratio = compute_ratio(times, COMPARISON, STEP)
        results[world_size] = {
            "step_us": statistics.median(times[STEP]) * 1e6,
            "comparison_us": statistics.median(times[COMPARISON]) * 1e6,
            f"every {EVERY} steps": ratio / EVERY,
            "and at each epoch's snapshot": ratio / EVERY + ratio / steps_per_epoch,
        }
        if not args.json:
            rows = [[name, f"{value:,.0f} us"] for name, value in list(results[world_size].items())[:2]]
            for name, value in list(results[world_size].items())[2:]:
                rows.append([name, f"{value:.3%} of a step (< {TARGET:.1%} {'met' if value < TARGET else 'MISSED'})"])
            print_table([f"{world_size} ranks", ""], rows)
    if args.json:
        print_json(results=results, target=TARGET)


if __name__ == "__main__":
    main()
