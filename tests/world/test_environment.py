"""The rank of this process, read from variables."""

import json
from dataclasses import asdict

import pytest

import samestep
from samestep.world.environment import (
    RESTART,
    Restart,
    read_environment,
    read_overrides,
)

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


OURS = TORCHRUN | {"SAMESTEP_LAUNCHER": "1"}
BY_HAND = {name: value for name, value in TORCHRUN.items() if "LOCAL" not in name}


@pytest.mark.parametrize(
    ("variables", "place", "launcher"),
    [
        ({}, (0, 0, 1, 1), "python"),
        (TORCHRUN, (3, 1, 4, 2), "torchrun"),
        (OURS, (3, 1, 4, 2), "samestep"),
        (BY_HAND, (3, 3, 4, 4), "torchrun"),  # one node, and the local rank is the rank
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 0, 1, 1), "torchrun"),
        ({"WORLD_SIZE": "1"}, (0, 0, 1, 1), "python"),
    ],
)
def test_the_place_of_this_process(variables: dict[str, str], place: tuple[int, ...], launcher: str) -> None:
    found = read_environment(variables)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == place
    assert (found.launcher, found.restart, found.overrides) == (launcher, None, {})


@pytest.mark.parametrize("restart", [Restart("rank 3 was killed by SIGKILL", 3), Restart('a node "b" was lost')])
def test_why_it_was_started_again(restart: Restart) -> None:
    assert read_environment({**TORCHRUN, RESTART: json.dumps(asdict(restart))}).restart == restart


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        ({**TORCHRUN, "RANK": "x"}, "RANK must be a whole number, not 'x'"),
        ({**TORCHRUN, "LOCAL_RANK": ""}, "LOCAL_RANK must be a whole number, not ''"),
        ({**TORCHRUN, "RANK": "4"}, "RANK is 4 and WORLD_SIZE 4: ranks are 0 to WORLD_SIZE - 1"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is -1"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "WORLD_SIZE is 4 and MASTER_PORT is not set"),
        ({**TORCHRUN, "SAMESTEP_KEEP_LAST": "all"}, "SAMESTEP_KEEP_LAST must be a whole number, not 'all'"),
    ],
)
def test_invalid_variables(variables: dict[str, str], said: str) -> None:
    with pytest.raises(samestep.InvalidValue, match=said):
        read_environment(variables)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("0", False), ("no", False), ("", False)])
def test_switches(text: str, value: bool) -> None:
    assert read_overrides({"SAMESTEP_FRESH": text})["fresh"] is value
