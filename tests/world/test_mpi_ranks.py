"""The variables of mpirun, translated into those of torchrun."""

import os

import pytest

import samestep
from samestep.world.environment import read_environment, read_rank
from samestep.world.mpi_ranks import KNOWN, build_variables, find_names

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "229965825",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Removes the changes that reading makes, too."""
    monkeypatch.setattr(os, "environ", {})
    return monkeypatch


def test_the_place_of_a_rank() -> None:
    names = find_names(OPEN_MPI)
    assert names is not None
    found = build_variables(OPEN_MPI | ADDRESS, names)
    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert found == place | ADDRESS | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert build_variables(OPEN_MPI | ADDRESS | found, names) == place | ADDRESS


def test_ranks_of_one_launch_choose_one_port() -> None:
    one_host = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    first, second, other = (
        build_variables(one_host | {"OMPI_COMM_WORLD_RANK": rank, "PMIX_NAMESPACE": job}, KNOWN[0])["MASTER_PORT"]
        for rank, job in (("0", "1"), ("1", "1"), ("1", "2"))
    )
    assert first == second != other
    assert 15000 <= int(first) < 32000


@pytest.mark.parametrize("given", [OPEN_MPI | SLURM, MPICH | SLURM])
def test_mpirun_in_a_job_of_slurm(variables: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    """There, mpirun starts its processes with srun, so a rank has the variables of both."""
    os.environ.update(given | ADDRESS)
    assert read_rank() == int(given.get("PMI_RANK", "3"))
    environment = read_environment()
    assert environment.rank == int(given.get("PMI_RANK", "3"))
    assert environment.launcher == "torchrun"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE is 4, on several machines, and MASTER_ADDR and MASTER_PORT are not both set"),
        (OPEN_MPI | {"MASTER_ADDR": "a"}, "set them to the host of rank 0 and a free port there"),
    ],
)
def test_what_is_refused(variables: pytest.MonkeyPatch, given: dict[str, str], sentence: str) -> None:
    os.environ.update(given)
    with pytest.raises(samestep.InvalidValue, match=sentence):
        read_environment()


@pytest.mark.parametrize(
    "given",
    [
        {name: "0" if "RANK" in name else "1" for name in OPEN_MPI},
        {name: value for name, value in OPEN_MPI.items() if name != "OMPI_COMM_WORLD_SIZE"},
        {"PMI_RANK": "0"},
    ],
)
def test_a_single_process_is_no_rank(variables: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    os.environ.update(given)
    environment = read_environment()
    assert (environment.world_size, environment.launcher) == (1, "python")
    assert "RANK" not in os.environ
