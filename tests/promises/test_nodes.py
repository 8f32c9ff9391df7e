"""A run on several nodes: the same bits when nodes leave and join, and the errors when they do not find each other.

Nodes are launchers on this machine, or, for tests of the network, in network namespaces.
"""

import json
import re
import shlex
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from promises.test_restarts import flags_of, read_restarts
from promises.trial import SCRIPT, Outcome, Started, Trial
from support.hosts import Host
from support.ports import reserve_port
from support.selection import one_in
from support.waiting import DEADLINE_S, catches, wait_until

from samestep.errors import Error
from samestep.launch.local_ranks import Placement, build_variables
from samestep.launch.messages import LauncherLink
from samestep.launch.rendezvous_client import (
    build_hello,
    describe_target,
    find_other_arguments,
    find_own_address,
    parse_endpoint,
    parse_nodes,
)
from samestep.launch.rendezvous_server import open_listener
from samestep.launch.target import Target

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


def elastic_flags_at(endpoint: str, node_rank: int) -> list[str]:
    """One or two nodes, of which both are there at the first start."""
    return flags_at(endpoint, "1:2", "--rdzv-last-call", "120", "--node-rank", str(node_rank))


def start_elastic(trial: Trial, endpoint: str, node_rank: int, host: Host, *faults: str) -> Started:
    flags = [*elastic_flags_at(endpoint, node_rank), "--snapshot-every", "2"]
    return trial.start("launch", 1, "", *flags, arguments=flags_of(*faults), host=host)


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
    for node in nodes:
        assert "samestep: ranks 0-1 on node 0 (h1), 2-3 on node 1 (h2)\n" in node.err.read_text()
    assert "on 4 ranks" in nodes[0].out.read_text()
    assert nodes[1].out.read_text() == "", "rank 0 is on the other host"
    assert trial.outcome() == undisturbed()


# Launchers on two hosts, one of which is started twice: 11 s, and 16 s on a busy machine.
def test_a_host_goes_and_comes_back(trial: Trial, undisturbed: Undisturbed, all_hosts: list[Host]) -> None:
    """Its launcher is killed: its ranks end, and the other host trains. Once it is started again, both train."""
    faults = [HELD, "hold rank 0 at step 10 in forward"]
    endpoint = f"{all_hosts[0].address}:29401"
    stays, goes = (start_elastic(trial, endpoint, rank, all_hosts[rank], *faults) for rank in (0, 1))
    trial.wait_held()
    assert "samestep: ranks 0 on node 0 (h1), 1 on node 1 (h2)\n" in goes.output
    (trial.faults / "held-0").unlink()
    goes.process.kill()
    goes.wait()
    wait_until(lambda: (trial.faults / "held-0").exists(), "it goes on alone")
    comes = start_elastic(trial, endpoint, 1, all_hosts[1], *faults)
    stays.wait_for_words("a second one ends at once")  # it saves, to let the other join
    trial.go_on()
    assert finish(stays, comes) == [0, 0], stays.output + comes.output
    rows = read_restarts(trial)
    assert [(row["reason"], row["rank"], row["world_size"]) for row in rows] == [
        ("node 1 (h2) was lost", None, 1),
        ("a node has joined", None, 2),
    ]
    assert (rows[1]["from_step"], rows[1]["lost_steps"]) == (11, 0)
    assert trial.outcome() == undisturbed()


