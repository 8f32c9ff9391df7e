"""Hostile peers of the rendezvous server: whatever they send, the run's own nodes start, train and end as usual."""

import json
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from msgspec import structs
from support.waiting import wait_until

from samestep.errors import Error
from samestep.launch.handshake import derive_key, make_nonce, prove, read_secret, share_secret
from samestep.launch.launcher import _conclude
from samestep.launch.local_ranks import Ranks
from samestep.launch.messages import MAX_LINE_BYTES, LauncherLink
from samestep.launch.rendezvous_client import (
    GREETING_S,
    LAST_CALL_S,
    End,
    Hello,
    Nodes,
    build_hello,
    connect,
    parse_nodes,
)
from samestep.launch.rendezvous_server import ADMIT_S, MAX_PENDING, RendezvousServer
from samestep.launch.target import Target
from samestep.world.membership import read_generation

SECRET = "a secret of this run's nodes"
ENDED = {"kind": "ended", "round": 1, "failure": None, "signum": 0}
ENDED |= {"has_succeeded": True, "is_complete": True}
FAILED = ENDED | {"has_succeeded": False}


class Place:
    """A running server for `least` to `most` nodes, and the connections to it."""

    def __init__(self, least: int = 2, most: int = 2, last_call_s: float = LAST_CALL_S, *, heals: bool = False) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        port = listener.getsockname()[1]
        self.nodes = Nodes(least, most, None, "127.0.0.1", port, "an id", 60.0, SECRET, last_call_s)
        self.heals = heals
        self.server = RendezvousServer(self.nodes, listener, 0, [], heals=heals)
        self.server.start()
        self.opened: list[LauncherLink] = []

    def hello(self, rank: int, **changes: Any) -> Hello:
        nodes = replace(self.nodes, node_rank=rank)
        hello = build_hello(nodes, Target("script", __file__, []), 1, 0, heals=self.heals)
        return structs.replace(hello, **changes)

    def join(self, rank: int) -> LauncherLink:
        link = connect(self.nodes, self.hello(rank), lambda: False)
        assert link is not None
        self.opened.append(link)
        return link

    def connect(self, *, knows: bool = False) -> tuple[LauncherLink, str]:
        """Open a connection. Returns it and the server's nonce. `knows`: prove that it knows the secret."""
        link = LauncherLink(socket.create_connection((self.nodes.host, self.nodes.port)))
        self.opened.append(link)
        challenge = link.receive(GREETING_S)
        assert challenge is not None
        if knows:
            nonce = make_nonce()
            link.send("proof", nonce=nonce, proof=prove(SECRET, "node", challenge["nonce"], nonce))
            answer = link.receive(GREETING_S)
            assert answer is not None
            assert answer["proof"] == prove(SECRET, "hub", challenge["nonce"], nonce)
        return link, challenge["nonce"]


@pytest.fixture
def open_place() -> Iterator[Callable[..., Place]]:
    places: list[Place] = []

    def make(*arguments: Any, **options: Any) -> Place:
        places.append(Place(*arguments, **options))
        return places[-1]

    yield make
    for place in places:
        for link in place.opened:
            link.close()
        place.server._is_over = True
        place.server.join(30)
        assert not place.server.is_alive()


def say(*messages: dict[str, Any] | bytes, knows: bool = False) -> Callable[[Place], None]:
    """A peer that sends these messages, and waits until the server answers or closes the connection."""

    def attack(place: Place) -> None:
        link, _ = place.connect(knows=knows)
        for message in messages:
            data = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
            try:
                link._socket.sendall(data)
            except OSError:  # the server has closed it already
                break
        check_answers(link)

    return attack


def check_answers(link: LauncherLink) -> None:
    """Check that the server sends nothing about the run to an unproven peer, and closes the connection."""
    received = b""
    link._socket.settimeout(GREETING_S)
    try:
        while data := link._socket.recv(1 << 16):
            received += data
            if b'"refused"' in received:
                return
    except ConnectionError:
        pass
    assert received in (b"", b'{"kind": "denied"}\n'), received


def hello(**changes: Any) -> Callable[[Place], None]:
    """A peer that knows the secret, and sends a hello that no launcher sends."""
    return lambda place: say({"kind": "hello", **structs.asdict(place.hello(1)), **changes}, FAILED, knows=True)(place)


def replay(place: Place) -> None:
    """The proof for one connection is not valid for another one."""
    link, _ = place.connect()
    _, nonce = place.connect()
    own = make_nonce()
    link.send("proof", nonce=own, proof=prove(SECRET, "node", nonce, own))
    link.send(**FAILED)
    check_answers(link)


