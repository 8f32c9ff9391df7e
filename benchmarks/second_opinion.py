"""What a checked step of `check_compute_every` costs: the `digits` recipe's training, with a check in every other step.

Each rank then computes one more micro-batch, and checksums of two gradients.
"""

from __future__ import annotations  # cloudpickle does not see the names in a local class's annotations

import io
import itertools
import statistics
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from common import Times, build_parser, compute_ratio, print_json, print_machine, print_table

import samestep
from samestep.recipes.digits import CNN, load_data

BATCH_SIZE = 96
EVERY = 100  # of the last row
WARM_UP = 20
CHECKED, STEP = "checked step", "step"


def run_rank(num_micro_batches: int, num_steps: int) -> Times:
    """On each rank: trains, and returns the seconds of the steps with a check, and of those before them."""
    sys.stdout = io.StringIO()  # samestep's own lines, up to the end of the process
    size = BATCH_SIZE // num_micro_batches
    run = samestep.Run(None, batch_size=BATCH_SIZE, micro_batch_size=size, device="cpu", check_compute_every=2)
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    run.prepare(model=model, optimizer=optimizer)
    data, _ = load_data()

    def train() -> Iterator[float]:
        began_s = time.perf_counter()
        for step in run.steps(data, WARM_UP + num_steps):
            for images, digits in step:
                step.backward(F.cross_entropy(model(images), digits))
            run.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            now_s = time.perf_counter()
            yield now_s - began_s
            began_s = now_s

    times = [*itertools.islice(train(), WARM_UP, None)]
    return {STEP: times[0::2], CHECKED: times[1::2]}


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4], help="per rank and step")
    parser.add_argument("--steps", type=int, default=600, help="measured steps, half of them with a check")
    args = parser.parse_args()
    if args.quick:
        args.steps = 4
    if not args.json:
        print_machine()
    results = {}
    for held in args.micro_batches:
        times = samestep.spawn(run_rank, nprocs=args.ranks, args=(held * args.ranks, args.steps), device="cpu")
        cost = compute_ratio(times, CHECKED, STEP) - 1
        results[held] = {
            "step_us": statistics.median(times[STEP]) * 1e6,
            "checked_step_us": statistics.median(times[CHECKED]) * 1e6,
            "cost": cost,
            "one_micro_batch": 1 / held,
            f"cost every {EVERY} steps": cost / EVERY,
        }
    if args.json:
        print_json(ranks=args.ranks, results=results)
        return
    rows = [
        [f"{held}", f"{found['step_us']:,.0f} us", f"{found['checked_step_us']:,.0f} us", f"{found['cost']:+.0%}",
         f"{found['one_micro_batch']:+.0%}", f"{found[f'cost every {EVERY} steps']:.2%}"]
        for held, found in results.items()
    ]  # fmt: skip
    head = ["micro-batches per rank", STEP, CHECKED, "cost", "one micro-batch more", f"a check every {EVERY} steps"]
    print_table([head[0] + f", {args.ranks} ranks", *head[1:]], rows)


if __name__ == "__main__":
    main()
