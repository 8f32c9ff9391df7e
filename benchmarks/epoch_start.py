"""What an epoch's shuffle costs: before its first sample, per sample after it, and in memory.

Compares samestep's order with torch's DistributedSampler in one run. Memory is how far the process's resident
set rises above what it was before, as Python does not see what torch allocates.
"""

import argparse
import gc
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped,unused-ignore]
from torch.utils.data import DistributedSampler

from samestep.plan.order import build_order


@dataclass(frozen=True)
class Case:
    """`start(epoch)` yields the epoch's samples, `num_taken` at a time."""

    name: str
    length: int
    num_taken: int
    start: Callable[[int], Iterator[object]]


def build_order_case(name: str, length: int, num_taken: int, first: int = 0) -> Case:
    """samestep's order, entered at position `first`."""

    def start(epoch: int) -> Iterator[object]:
        order = build_order(length, seed=0, epoch=epoch)
        return (order[p : p + num_taken] for p in range(first, length - num_taken + 1, num_taken))

    return Case(f"{name}, takes of {num_taken}", length, num_taken, start)


def build_sampler_case(length: int) -> Case:
    """torch's sampler, of rank 0 of 1."""
    sampler: DistributedSampler[int] = DistributedSampler(range(length), num_replicas=1, rank=0)  # type: ignore[arg-type]

    def start(epoch: int) -> Iterator[object]:
        sampler.set_epoch(epoch)
        return iter(sampler)

    return Case("torch DistributedSampler", length, 1, start)


def measure_memory(case: Case, num_samples: int) -> int:
    """The peak of the resident set above its start, in bytes, looked at every millisecond."""
    gc.collect()
    process = psutil.Process()
    before = peak = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    taken = case.start(0)
    for _ in itertools.islice(taken, num_samples // case.num_taken):
        pass
    peak = max(peak, process.memory_info().rss)  # while `taken` still holds what it holds
    done.set()
    thread.join()
    return int(peak - before)


def measure_time(case: Case, num_samples: int, repeats: int) -> tuple[float, float]:
    """Medians over epochs of the seconds to the first sample, and per further sample."""
    firsts, furthers = [], []
    num_takes = num_samples // case.num_taken
    for epoch in range(repeats):
        began = time.perf_counter()
        taken = case.start(epoch)
        next(taken)
        first = time.perf_counter()
        for _ in itertools.islice(taken, num_takes):
            pass
        furthers.append((time.perf_counter() - first) / (num_takes * case.num_taken))
        firsts.append(first - began)
        del taken
    return statistics.median(firsts), statistics.median(furthers)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--length", type=int, default=10**9, help="samples of the large order")
    parser.add_argument("--sampler-length", type=int, default=10**7, help="samples where torch's sampler is compared")
    parser.add_argument("--num-samples", type=int, default=200_000, help="further samples timed in each epoch")
    parser.add_argument("--take", type=int, default=32, help="samples per take: a micro-batch")
    parser.add_argument("--repeats", type=int, default=5, help="epochs, of which medians are shown")
    args = parser.parse_args()

    cases = [
        build_order_case("order", args.length, args.take),
        build_order_case("order", args.length, 1),
        build_order_case("order, from half-way", args.length, args.take, args.length // 2),
        build_order_case("order", args.sampler_length, args.take),
        build_sampler_case(args.sampler_length),
    ]
    num_samples = min(args.num_samples, args.length // 2 - args.take, args.sampler_length - args.take)
    if min(args.take, args.repeats, num_samples // max(args.take, 1)) < 1:
        parser.error("all numbers must be above 0, with lengths of at least 4 takes")
    print(f"{'':35}{'samples':>14}{'first, ms':>12}{'further, us':>13}{'memory, MB':>12}")
    for case in cases:
        # Memory first: the timing would leave freed memory behind that the process reuses unseen.
        peak_bytes = measure_memory(case, num_samples)
        first_s, further_s = measure_time(case, num_samples, args.repeats)
        figures = f"{first_s * 1e3:>12.3f}{further_s * 1e6:>13.3f}{peak_bytes / 1e6:>12.1f}"
        print(f"{case.name:35}{case.length:>14,}{figures}")


if __name__ == "__main__":
    main()
