"""The environment of the tasks of a Slurm step. For tests with a real Slurm see promises/test_slurm.py."""

import socket
from pathlib import Path

import pytest

from samestep.errors import Error
from samestep.world import host, slurm_tasks
from samestep.world.environment import read_rank

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
}
ALONE = {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in TASK.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "is_task"),
    [
        (TASK, True),
        (ALONE, False),
        (without("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"), False),  # a batch script
        (without("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), False),  # the shell of salloc
        ({}, False),
    ],
)
def test_who_is_a_task(variables: dict[str, str], is_task: bool) -> None:
    assert slurm_tasks.is_task(variables) is is_task


def test_rank_for_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    assert read_rank() == 2
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("text", "sizes"), [("4", [4]), ("2,1", [2, 1]), ("2(x3),1", [2, 2, 2, 1]), ("1(x2),3(x2)", [1, 1, 3, 3])]
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert slurm_tasks.expand_sizes(text) == sizes


def test_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The list of nodes is parsed by Slurm, and only Slurm may know the names."""
    tool = tmp_path / "scontrol"
    tool.write_text(
        '#!/bin/sh\ncase "$2 $3" in\n"hostnames n[1-2]") printf "no-1.invalid\\nno-2.invalid\\n";;\n'
        '"node no-1.invalid") echo "NodeName=no-1 NodeAddr=127.0.0.1 State=IDLE";;\n'
        '"node no-2.invalid") echo "   NodeAddr=127.0.0.2 NodeHostName=x";;\nesac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    loopback = host.find_interface(["127.0.0.1"])
    assert loopback in dict(enumerate(name for _, name in socket.if_nameindex())).values()
    assert slurm_tasks.build_variables(TASK) == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(15000 + (4711 * 64 + 2) % 17000),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }


def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address of rank 0 in the environment is used without asking Slurm."""
    monkeypatch.setenv("PATH", "/nonexistent")
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth7"}
    built = slurm_tasks.build_variables(TASK | given)
    assert (built["MASTER_ADDR"], built["MASTER_PORT"]) == ("127.0.0.1", "29500")
    assert "GLOO_SOCKET_IFNAME" not in built


def test_one_node_does_not_call_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    built = slurm_tasks.build_variables(TASK | {"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0"})
    assert (built["MASTER_ADDR"], built["LOCAL_WORLD_SIZE"]) == ("127.0.0.1", "3")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (without("SLURM_LOCALID"), "SLURM_LOCALID is ''"),
        (TASK | {"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
        (TASK | {"SLURM_NODEID": "2"}, "SLURM_NODEID is 2 and SLURM_STEP_TASKS_PER_NODE 2 nodes"),
        (without("SLURM_STEP_TASKS_PER_NODE"), "SLURM_STEP_TASKS_PER_NODE is '', not such as"),
        (TASK, r"scontrol show hostnames n\[1-2\] does not give the address of rank 0 \(No such .*set MASTER_ADDR"),
    ],
)
def test_invalid_steps(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(Error, match=said):
        slurm_tasks.build_variables(variables)