def stay(place: Place) -> None:
    """Of hundreds of silent connections the oldest are closed, so that the run's nodes can connect."""
    links = [place.connect()[0] for _ in range(2 * MAX_PENDING)]
    for link in links[:MAX_PENDING]:
        link._socket.settimeout(ADMIT_S / 3)  # before it is closed for its age
        assert link._socket.recv(1) == b""


WITHOUT = {
    "ended": say(FAILED),
    "room": say({"kind": "room", "num_ranks": 0}),
    "hello": say({"kind": "hello", "host": "x"}),
    "a wrong proof": say({"kind": "proof", "nonce": "0" * 32, "proof": "0" * 64}, FAILED),
    "a proof that is no text": say({"kind": "proof", "nonce": ["0" * 32], "proof": {}}, FAILED),
    "a proof of another secret": say({"kind": "proof", "nonce": "0" * 32, "proof": "\ud800"}, FAILED),
    "a proof of another connection": replay,
    "brackets": say(b"[" * 200_000 + b"\n"),
    "a line without an end": say(b"x" * 200_000),
    "no JSON": say(b"GET / HTTP/1.1\r\n\r\n"),
    "no message": say(b"[1]\n"),
    "bytes": say(bytes(range(256))),
    "silence": stay,
}
WITH = {
    "ended": say(FAILED, knows=True),
    "room": say({"kind": "room", "num_ranks": 0}, knows=True),
    "brackets": say(b"[" * 200_000 + b"\n", knows=True),
    "a line without an end": say(b"x" * (MAX_LINE_BYTES + 1), knows=True),
    "no ranks": hello(num_ranks=0),
    "too many ranks": hello(num_ranks=1 << 30),
    "no number of ranks": hello(num_ranks="1"),
    "an escape": hello(host="\x1b[2J"),
    "a list instead": hello(arguments=[[[]], 2]),
    "one field more": hello(more=1),
    "another id": hello(settings={"--rdzv-id": "x"}),
    "another directory": hello(settings={"--run-dir (or SAMESTEP_RUN_DIR)": "x"}),
}
ATTACKS = [
    *(pytest.param(attack, id=f"without the secret: {name}") for name, attack in WITHOUT.items()),
    *(pytest.param(attack, id=f"with the secret: {name}") for name, attack in WITH.items()),
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_peers(open_place: Callable[..., Place], attack: Callable[[Place], None]) -> None:
    place = open_place()
    links = [place.join(0)]
    attack(place)
    links.append(place.join(1))
    for link in links:
        begun = link.receive(GREETING_S)
        assert begun is not None
        assert (begun["kind"], begun["round"], begun["place"]["world_size"]) == ("begin", 1, 2)
    attack(place)
    for link in links:
        assert link.receive() is None, "the run goes on"
        link.send(**ENDED)
    for link in links:
        end = link.receive(GREETING_S)
        assert end is not None
        assert (end["kind"], end["message"], end["failure"], end["is_complete"]) == ("end", "", "", True)
        link.close()


def test_a_bug_of_the_server_is_no_loss_of_a_node(
    open_place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its traceback is printed, and all launchers end."""
    place = open_place()
    links = [place.join(0), place.join(1)]
    for link in links:
        link.receive(GREETING_S)
    monkeypatch.setattr(threading, "excepthook", lambda failed: print(repr(failed.exc_value)))
    monkeypatch.setattr(RendezvousServer, "_heal_without", lambda *_: {}["a bug"])
    links[0].send("ends", round=1, codes=[], failures=[])
    for link in links:
        with pytest.raises(ConnectionError):
            link.receive(GREETING_S)
    place.server.join(30)
    assert capfd.readouterr().out == "KeyError('a bug')\n"


def test_nodes_of_another_run(open_place: Callable[..., Place]) -> None:
    """Other faults of a node with the secret are reported in one sentence: its command names the directory."""
    place = open_place()
    place.join(0)
    nodes, target = replace(place.nodes, node_rank=1), Target("script", __file__, [])
    other = build_hello(nodes, target, 1, 0, {"run_dir": "b", "local_dir": "its own"})
    with pytest.raises(Error, match=r"has another --run-dir \(or SAMESTEP_RUN_DIR\) than .* \(b, not none\)"):
        connect(nodes, other, lambda: False)
    nodes = replace(nodes, secret="a secret of other nodes")
    with pytest.raises(Error, match="does not have this node's secret: give all nodes the same SAMESTEP_RDZV_SECRET"):
        connect(nodes, other, lambda: False)


def test_nodes_that_do_not_fit_together(open_place: Callable[..., Place], capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that exists twice, another script, and nodes that do not join."""
    place = open_place(3, 3)
    link = place.join(0)
    for other, said in (
        (place.hello(0), "were both started with --node-rank 0: give each node its own"),
        (
            place.hello(2, settings=place.hello(2).settings | {"program": "x"}),
            r"node 2 \(.*\) has another test_rendezvous.py than node 0 \(.*\) \(x, not \w+\): make them",
        ),
        (
            build_hello(replace(place.nodes, node_rank=2), Target("script", __file__, []), 1, 0, heals=True),
            r"node 2 \(.*\) has another --heal than node 0 \(.*\) \(yes, not no\): make them the same",
        ),
    ):
        with pytest.raises(Error, match=said) as refused:
            connect(place.nodes, other, lambda: False)
        assert refused.value.code == "SS504", "the server has sent it"
    place.server._say_s = 0.0
    waiting = link.receive(GREETING_S)
    assert waiting is not None
    assert waiting["sentence"].startswith("of 3 nodes, --node-rank 1, 2 still missing at 127.0.0.1:")
    assert "; present: node 0 (" in waiting["sentence"]
    place.server._wait_s = 0.0
    end = link.receive(GREETING_S)
    assert end is not None
    assert end["message"].startswith("of 3 nodes, --node-rank 1, 2 did not join at 127.0.0.1:")
    assert "; present: node 0 (" in end["message"]
    assert end["message"].endswith(" [SS507]")
    assert end["code"] == 2
    assert capfd.readouterr().err.count(" was refused: ") == 3


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([b'{"kind": "welcome"}\n'], "is no samestep launcher"),
        ([b"[" * 200_000 + b"\n"], "is no samestep launcher"),
        ([b'{"kind": "challenge", "nonce": 1}\n'], "is no samestep launcher"),
        ([b'{"kind": "challenge", "nonce": "%s"}\n' % (b"0" * 32), b'{"kind": "welcome"}\n'], "no samestep launcher"),
        (
            [b'{"kind": "challenge", "nonce": "%s"}\n' % (b"0" * 32), b'{"kind": "proof"}\n'],
            "does not have this node's",
        ),
        ([b'{"kind": "challenge", "nonce": "x y"}\n', b'{"kind": "denied"}\n'], "does not have this node's secret"),
    ],
)
def test_an_impostor_of_the_server(answers: list[bytes], said: str) -> None:
    """A node does not join a server without the secret."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nodes = Nodes(2, 2, 0, "127.0.0.1", listener.getsockname()[1], "", 60.0, SECRET)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                for each in answers:
                    connection.sendall(each)
                with suppress(ConnectionError):
                    while connection.recv(1 << 16):
                        pass

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Error, match=said):
            connect(nodes, build_hello(nodes, Target("script", __file__, []), 1, 0), lambda: False)
        thread.join(30)


def test_the_last_call(open_place: Callable[..., Place]) -> None:
    """The first start waits for further nodes, longer than the limit for the least number, or not at all."""
    place = open_place(1, 2, 600.0)
    first = place.join(0)
    place.server._wait_s = 0.0  # the limit has passed
    for node, link in enumerate([first, place.join(1)]):
        begin = link.receive(GREETING_S)
        assert begin is not None
        assert (begin["kind"], begin["place"]["node"], begin["place"]["num_nodes"]) == ("begin", node, 2)
    alone = open_place(1, 2, 0.0).join(0).receive(GREETING_S)
    assert alone is not None
    assert (alone["kind"], alone["place"]["num_nodes"]) == ("begin", 1)


def test_ranks_that_were_stopped_for_no_reason(open_place: Callable[..., Place]) -> None:
    """No node reports that the run has ended, so the exit code is not 0."""
    place = open_place(1, 1)
    link = place.join(0)
    link.receive(GREETING_S)
    link.send(**FAILED)
    end = link.receive(GREETING_S)
    assert end is not None
    assert (end["kind"], end["code"]) == ("end", 1)


def test_a_lost_node_is_named_by_its_ranks_if_two_share_a_host(open_place: Callable[..., Place]) -> None:
    place = open_place()
    stays, goes = [connect(place.nodes, place.hello(0, node_rank=None), lambda: False) for _ in range(2)]
    assert stays
    assert goes
    place.opened.append(stays)
    for link in (stays, goes):
        link.receive(GREETING_S)
    goes.close()
    stop = stays.receive(GREETING_S)
    assert stop is not None
    stays.send(**FAILED)
    end = stays.receive(GREETING_S)
    assert end is not None
    assert end["message"].startswith(f"{place.hello(0).host} (rank 1) was lost: ")


def test_after_a_signal_no_node_waits_for_a_rank_that_has_ended(open_place: Callable[..., Place]) -> None:
    """A node whose ranks have waited for too long lets the server end their waiting."""
    place = open_place(1, 1, heals=True)
    link = place.join(0)
    begin = link.receive(GREETING_S)
    assert begin is not None
    link.send("refuse", round=begin["round"])
    store = dist.TCPStore("127.0.0.1", begin["place"]["port"], None, False)  # type: ignore[attr-defined]
    secret = derive_key(SECRET, "the ranks")
    wait_until(lambda: read_generation(store, secret, 1) == [], "the refusal")


@pytest.mark.parametrize(
    ("codes", "is_complete", "code"), [({}, True, 0), ({}, False, 75), ({0: 0}, True, 0), ({0: -15}, True, 1)]
)
def test_exit_codes(codes: dict[int, int], is_complete: bool, code: int) -> None:
    """The exit code is 0 if the run has ended, also on a node whose ranks were never started."""
    ranks = Ranks(None)  # type: ignore[arg-type]
    try:
        ranks.ends.codes, ranks.num_ranks = codes, len(codes)
        assert _conclude(ranks, [], End(code=2, is_complete=is_complete)) == code
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (SECRET, 0o600, None),
        (SECRET, 0o640, "can be read by other users: chmod 600"),
        ("short", 0o600, "has 5 characters: use at least 16"),
        ("", 0o600, "has 0 characters"),
        (None, 0, r"cannot be read \(No such file"),
    ],
)
def test_files_with_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, mode: int, said: str | None
) -> None:
    monkeypatch.setenv("SAMESTEP_RDZV_SECRET", "another secret, which counts less")
    file = tmp_path / "secret"
    if text is not None:
        file.write_text(f"{text}\n")
        os.chmod(file, mode)
    if said is None:
        assert read_secret(str(file)) == SECRET
    else:
        with pytest.raises(Error, match=f"--rdzv-secret .*{said}"):
            read_secret(str(file))


@pytest.fixture
def shared_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files that all users share, as /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def as_another_user(run: Callable[[], str]) -> str:
    """Call a function as user 65534, and return its result, or the message of its Error."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "failed"
        with suppress(BaseException):
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                text = run()
            except (Error, OSError) as error:
                text = f"{type(error).__name__}: {error}"
        os.write(writes, text.encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as answers:
        text = answers.read()
    os.waitpid(pid, 0)
    return text


def test_another_user_of_this_machine_does_not_join_a_loopback_endpoint(
    open_place: Callable[..., Place], shared_tmp: Path
) -> None:
    """Without a secret of the environment, this user's launchers share one that no other user can read."""
    place = open_place()
    place.server._nodes = place.nodes = parse_nodes("2", None, f"127.0.0.1:{place.nodes.port}", "an id", 60.0)  # type: ignore[assignment]
    place.join(0)

    def join() -> str:
        nodes = parse_nodes("2", 1, place.nodes.endpoint, "another id", 60.0)
        assert nodes is not None
        return str(connect(nodes, place.hello(1), lambda: False))

    said = as_another_user(join)
    assert "does not have this node's secret" in said
    assert "an id" not in said
    (file,) = shared_tmp.glob(f".samestep-{os.geteuid()}/*")
    assert "Permission denied" in as_another_user(file.read_text)
    place.join(1)


def test_a_planted_secret_is_not_used(shared_tmp: Path) -> None:
    planted = shared_tmp / f".samestep-{os.geteuid()}"

    def plant() -> str:
        planted.mkdir(0o777)
        (planted / "secret").write_text(SECRET)
        return "planted"

    assert as_another_user(plant) == "planted"
    with pytest.raises(Error, match=r"cannot be made .*not a directory that only this user can enter.*SAMESTEP_RDZV"):
        share_secret()


def test_launchers_of_one_user_share_a_secret(shared_tmp: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(share_secret())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    (file,) = shared_tmp.glob("*/*")
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == ("secret", 0o600)


def test_a_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_RDZV_SECRET", f" {SECRET}\n")
    assert read_secret(None) == SECRET
    assert read_secret(None) == "", "it is taken once"
    monkeypatch.setenv("SAMESTEP_RDZV_SECRET", "abc")
    with pytest.raises(Error, match="SAMESTEP_RDZV_SECRET has 3 characters"):
        read_secret(None)
