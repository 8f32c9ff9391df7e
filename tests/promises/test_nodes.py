"""A run on several nodes: the same bits after faults on any of them, and the errors in the options of nodes.

Nodes are launchers on this machine, or, for tests of the network, in network namespaces.
"""

import json
import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence

import psutil
import pytest
from promises.test_restarts import flags_of, read_restarts
from promises.trial import Outcome, Started, Trial
from support.hosts import Host
from support.ports import reserve_port
from support.selection import one_in
from support.waiting import wait_until

from samestep.errors import Error
from samestep.launch.local_ranks import build_variables, open_store
from samestep.launch.node_messages import Start
from samestep.launch.nodes import find_own_address, parse_endpoint, parse_nodes

Undisturbed = Callable[..., Outcome]
HELD = "hold rank 0 at step 7 in forward"


@pytest.fixture
def port() -> Iterator[int]:
    with reserve_port() as free:
        yield free


def flags_at(endpoint: str, nnodes: str = "2", *more: str) -> list[str]:
    return ["--nnodes", nnodes, "--rdzv-endpoint", endpoint, "--rdzv-timeout", "120", *more]


def finish(*nodes: Started) -> list[int]:
    return [node.wait() for node in nodes]


# --- hosts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "shard"), [(4, "none"), (6, "none"), (4, "fsdp2")])
def test_two_hosts(trial: Trial, undisturbed: Undisturbed, all_hosts: list[Host], version: int, shard: str) -> None:
    first = all_hosts[0]
    endpoint = f"{first.address}:29400" if version == 4 else f"[{first.address6}]:29400"
    nodes = [
        trial.start("launch", 2, "", *flags_at(endpoint, "2", "--node-rank", str(rank), "--shard", shard), host=host)
        for rank, host in enumerate(all_hosts[:2])
    ]
    assert finish(*nodes) == [0, 0], "\n".join(node.output for node in nodes)
    said = [node.err.read_text().count("samestep: ranks 0-1 on node 0 (h1), 2-3 on node 1 (h2)\n") for node in nodes]
    assert said == [1, 0]
    assert "on 4 ranks" in nodes[0].out.read_text()
    assert nodes[1].out.read_text() == "", "rank 0 is on the other host"
    assert trial.outcome() == undisturbed()


def start_healing(trial: Trial, hosts: Sequence[Host], num_ranks: int, faults: Sequence[str]) -> list[Started]:
    """Start a launcher on each host."""
    at = flags_at(f"{hosts[0].address}:29400", str(len(hosts)), "--heal")
    words = [*flags_of(*faults), "--settled"]
    return [
        trial.start("launch", num_ranks, "", *at, "--node-rank", str(rank), arguments=words, host=host)
        for rank, host in enumerate(hosts)
    ]


def read_lost(trial: Trial) -> list[int]:
    assert not (trial.dir / "restarts.jsonl").exists(), "no rank has started again"
    heals = [json.loads(line) for line in (trial.dir / "heals.jsonl").read_text().splitlines()]
    return [rank for heal in heals for rank in heal["lost"]]


def test_ranks_of_two_hosts_die(trial: Trial, undisturbed: Undisturbed, all_hosts: list[Host]) -> None:
    """One on each host, rank 0 among them."""
    faults = ["kill rank 3 at step 3 in backward", "kill rank 0 at step 8 in forward"]
    nodes = start_healing(trial, all_hosts[:2], 2, faults)
    assert finish(*nodes) == [0, 0], "\n".join(node.output for node in nodes)
    assert trial.outcome() == undisturbed()
    assert read_lost(trial) == [3, 0]
    assert "rank 3 was killed by SIGKILL (out of memory?), on node 1 (h2)\n" in nodes[0].output
    assert "rank 0 was killed by SIGKILL (out of memory?), on node 0 (h1)\n" in nodes[0].output
    lines = re.findall(r"step (\d+)/15", nodes[0].output)
    assert lines[-1] == "15"


def test_the_plug_is_pulled(trial: Trial, undisturbed: Undisturbed, all_hosts: list[Host]) -> None:
    """No connection closes. The others wait in gloo, and continue within seconds."""
    *stay_on, cut_off = all_hosts
    *stays, goes = start_healing(trial, [*stay_on, cut_off], 1, [HELD])
    trial.wait_held()
    cut_off.pull_the_plug()
    trial.go_on()
    assert finish(*stays, goes) == [*[0 for _ in stays], 1], "\n".join(node.output for node in (*stays, goes))
    assert trial.outcome() == undisturbed()
    assert read_lost(trial) == [len(stays)]


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_rank_dies_on_one_node(trial: Trial, undisturbed: Undisturbed, port: int) -> None:
    """All nodes start again and print why."""
    fault = "kill rank 1 at step 7 in forward"
    flags = flags_at(f"127.0.0.1:{port}", "2", "--max-restarts", "1")
    nodes = [trial.start("launch", 1, fault, *flags, "--node-rank", str(rank)) for rank in (0, 1)]
    assert finish(*nodes) == [0, 0], "\n".join(node.output for node in nodes)
    trial.assert_struck(fault)
    for node, where in zip(nodes, (r", on node 1 \(.*\)", ""), strict=True):
        said = rf"samestep: rank 1 was killed by SIGKILL \(out of memory\?\){where}; restart 1 of 1\n"
        assert re.search(said, node.err.read_text())
        assert "Traceback" not in node.output
    assert [(row["rank"], row["world_size"]) for row in read_restarts(trial)] == [(1, 2)]
    assert trial.outcome() == undisturbed()


