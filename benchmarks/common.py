"""What the benchmarks share: contestants timed in turns within the same processes, medians, tables."""

import argparse
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from samestep.recipes.gpt import GPT2

# Dense operations per second with 16 bits, by the maker.
PEAK_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}

Times = dict[str, list[float]]  # contestant -> seconds per step (or per call), one value per round


def count_flops_per_token(model: GPT2, context: int) -> int:
    """Floating-point operations of a forward and backward pass per token of sequences of `context`.

    6 N + 12 L H Q T: PaLM (Chowdhery et al. 2022), appendix B. N counts all parameters except the position embedding,
    which is only added; L H Q is `num_layers * width`. What activation checkpointing repeats does not count.
    """
    num_params = sum(param.numel() for param in model.parameters()) - model.wpe.weight.numel()
    return 6 * num_params + 12 * model.config.num_layers * model.config.width * context


@dataclass(frozen=True)
class Contestant:
    """`run_steps(n)` does n steps of what is to be timed. `deterministic`: under torch's deterministic algorithms."""

    name: str
    run_steps: Callable[[int], None]
    deterministic: bool = False


def build_contestant(name: str, steps: Iterator[object], *, deterministic: bool = False) -> Contestant:
    """A loop written as a generator that yields after each step."""

    def run_steps(num_steps: int) -> None:
        deque(itertools.islice(steps, num_steps), maxlen=0)

    return Contestant(name, run_steps, deterministic)


def measure(
    contestants: Sequence[Contestant], *, num_rounds: int, steps_per_block: int,
    read_clock: Callable[[], float] = time.perf_counter,
) -> Times:  # fmt: skip
    """Seconds per step of each contestant, in blocks of steps: A B C, then C B A, and so on.

    The first round warms up and is dropped. All ranks call it; each block starts when all ranks are there.
    """
    times: Times = {contestant.name: [] for contestant in contestants}
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    for number in range(num_rounds + 1):
        if number == 1:
            gc.collect()
            gc.freeze()  # or a collection that falls into one's block would sweep what others have imported
        for contestant in contestants if number % 2 else contestants[::-1]:
            torch.use_deterministic_algorithms(contestant.deterministic)
            gc.collect()
            if dist.is_initialized():
                dist.barrier()
            began = read_clock()
            contestant.run_steps(steps_per_block)
            seconds = read_clock() - began
            if number:
                times[contestant.name].append(seconds / steps_per_block)
    gc.unfreeze()
    torch.use_deterministic_algorithms(was_deterministic)
    return times


def compute_ratio(times: Times, name: str, other: str) -> float:
    """The median over the rounds of one contestant's time by another's in the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))


def judge(ratio: float, target: float | None) -> str:
    """Such as "0.95 (<= 1.0 met)"."""
    if target is None:
        return f"{ratio:.3f}"
    return f"{ratio:.3f} (<= {target:g} {'met' if ratio <= target else 'MISSED'})"


def look_up_peak(name: str) -> float | None:
    """Return the peak of the first key in the name of a GPU; None if there is none, or for a part of a GPU."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name and "MIG" not in name), None)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints columns: the first to the left, all others to the right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells]).rstrip())
    print(flush=True)


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all of them have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs: figures mean nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def describe_machine() -> dict[str, Any]:
    """What figures depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def print_machine() -> None:
    """Says on what it runs, and whether others use it at the same time."""
    facts = describe_machine()
    print(f"torch {facts['torch']}, Python {facts['python']}, {facts['cores']} cores, {facts['machine']}")
    if facts["load_average"] > 0.5:
        print(f"the load average is {facts['load_average']}: others use this machine, and the figures are noisy")
    print(flush=True)


def print_json(**results: Any) -> None:
    """Prints the machine and the results as one object."""
    json.dump({"machine": describe_machine(), **results}, sys.stdout, indent=1)
    print()
