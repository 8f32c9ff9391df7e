"""What a row of metrics costs the training loop: `log` of each installed tracker itself, and through its thread.

A tracker that writes locally or to a server blocks until the row is written. `Trackers` hands the row to a thread, so
that the loop continues: the second column is what remains. W&B and MLflow run offline.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from samestep.config import find_trackers
from samestep.watch.trackers import Tracker, TrackerInfo, Trackers

NAMES = ("tensorboard", "wandb", "mlflow")


def time_rows(log: Callable[[Mapping[str, Any], int], None], num_rows: int) -> float:
    """The median time of a row of eight numbers, in microseconds."""
    times = []
    for step in range(num_rows):
        values = {f"train/value{k}": step / (k + 1) for k in range(8)}
        began_s = time.perf_counter()
        log(values, step)
        times.append(time.perf_counter() - began_s)
    return 1e6 * statistics.median(times)


def measure(tracker: Tracker, directory: Path, num_rows: int) -> dict[str, float]:
    directory.mkdir()
    info = TrackerInfo("benchmark", directory, {}, 0)
    tracker.start(info)
    alone = time_rows(tracker.log, num_rows)
    tracker.finish("done")
    trackers = Trackers([tracker], print)
    trackers.start(info)
    through_thread = time_rows(trackers.log, num_rows)
    trackers.finish("done")
    return {"log_us": alone, "through_thread_us": through_thread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="few rows, to test the script")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {
            "WANDB_MODE": "offline", "WANDB_SILENT": "true",
            "MLFLOW_TRACKING_URI": f"sqlite:///{directory}/mlflow.db",
        }  # fmt: skip
        for name in NAMES:
            if find_spec(name) is not None:
                tracker = find_trackers()[name].load()()
                found[name] = measure(tracker, Path(directory) / name, 5 if args.quick else 200)
    if args.json:
        print(json.dumps(found))
        return
    print(f"{'tracker':<12}{'log':>14}{'with a thread':>16}")
    for name, row in found.items():
        print(f"{name:<12}{row['log_us']:>11.0f} us{row['through_thread_us']:>13.0f} us")


if __name__ == "__main__":
    main()
