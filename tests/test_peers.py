"""benchmarks/peers: the comparison with other trainers. `make peers` runs the other trainers."""

import json
import os
import sys
from pathlib import Path

import pytest
from support import commands

FOLDER = Path(__file__).parents[1] / "benchmarks" / "peers"


@pytest.mark.soak
def test_samestep_loses_no_sample_in_the_comparison() -> None:
    """With one kill; the other trainers are not installed here."""
    command = [sys.executable, FOLDER / "compare.py", "--quick", "--forked", "--json"]
    env = os.environ | {"PEERS_STEP_S": "0"}
    done = commands.run(command, env=env, check=True, capture_output=True, text=True)
    (row,) = json.loads(done.stdout)
    assert row["same bits on 1 process"]
    assert row["same bits after the kills"]
    assert (row["steps in the final weights"], row["samples skipped"], row["samples repeated"]) == (100, 0, 0)
    assert row["steps lost"] == 7  # the first snapshot comes later
