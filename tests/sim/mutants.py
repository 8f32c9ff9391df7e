"""Plants the faults of planted.py, one at a time, and shows which the simulation finds: `make mutants`."""

import argparse
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from sim.instances import Pool
from sim.planted import PLANTED, SOURCE, Planted
from sim.scenarios import Scenario, plan
from sim.trials import Laboratory

Found = tuple[int, float, str]  # number of scenarios, seconds, and what has shown the fault, or ""
TESTS = Path(__file__).parents[1]
NUM_SHIFTED = 60


def main() -> int:
    """Return 1 if a planted fault was not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="words in the descriptions of the faults to plant")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of CPU time for each; default: 60")
    options = parser.parse_args()
    laboratory = Laboratory()
    num_missed = 0
    for planted in [each for each in PLANTED if options.only in each.what]:
        search = find_by_test if planted.test else partial(find, laboratory, limit_s=options.seconds)
        num_scenarios, took_s, how = search(planted)
        num_missed += not how
        how = how or "MISSED"
        print(f"{took_s:5.1f} s {num_scenarios:4d}  {planted.what}: {how[:150]}", flush=True)
    print(f"{num_missed} of {len(PLANTED)} were missed")
    return 1 if num_missed else 0


def find(laboratory: Laboratory, planted: Planted, limit_s: float) -> Found:
    """Run scenarios until one shows the fault."""
    gc.unfreeze()
    gc.collect()  # the copies of samestep with the fault before
    pool = Pool(planted)
    began_s = time.process_time()
    for seed in count():
        scenario = plan(seed, planted.focus if seed % 3 else "")
        if planted.script:
            scenario = replace(scenario, script=planted.script)
        if planted.scenario and seed < NUM_SHIFTED:
            scenario = Scenario.parse(shift(planted.scenario, (seed + 1) // 2 * (-1) ** seed))
        how = ""
        try:
            laboratory.check(scenario, pool)
        except Exception as problem:
            how = f"{type(problem).__name__}: {problem}".splitlines()[0]
        if how or time.process_time() - began_s > limit_s:
            return seed + 1, time.process_time() - began_s, how
    raise AssertionError


def shift(scenario: str, by: int) -> str:
    """Return the scenario with its faults `by` points later: a change of the source moves the right point a little."""
    return re.sub(r"(?<=@)\d+", lambda found: str(int(found[0]) + by), scenario)


def find_by_test(planted: Planted) -> Found:
    """Run a file of tests with a copy of the source that has the fault."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        path = shutil.copytree(SOURCE, Path(directory, "samestep")) / planted.file
        path.write_text(path.read_text().replace(planted.old, planted.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", planted.test]
        done = subprocess.run(command, cwd=TESTS, env={**os.environ, "PYTHONPATH": directory}, capture_output=True)
    return 1, time.monotonic() - began_s, f"tests/{planted.test}" if done.returncode == 1 else ""


if __name__ == "__main__":
    sys.exit(main())
