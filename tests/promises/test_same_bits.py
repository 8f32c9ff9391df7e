"""Any number of ranks, the same bits: digests, losses, scores and random draws of a run do not tell how many it had."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
from promises import models
from support.runs import check, digest, read_rows, samestep_command
from support.trace import assert_same

import samestep

WORLD_SIZES = (2, 3, 4, 5, 12)


@functools.cache
def run_alone(name: str) -> Any:
    return samestep.spawn(getattr(models, name), 1)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", models.CASES)
def test_any_model(name: str, world_size: int) -> None:
    trace = samestep.spawn(models.CASES[name], world_size)
    assert_same(trace, run_alone(name), f"{world_size} ranks", "1 rank")