# Launchers on two hosts wait until a connection that does not close is given up: 12 s, and 16 s on a busy machine.
def test_the_plug_is_pulled(trial: Trial, undisturbed: Undisturbed, all_hosts: list[Host]) -> None:
    """No connection closes. The other host continues within seconds, and the one that is cut off ends."""
    stays_on, _, cut_off = all_hosts
    endpoint = f"{stays_on.address}:29402"
    stays, goes = (start_elastic(trial, endpoint, rank, host, HELD) for rank, host in enumerate((stays_on, cut_off)))
    trial.wait_held()
    cut_off.pull_the_plug()
    wait_until(lambda: (trial.dir / "restarts.jsonl").exists(), "it goes on alone")
    assert finish(stays, goes) == [0, 1], stays.output + goes.output
    assert f"the launcher at {endpoint}, the rendezvous of the nodes, has ended" in goes.err.read_text()
    assert trial.outcome() == undisturbed()


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_rank_dies_on_one_node(trial: Trial, undisturbed: Undisturbed, port: int) -> None:
    """All nodes start again and print why. A message about other arguments of one node is printed once."""
    fault = "kill rank 1 at step 7 in forward"
    flags = flags_at(f"127.0.0.1:{port}", "2", "--max-restarts", "1")
    nodes = [
        trial.start("launch", 1, fault, *flags, "--node-rank", str(rank), arguments=["--num-workers", str(rank)])
        for rank in (0, 1)
    ]
    assert finish(*nodes) == [0, 0], "\n".join(node.output for node in nodes)
    trial.assert_struck(fault)
    for node in nodes:
        assert "samestep: rank 1 was killed by SIGKILL (out of memory?); restart 1 of 1\n" in node.err.read_text()
        assert "Traceback" not in node.output
    [words] = [words for node in nodes if "other arguments" in (words := node.err.read_text())]  # at the rendezvous
    assert len(re.findall(r"node [01] \(.*\) gives faulty\.py other arguments than node [01] \(", words)) == 1
    assert re.search(
        r"--num-workers ([01]) instead of --num-workers (?!\1)[01]: if", words.split("samestep: ranks ")[0]
    )
    assert [(row["rank"], row["world_size"]) for row in read_restarts(trial)] == [(1, 2)]
    assert trial.outcome() == undisturbed()


def test_no_restarts_are_left(trial: Trial, undisturbed: Undisturbed, port: int) -> None:
    """The node of the rank prints the traceback; the other node names the rank in one line."""
    fault = "raise rank 1 at step 7 in forward"
    flags = flags_at(f"127.0.0.1:{port}")
    nodes = [trial.start("launch", 1, fault, *flags, "--node-rank", str(rank)) for rank in (0, 1)]
    assert finish(*nodes) == [1, 1]
    last = [node.err.read_text().splitlines()[-1] for node in nodes]
    assert re.fullmatch(
        rf"samestep: rank 1 raised RuntimeError: a fault: {fault}, on node 1 \(.*\); the others were stopped", last[0]
    )
    assert last[1] == f"RuntimeError: a fault: {fault}"
    assert "Traceback" not in nodes[0].output
    trial.spawn(3)
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


def test_a_signal_to_one_node(trial: Trial, undisturbed: Undisturbed, port: int) -> None:
    """The run continues without it, from the step at which it left."""
    fault = "hold rank 1 at step 7 in forward"
    stays = trial.start("launch", 1, fault, *elastic_flags_at(f"127.0.0.1:{port}", 0))
    wait_until(lambda: _listens(port), "it has the rendezvous")
    goes = trial.start("launch", 1, fault, *elastic_flags_at(f"127.0.0.1:{port}", 1))
    trial.wait_held(1)
    goes.process.send_signal(signal.SIGTERM)
    wait_until(lambda: (trial.faults / "heard-1").exists(), "it has heard")
    trial.go_on()
    assert finish(goes, stays) == [75, 0], goes.output + stays.output
    assert re.search(r"samestep: node 1 \(.+\) received a signal to stop; all start again\n", stays.err.read_text())
    [row] = read_restarts(trial)
    assert (row["rank"], row["world_size"], row["from_step"], row["lost_steps"]) == (None, 1, 8, 0)
    assert trial.outcome() == undisturbed()


