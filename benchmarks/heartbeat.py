"""What the heartbeat costs: a step of about 20 ms with and without it, in turns, and what its parts take."""

from __future__ import annotations  # cloudpickle does not see the names in a local class's annotations

import io
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from common import (
    build_contestant,
    build_parser,
    compute_ratio,
    judge,
    measure,
    print_json,
    print_machine,
    print_table,
)
from msgspec.structs import asdict
from paced_run import NUM_MICRO_BATCHES, STEP_S, build_paced_run

import samestep
from samestep.watch.beats import PhaseClock

TARGET = 0.005
ON, OFF = "with", "without"


def stay_silent(phase: str, step: int) -> None:
    """In place of `Watchdog.enter`: measures nothing."""


def run_rank(num_rounds: int, steps_per_block: int) -> dict[str, Any]:
    """On each rank: trains, and times blocks of steps with and without a heartbeat."""
    sys.stdout = io.StringIO()  # samestep's own lines, up to the end of the process
    run, steps = build_paced_run(None)
    pulse = run._services.watchdog

    def run_block(is_on: bool, block: Any) -> Any:
        def timed(num_steps: int) -> None:
            if is_on:
                vars(pulse).pop("enter", None)
                pulse.begin()
            else:
                pulse.enter = stay_silent  # type: ignore[method-assign]
            block(num_steps)
            if is_on:
                pulse.close()

        return timed

    block = build_contestant("", steps).run_steps
    contestants = [build_contestant(name, iter(())) for name in (ON, OFF)]
    contestants = [type(c)(c.name, run_block(c.name == ON, block), True) for c in contestants]
    times = measure(contestants, num_rounds=num_rounds, steps_per_block=steps_per_block)
    vars(pulse).pop("enter", None)
    return {"times": times, "parts": time_parts(run)}


def time_parts(run: samestep.Run) -> dict[str, float]:
    """Seconds of one call of `enter`, and seconds that the threads compute per second of the run."""
    pulse, num = PhaseClock(), 100_000
    began_s = time.perf_counter()
    for _ in range(num):
        pulse.enter("forward", 1)
    enter_s = (time.perf_counter() - began_s) / num
    watchdog = run._services.watchdog
    watchdog.begin()
    time.sleep(10)
    cpu_s = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith("samestep _"):
            fields = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()
            cpu_s += int(fields[0]) / 1e9
    assert watchdog._heartbeat is not None
    size = len(json.dumps(asdict(watchdog._heartbeat._builder.build())))
    watchdog.close()
    return {"enter_s": enter_s, "cpu_share": cpu_s / 10, "beat_bytes": size}


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each, after one to warm up")
    parser.add_argument("--steps", type=int, default=100, help="per block: about 2 s, so two beats")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps = 2, 5
    results = {ranks: samestep.spawn(run_rank, ranks, (args.rounds, args.steps)) for ranks in args.ranks}
    if args.json:
        print_json(results=results)
        return
    print_machine()
    rows = []
    for ranks, result in results.items():
        times, parts = result["times"], result["parts"]
        step_s = statistics.median(times[OFF])
        # Of a step of 20 ms: 4 calls per micro-batch and 10 per step, and what the threads take from it.
        share = (4 * NUM_MICRO_BATCHES + 10) * parts["enter_s"] / STEP_S + parts["cpu_share"]
        rows.append(
            [
                str(ranks),
                f"{1000 * step_s:.1f} ms",
                judge(compute_ratio(times, ON, OFF), 1 + TARGET),
                f"{1e6 * parts['enter_s']:.2f} us",
                f"{100 * parts['cpu_share']:.3f} %",
                f"{100 * share:.2f} % ({'met' if share <= TARGET else 'MISSED'})",
            ]
        )
    print_table(["ranks", "step", "with / without", "one call", "threads", "of 20 ms in all"], rows)


if __name__ == "__main__":
    main()
