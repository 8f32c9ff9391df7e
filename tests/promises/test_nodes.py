"""A run on several nodes: the same bits after faults on any of them, and the errors in the options of nodes.

Nodes are launchers on this machine, or, for tests of the network, in network namespaces.
"""

import json
import re
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest
from promises.trial import HELD, Started, Trial, Undisturbed, read_restarts
from support.hosts import Host
from support.ports import reserve_port

from samestep.errors import Error
from samestep.launch.launcher import Launch, build_variables, open_store, parse_endpoint, parse_nodes
from samestep.launch.link import Nodes, Start
from samestep.launch.target import Target
from samestep.world.environment import read_secret
from samestep.world.host import find_own_address


@pytest.fixture
def port() -> Iterator[int]:
    with reserve_port() as free:
        yield free


def start_nodes(
    trial: Trial, endpoint: str, num_ranks: int, fault: str | Sequence[str], *flags: str,
    hosts: Sequence[Host | None] = (None, None), **arguments: Any,
) -> list[Started]:  # fmt: skip
    """Starts a launcher on each host, with so many ranks. They meet at an endpoint."""
    nodes = ["--nnodes", str(len(hosts)), "--rdzv-endpoint", endpoint, "--rdzv-timeout", "120", *flags, "--node-rank"]
    return [
        trial.start("launch", num_ranks, fault, *nodes, str(rank), host=host, **arguments)
        for rank, host in enumerate(hosts)
    ]


def finish(nodes: Sequence[Started], *codes: int) -> None:
    """Waits until all nodes have ended, with these exit codes."""
    assert [node.finish() for node in nodes] == [*codes], "\n".join(node.output for node in nodes)


# --- hosts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "shard"), [(4, "none"), (6, "none"), (4, "fsdp2")])
def test_two_hosts(trial: Trial, undisturbed: Undisturbed, all_hosts: list[Host], version: int, shard: str) -> None:
    first = all_hosts[0]
    endpoint = f"{first.address}:29400" if version == 4 else f"[{first.address6}]:29400"
    nodes = start_nodes(trial, endpoint, 2, (), "--shard", shard, hosts=all_hosts[:2])
    finish(nodes, 0, 0)
    said = [node.err.read_text().count("samestep: ranks 0-1 on node 0 (h1), 2-3 on node 1 (h2)\n") for node in nodes]
    assert said == [1, 0]
    assert "on 4 ranks" in nodes[0].out.read_text()
    assert nodes[1].out.read_text() == "", "rank 0 is on the other host"
    assert trial.outcome() == undisturbed()


def test_the_plug_is_pulled(trial: Trial, undisturbed: Undisturbed, all_hosts: list[Host]) -> None:
    """No connection closes. The others wait in gloo, and continue within seconds."""
    nodes = start_nodes(trial, f"{all_hosts[0].address}:29400", 1, HELD, "--heal", hosts=all_hosts, settled=True)
    trial.wait_held()
    all_hosts[-1].pull_the_plug()
    trial.go_on()
    finish(nodes, 0, 0, 1)
    assert trial.outcome() == undisturbed()
    assert not read_restarts(trial.dir), "no rank has started again"
    assert json.loads((trial.dir / "heals.jsonl").read_text())["lost"] == [2]


# --- ends -------------------------------------------------------------------------------------------------------------


def test_the_rendezvous_ends(trial: Trial, undisturbed: Undisturbed, port: int) -> None:
    endpoint = f"127.0.0.1:{port}"
    host, other = start_nodes(trial, endpoint, 1, HELD)
    trial.wait_held()
    host.kill()
    finish([host, other], -signal.SIGKILL, 1)
    assert other.err.read_text().splitlines()[-1] == (
        f"samestep: error: the launcher at {endpoint}, the rendezvous of the nodes, has ended: the same commands "
        "resume from the newest snapshot"
    )
    finish(start_nodes(trial, endpoint, 1, HELD), 0, 0)
    assert trial.outcome() == undisturbed()


# --- under an engine --------------------------------------------------------------------------------------------------