@pytest.mark.parametrize("signum", one_in(4, [signal.SIGTERM, signal.SIGUSR1]))
def test_a_signal_to_one_launcher(trial: Trial, undisturbed: Undisturbed, port: int, signum: signal.Signals) -> None:
    """All ranks of all nodes end the same step and save once, and every launcher asks to be started again."""
    nodes = [
        trial.start(
            "launch", 1, "hold rank 1 at step 7 in forward", *flags_at(f"127.0.0.1:{port}"), "--node-rank", rank
        )
        for rank in ("0", "1")
    ]
    trial.wait_held(1)
    nodes[1].process.send_signal(signum)
    wait_until(lambda: (trial.faults / "heard-1").exists(), "rank 1 hears of it")
    trial.go_on()
    assert finish(*nodes) == [75, 75], "\n".join(node.output for node in nodes)
    assert "stopped by a signal after step 8, saved" in nodes[0].output
    assert json.loads((trial.dir / "status.json").read_text())["reason"] == f"stopped by {signum.name}"
    assert trial.snapshots[-1] == "step-00000008"
    trial.spawn(2)
    assert trial.outcome() == undisturbed()


def test_the_rendezvous_ends(trial: Trial, undisturbed: Undisturbed, port: int) -> None:
    endpoint = f"127.0.0.1:{port}"
    host, other = (trial.start("launch", 1, HELD, *flags_at(endpoint, "2", "--node-rank", rank)) for rank in ("0", "1"))
    trial.wait_held()
    host.process.kill()
    assert finish(host, other) == [-signal.SIGKILL, 1]
    assert other.err.read_text().splitlines()[-1] == (
        f"samestep: error: the launcher at {endpoint}, the rendezvous of the nodes, has ended: the same commands "
        "resume from the newest snapshot"
    )
    again = [trial.start("launch", 1, HELD, *flags_at(endpoint, "2", "--node-rank", rank)) for rank in ("0", "1")]
    assert finish(*again) == [0, 0]
    assert trial.outcome() == undisturbed()


# --- under an engine --------------------------------------------------------------------------------------------------


def test_agents_under_torchrun(trial: Trial, undisturbed: Undisturbed, port: int) -> None:
    """torchrun starts one agent per machine. A rank that dies costs no step."""
    fault = "kill rank 3 at step 7 in forward"
    engine = ["--nnodes", "2", "--master-port", str(port), "--node-rank"]
    nodes = [trial.start("agent", 2, fault, "--heal", engine=[*engine, rank]) for rank in ("0", "1")]
    assert finish(*nodes) == [0, 0], "\n".join(node.output for node in nodes)
    trial.assert_struck(fault)
    assert "rank 3 was killed by SIGKILL (out of memory?), on node 1" in nodes[0].output
    assert not (trial.dir / "restarts.jsonl").exists()
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
    (2, 0, None, "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
    (2, None, "localhost:1", "and --node-rank R, which is 0 on HOST"),
    (None, None, "a:1", "--rdzv-endpoint a:1 is where several machines meet, and --nnodes is not given: add --nnodes"),
    *[(2, 0, text, "--rdzv-endpoint takes HOST:PORT") for text in ("", ":1", "a:b", "a:65536", "fd77::1:29400")],
    (2, 0, "no-such-host.invalid:1", "no address of no-such-host.invalid is known here"),
    (2, 0, "192.0.2.1:1", "other programs can reach 192.0.2.1:1, and there is no secret"),
])  # fmt: skip
def test_options_that_make_no_sense(nnodes: int | None, node_rank: int | None, endpoint: str | None, said: str) -> None:
    with pytest.raises(Error, match=said):
        parse_nodes(nnodes, node_rank, endpoint, 300)


@pytest.mark.parametrize("own", [None, "ib0"])
def test_the_interface_is_set_unless_it_is(monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
        if own:
            monkeypatch.setenv(name, own)
    [variables] = build_variables(1, Start(0, None, 0, 2, 0, 2), {}, "a secret", interface="eth7")
    assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == (own or "eth7")


def test_one_node_needs_no_endpoint() -> None:
    assert parse_nodes(1, 0, None, 300) is None
    assert parse_nodes(None, None, None, 300) is None
    assert parse_nodes(1, None, "a:1", 300) is None  # as with torchrun