def test_a_node_that_the_run_cannot_take(trial: Trial, undisturbed: Undisturbed, port: int) -> None:
    """With its ranks there would be more ranks than micro-batches in a step: it is refused, and the run continues."""
    flags = flags_at(f"127.0.0.1:{port}", "1:2")
    stays = trial.start("launch", 3, "", *flags, "--node-rank", "0", arguments=flags_of(HELD))
    trial.wait_held()
    comes = trial.start("launch", 2, "", *flags, "--node-rank", "1", arguments=flags_of(HELD))
    assert comes.wait() == 2
    refusal = "can use 4 ranks, one per micro-batch of a step, and has 3: start fewer here [SS510]"
    assert refusal in comes.err.read_text()
    trial.go_on()
    assert finish(stays) == [0], stays.output
    assert not (trial.dir / "restarts.jsonl").exists()
    assert trial.outcome() == undisturbed()


def test_the_rendezvous_ends(trial: Trial, undisturbed: Undisturbed, port: int) -> None:
    endpoint = f"127.0.0.1:{port}"
    host = trial.start("launch", 1, HELD, *flags_at(endpoint, "2", "--node-rank", "0"))
    wait_until(lambda: _listens(port), "it waits")
    other = trial.start("launch", 1, HELD, *flags_at(endpoint, "2", "--node-rank", "1"))
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


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# --- bad input --------------------------------------------------------------------------------------------------------


def test_the_port_is_in_use(trial: Trial) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        node = trial.start("launch", 1, "", *flags_at(f"127.0.0.1:{listener.getsockname()[1]}"))
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            assert node.wait() == 2
    assert "is in use by a program that is no samestep launcher: choose another one" in node.err.read_text()


def test_no_answer(trial: Trial, port: int) -> None:
    """The endpoint is on another machine, and nothing listens there."""
    flags = ["--nnodes", "2", "--rdzv-endpoint", f"198.51.100.1:{port}", "--rdzv-timeout", "1"]
    node = trial.start("launch", 1, "", *flags)
    assert node.wait() == 2
    assert f"no answer from 198.51.100.1:{port} within 1 s" in node.err.read_text()


@pytest.mark.parametrize(("place", "signum", "code"), [("198.51.100.1", signal.SIGTERM, 75), ("", signal.SIGINT, 130)])
def test_a_signal_to_a_waiting_launcher(trial: Trial, port: int, place: str, signum: signal.Signals, code: int) -> None:
    """On either node: nothing has been trained, and the user runs the same command again."""
    node = trial.start("launch", 1, "", *flags_at(f"{place or '127.0.0.1'}:{port}"))
    wait_until(lambda: catches(node.process.pid, signum) if place else _listens(port), "it has begun")
    node.process.send_signal(signum)
    assert node.wait() == code, node.output
    assert "Traceback" not in node.output


@pytest.mark.parametrize(("text", "host", "port"), [
    ("a:1", "a", 1),
    ("10.0.0.1:29500", "10.0.0.1", 29500),
    ("[fd77::1]:29400", "fd77::1", 29400),
    ("[::1]", "::1", 29400),
    ("node-3.cluster", "node-3.cluster", 29400),
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
        ("192.0.2.1", None),
    ],
)
def test_where_the_nodes_meet(monkeypatch: pytest.MonkeyPatch, host: str, address: str | None) -> None:
    """A launcher listens only at the endpoint's address. (Debian resolves the machine's own name to 127.0.1.1.)"""
    find, names = socket.getaddrinfo, {"this-machine": "127.0.1.1"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: find(names.get(host, host), *rest, **more))
    assert find_own_address(host) == address
    if address:
        listener = open_listener(address, 0)
        assert listener is not None
        with listener:
            assert listener.getsockname()[0] == address


@pytest.mark.parametrize("text", ["", ":1", "a:", "a:b", "a:0", "a:65536", "fd77::1:29400", "fd77::1", "[]:1"])
def test_no_endpoints(text: str) -> None:
    with pytest.raises(Error, match="--rdzv-endpoint takes HOST:PORT"):
        parse_endpoint(text)


