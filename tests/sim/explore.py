"""Runs simulated scenarios from random seeds, and prints one that fails: `make sim`."""

import argparse
import secrets
import sys
import time
import traceback

from sim.scenarios import PINNED, Scenario, plan
from sim.trials import Laboratory


def main() -> int:
    """Run scenarios until the time is over, or one fails. Returns 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="of the first scenario; the next ones count up; default: random")
    parser.add_argument("--minutes", type=float, help="start no new one after this; default: 1, or 0 with --scenario")
    parser.add_argument("--pinned", action="store_true", help="first run the pinned ones")
    parser.add_argument("--scenario", help="first run this one, as printed for a failure")
    parser.add_argument("--focus", default="", help="of the scenarios, such as heal or twins; default: any")
    parser.add_argument("--verbose", action="store_true", help="print each scenario, and what has happened in it")
    options = parser.parse_args()
    laboratory = Laboratory()
    minutes = (0 if options.scenario else 1) if options.minutes is None else options.minutes
    given = [*filter(None, [options.scenario]), *(PINNED.values() if options.pinned else ())]
    num_failed = sum(_run_one(laboratory, Scenario.parse(text), options) for text in given)
    if not minutes:
        return int(num_failed > 0)
    first = secrets.randbelow(10**6) if options.seed is None else options.seed
    print(f"seeds from {first}", flush=True)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    count = 0
    while not num_failed and time.monotonic() - began_s < 60 * minutes:
        num_failed += _run_one(laboratory, plan(first + count, options.focus), options)
        count += 1
    cpu_s = time.process_time() - began_cpu_s
    print(
        f"{count} scenarios, {num_failed} failed; {cpu_s:.1f} s of CPU: {60 * count / cpu_s:.0f} per minute of one core"
    )
    print(f"{laboratory.num_deaths} deaths in {laboratory.endings.total()} launches with --heal:")
    for how, number in laboratory.endings.most_common():
        print(f"  {number:5d}  {how}")
    return 1 if num_failed else 0


def _run_one(laboratory: Laboratory, scenario: Scenario, options: argparse.Namespace) -> int:
    """Run a scenario, and report a failure. Returns 1 if it failed."""
    if options.verbose:
        print(scenario, flush=True)
    try:
        laboratory.check(scenario)
        return 0
    except Exception as problem:
        print(f"FAILED {scenario}\n  {type(problem).__name__}: {str(problem)[:1500]}", flush=True)
        print(f"  again: make sim ARGS=\"--scenario '{scenario}'\"", flush=True)
        if options.verbose:
            traceback.print_exc()
        return 1
    finally:
        if options.verbose:
            print("\n".join(laboratory.history))


if __name__ == "__main__":
    sys.exit(main())