def test_agents_under_torchrun(trial: Trial, undisturbed: Undisturbed, port: int) -> None:
    """torchrun starts one agent per machine. A rank that dies costs no step."""
    fault = "kill rank 3 at step 7 in forward"
    engine = ["--nnodes", "2", "--master-port", str(port), "--node-rank"]
    nodes = [trial.start("agent", 2, fault, "--heal", engine=[*engine, rank]) for rank in ("0", "1")]
    finish(nodes, 0, 0)
    trial.assert_struck(fault)
    assert "rank 3 was killed by SIGKILL (out of memory?), on node 1" in nodes[0].output
    assert not read_restarts(trial.dir)
    assert trial.outcome() == undisturbed()


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "host", "port"), [
    ("a:1", "a", 1),
    ("[fd77::1]:29400", "fd77::1", 29400),
    ("[::1]", "::1", 29400),
])  # fmt: skip
def test_endpoints(text: str, host: str, port: int) -> None:
    assert parse_endpoint(text) == (host, port)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.1.1", "127.0.1.1"),
        ("::1", "::1"),
        ("localhost", "127.0.0.1"),
        ("this-machine", ""),  # other machines use another address for it
        ("192.0.2.1", ""),  # that of a proxy
    ],
)
def test_where_the_nodes_meet(monkeypatch: pytest.MonkeyPatch, host: str, address: str) -> None:
    """A launcher listens only at the endpoint's address. (Debian resolves the machine's own name to 127.0.1.1.)"""
    find, names = socket.getaddrinfo, {"this-machine": "127.0.1.1"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: find(names.get(host, host), *rest, **more))
    assert find_own_address(host) == address
    if address:
        store = open_store(address)
        assert {each.laddr.ip for each in psutil.net_connections("inet") if each.laddr.port == store.port} == {address}


@pytest.mark.parametrize(("nnodes", "node_rank", "endpoint", "said"), [
    (2, 2, "localhost:1", "--node-rank is 2, but the 2 nodes are 0 to 1"),
    (2, None, "localhost:1", "and --node-rank R, which is 0 on HOST"),
    *[(2, 0, text, "--rdzv-endpoint takes HOST:PORT") for text in ("", ":1", "a:b", "a:65536", "fd77::1:29400")],
    (2, 0, "no-such-host.invalid:1", "no address of no-such-host.invalid is known here"),
    (2, 0, "192.0.2.1:1", "other programs can reach 192.0.2.1:1, and there is no secret"),
])  # fmt: skip
def test_options_that_make_no_sense(nnodes: int, node_rank: int | None, endpoint: str, said: str) -> None:
    with pytest.raises(Error, match=said):
        parse_nodes(nnodes, node_rank, endpoint, 300)


@pytest.mark.parametrize("own", [None, "ib0"])
def test_the_interface_is_set_unless_it_is(monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
        if own:
            monkeypatch.setenv(name, own)
    [variables] = build_variables(
        Launch(Target("script", ""), 1, {}, [], Nodes(2)), Start(0, None, 0, 0, 2), None, "eth7"
    )
    assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == (own or "eth7")


def test_a_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_RDZV_SECRET", " a secret of this run's nodes\n")
    assert read_secret() == "a secret of this run's nodes"
    assert read_secret() == "", "it is taken once"
    monkeypatch.setenv("SAMESTEP_RDZV_SECRET", "abc")
    with pytest.raises(Error, match="SAMESTEP_RDZV_SECRET has 3 characters"):
        read_secret()


def test_a_rank_dies_on_one_node(trial: Trial, undisturbed: Undisturbed, port: int) -> None:
    """All nodes start again and print why."""
    fault = "kill rank 1 at step 7 in forward"
    nodes = start_nodes(trial, f"127.0.0.1:{port}", 1, fault, "--max-restarts", "1")
    finish(nodes, 0, 0)
    trial.assert_struck(fault)
    for node, where in zip(nodes, (r", on node 1 \(.*\)", ""), strict=True):
        said = rf"samestep: rank 1 was killed by SIGKILL \(out of memory\?\){where}; restart 1 of 1\n"
        assert re.search(said, node.err.read_text())
        assert "Traceback" not in node.output
    assert [(row["rank"], row["world_size"]) for row in read_restarts(trial.dir)] == [(1, 2)]
    assert trial.outcome() == undisturbed()