@pytest.mark.parametrize(("nnodes", "node_rank", "endpoint", "said"), [
    ("two", None, "localhost:1", "--nnodes takes a number, or MIN:MAX"),
    ("0", None, "localhost:1", "--nnodes takes a number, or MIN:MAX"),
    ("3:2", None, "localhost:1", "--nnodes takes a number, or MIN:MAX"),
    ("2", 2, "localhost:1", "--node-rank is 2, but the 2 nodes are 0 to 1"),
    ("2", None, None, "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
    (None, None, "a:1", "--rdzv-endpoint a:1 is where several machines meet, and --nnodes is not given: add --nnodes"),
    ("1:2", None, "no-such-host.invalid:1", "no address of no-such-host.invalid is known here"),
    ("2", None, "192.0.2.1:1", "other machines can reach --rdzv-endpoint 192.0.2.1:1, and there is no secret"),
])  # fmt: skip
def test_options_that_make_no_sense(nnodes: str | None, node_rank: int | None, endpoint: str | None, said: str) -> None:
    with pytest.raises(Error, match=said):
        parse_nodes(nnodes, node_rank, endpoint, "", 300)


@pytest.mark.parametrize("own", [None, "ib0"])
def test_the_interface_is_set_unless_it_is(monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
        if own:
            monkeypatch.setenv(name, own)
    [variables] = build_variables(1, Placement(29500, interface="eth7", num_nodes=2, world_size=2), {})
    assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == (own or "eth7")


def test_messages_that_arrive_together() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = LauncherLink(socket.create_connection(listener.getsockname()))
        theirs = LauncherLink(listener.accept()[0])
    for kind in ("welcome", "begin", "stop"):
        theirs.send(kind)
    wait_until(lambda: len(ours._socket.recv(1000, socket.MSG_PEEK).splitlines()) == 3, "all have arrived")
    assert ours.receive(5) == {"kind": "welcome"}
    assert [ours.receive() for _ in range(3)] == [{"kind": "begin"}, {"kind": "stop"}, None]
    theirs.close()
    with pytest.raises(ConnectionError):
        ours.receive(5)
    ours.close()


def test_modules_are_compared_by_their_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As scripts are; a package by its __main__. None of their code runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    for name in ("__init__", "__main__", "train"):
        (tmp_path / "pkg" / f"{name}.py").write_text(f"raise RuntimeError({name!r})\n")
    before = [describe_target(Target("module", name)) for name in ("pkg", "pkg.train", "pkg.none")]
    assert before[2] == "pkg.none", "python itself prints the error"
    for name in ("__main__", "train"):
        (tmp_path / "pkg" / f"{name}.py").write_text("")
    after = [describe_target(Target("module", name)) for name in ("pkg", "pkg.train")]
    assert len({*before, *after}) == 4, "two empty files are the same program"


@pytest.mark.parametrize(("mine", "theirs", "said"), [
    ("a --lr 0.1 --amp", "a --amp --lr 0.1", None),
    ("a --lr -0.1", "a --lr 0.1", "--lr -0.1 instead of --lr 0.1"),
    ("'my data' --amp", "'my data'", "--amp instead of nothing"),
    ("'my data'", "data", "'my data' instead of data"),
])  # fmt: skip
def test_arguments_that_differ(mine: str, theirs: str, said: str | None) -> None:
    nodes = parse_nodes("2", None, "localhost:1", "", 300, "a secret of this test")
    assert nodes is not None
    here, there = (
        build_hello(replace(nodes, node_rank=rank), Target("script", str(SCRIPT), shlex.split(text)), 1, 0)
        for rank, text in enumerate((mine, theirs))
    )
    found = find_other_arguments(here, there)
    if said is None:
        assert found is None
    else:
        assert found == (
            f"{here.name} gives faulty.py other arguments than {there.name}, {said}: if they are not only paths, "
            "the models can differ"
        )


def test_one_node_needs_no_endpoint() -> None:
    assert parse_nodes("1", 0, None, "", 300) is None
    assert parse_nodes(None, None, None, "", 300) is None
    assert parse_nodes("1", None, "a:1", "", 300) is None  # as with torchrun
