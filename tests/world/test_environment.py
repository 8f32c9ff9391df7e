"""The rank of this process, read from the variables of torchrun, mpirun and srun. For a real Slurm see
promises/test_slurm.py.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict

import pytest

import samestep
from samestep.world.environment import (
    OPEN_MPI,
    RESTART,
    Restart,
    expand_sizes,
    find_first_host,
    find_names,
    read_environment,
    read_overrides,
    read_rank,
    translate_variables,
)

TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "229965825",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
}  # fmt: skip
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
INTERFACE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the changes that reading makes, too."""
    monkeypatch.setattr(os, "environ", {})


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in SLURM.items() if name not in names}


@pytest.mark.parametrize(
    ("given", "rank", "launcher"),
    [
        ({}, (0, 1, 0, 1), "python"),
        (TORCHRUN, (3, 4, 1, 2), "torchrun"),
        (TORCHRUN | {"SAMESTEP_LAUNCHER": "1"}, (3, 4, 1, 2), "samestep"),
        # Started by hand on one node, where the local rank is the rank.
        ({name: value for name, value in TORCHRUN.items() if "LOCAL" not in name}, (3, 4, 3, 4), "torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1), "torchrun"),
        ({"WORLD_SIZE": "1"}, (0, 1, 0, 1), "python"),
        (MPI | ADDRESS, (3, 4, 1, 2), "torchrun"),
        (MPICH, (1, 2, 1, 2), "torchrun"),
        (MPI | SLURM | ADDRESS, (3, 4, 1, 2), "torchrun"),  # mpirun starts its processes by srun there
        (SLURM | ADDRESS, (2, 3, 0, 1), "srun"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0"}, (2, 3, 0, 3), "srun"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, (0, 1, 0, 1), "python"),
        (without("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"), (0, 1, 0, 1), "python"),  # a batch script
        ({name: "0" if "RANK" in name else "1" for name in MPI}, (0, 1, 0, 1), "python"),
        ({"PMI_RANK": "0"}, (0, 1, 0, 1), "python"),
    ],
)
def test_the_place_of_a_rank(given: Mapping[str, str], rank: tuple[int, ...], launcher: str) -> None:
    os.environ.update(given)
    assert read_rank() == rank[0]
    found = read_environment()
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == rank
    assert (found.launcher, found.restart, found.overrides) == (launcher, None, {})
    assert ("RANK" in os.environ) == (rank[1] > 1 or "RANK" in given)


@pytest.mark.parametrize("restart", [Restart("rank 3 was killed by SIGKILL", 3), Restart('a node "b" was lost')])
def test_why_it_was_started_again(restart: Restart) -> None:
    os.environ.update({**TORCHRUN, RESTART: json.dumps(asdict(restart))})
    assert read_environment().restart == restart


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("0", False), ("no", False), ("", False)])
def test_switches(text: str, value: bool) -> None:
    os.environ["SAMESTEP_FRESH"] = text
    assert read_overrides()["fresh"] is value


def test_ranks_of_one_launch_choose_one_port() -> None:
    one_host = MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    first, second, other = (
        translate_variables(one_host | {"OMPI_COMM_WORLD_RANK": rank, "PMIX_NAMESPACE": job}, OPEN_MPI)
        for rank, job in (("0", "1"), ("1", "1"), ("1", "2"))
    )
    assert first["MASTER_PORT"] == second["MASTER_PORT"] != other["MASTER_PORT"]
    assert 15000 <= int(first["MASTER_PORT"]) < 32000
    assert INTERFACE.items() <= first.items()


def test_what_is_set_stays() -> None:
    given = ADDRESS | {"GLOO_SOCKET_IFNAME": "eth7"}
    assert translate_variables(MPI | given, OPEN_MPI).items() >= (INTERFACE | given).items()


@pytest.mark.parametrize(
    ("text", "sizes"), [("4", [4]), ("2,1", [2, 1]), ("2(x3),1", [2, 2, 2, 1]), ("1(x2),3(x2)", [1, 1, 3, 3])]
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert expand_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[1-3,7]", "n1"), ("n[01,03],m", "n01"), ("n[1-2]-ib", "n1-ib")],
)
def test_the_host_of_rank_0(text: str, host: str) -> None:
    assert find_first_host(text) == host
    names = find_names(SLURM)
    assert names is not None
    assert translate_variables(SLURM | {"SLURM_STEP_NODELIST": text}, names)["MASTER_ADDR"] == host


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        (TORCHRUN | {"RANK": "x"}, "RANK must be a whole number, not 'x'"),
        (TORCHRUN | {"LOCAL_RANK": ""}, "LOCAL_RANK must be a whole number, not ''"),
        (TORCHRUN | {"RANK": "4"}, "RANK is 4 and WORLD_SIZE 4: ranks are 0 to WORLD_SIZE - 1"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is -1"),
        (TORCHRUN | {"MASTER_PORT": ""}, "WORLD_SIZE is 4 and MASTER_PORT is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2 and MASTER_ADDR is not set"),
        ({"SAMESTEP_BATCHSIZE": "4"}, "no variable SAMESTEP_BATCHSIZE; did you mean SAMESTEP_BATCH_SIZE"),
        ({"SAMESTEP_FRESH": "nein"}, "SAMESTEP_FRESH must be 1 or 0, not 'nein'"),
        (TORCHRUN | {"SAMESTEP_KEEP_LAST": "all"}, "SAMESTEP_KEEP_LAST must be a whole number, not 'all'"),
        (MPI, "OMPI_COMM_WORLD_SIZE is 4, on several machines, and MASTER_ADDR and MASTER_PORT are not both set"),
        (MPI | {"MASTER_ADDR": "a"}, "set them to the host of rank 0 and a free port there"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "x"}, "'x' is no number of ranks per machine"),
        (SLURM | {"SLURM_PROCID": "x"}, "RANK must be a whole number, not 'x'"),
    ],
)
def test_what_is_refused(given: Mapping[str, str], sentence: str) -> None:
    os.environ.update(given)
    with pytest.raises(samestep.InvalidValue, match=sentence):
        read_environment()
