"""`samestep doctor`: its findings for planted values, and its report on this machine, with one and two ranks."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.ports import reserve_port
from support.runs import check, read_facts, run_command, samestep_command
from torch import Tensor

import samestep
from samestep.tools import doctor
from samestep.tools.doctor import (
    CHECKS,
    Context,
    DoctorCheck,
    Finding,
    Participants,
    describe_error,
    examine,
    judge_answers,
    judge_collectives,
    judge_connections,
    judge_links,
    judge_run_dir,
    look_at_collectives,
    look_at_connections,
    look_at_versions,
    try_connection,
)
from samestep.world.environment import read_environment

ALONE = Participants(("a",), (0,))
TWO_HOSTS = Participants(("a", "a", "b", "b"), (0, 0, 1, 1))
THREE_HOSTS = Participants(("a", "b", "c"), (0, 1, 2))


def judge(judgement: Any, participants: Participants, *facts: Any) -> list[Finding]:
    answers = {rank: {"facts": fact} for rank, fact in enumerate(facts)}
    answers |= {rank: {"facts": None} for rank in range(len(facts), len(participants.hosts))}
    return judge_answers(DoctorCheck("the check", lambda context: None, judgement), participants, answers)


def only(findings: list[Finding], status: str) -> Finding:
    """Return the single finding after a check of its status. A problem must come with advice."""
    assert [finding.status for finding in findings] == [status], findings
    assert findings[0].advice or status == "pass"
    return findings[0]


def test_ranks_and_hosts_are_named() -> None:
    assert TWO_HOSTS.leaders == [0, 2]
    assert TWO_HOSTS.name_ranks([2, 3]) == "ranks 2 and 3 on b"
    assert TWO_HOSTS.name_ranks([1, 2, 3]) == "ranks 1, 2 and 3 on a, b"
    alike = Participants(("a", "a"), (0, 1))
    assert [alike.name_node(0), alike.name_node(1)] == ["a (node 0)", "a (node 1)"]
    many = Participants([f"h{i}" for i in range(9)], range(9))
    assert many.name_nodes(range(1, 9)) == "h1, h2, h3, h4, h5, h6 and 2 more"


def test_a_check_that_fails_does_not_stop_the_others() -> None:
    run_dir = next(check for check in CHECKS if check.name == "run_dir")
    answers = {0: {"facts": written()}, 1: {"error": "OSError: no"}}
    findings = judge_answers(run_dir, TWO_HOSTS, answers)
    assert [(f.check, f.status) for f in findings] == [("run_dir", "FAIL"), ("run_dir", "FAIL"), ("run_dir", "pass")]
    assert [finding.found for finding in findings[:2]] == [
        "could not be checked on ranks 2 and 3 on b: it did not answer",
        "could not be checked on rank 1 on a: OSError: no",
    ]
    assert describe_error(RuntimeError("\n first line \nsecond")) == "RuntimeError: first line"


def written(writer: int = 0, problem: str = "") -> dict[str, Any]:
    return {"wanted": "runs", "problem": problem, "writer": writer}


def test_directories() -> None:
    found = only(judge(judge_run_dir, THREE_HOSTS, written(), written(), written()), "pass").found
    assert found == "runs can be written, and is one for all hosts"
    own = only(judge(judge_run_dir, THREE_HOSTS, written(), written(), written(2)), "warn")
    assert own.found == "runs on c differs from that on a: a run keeps a copy on each such host"
    assert only(judge(judge_run_dir, ALONE), "pass").found.startswith("a URL")
    shut = only(judge(judge_run_dir, ALONE, written(problem="Permission denied")), "FAIL")
    assert shut.found == "runs cannot be written on a (Permission denied)"


def test_connections() -> None:
    assert only(judge(judge_connections, ALONE, None), "pass").found == "one host"
    assert only(judge(judge_collectives, ALONE, None), "pass").found.startswith("one rank: nothing to exchange")
    assert only(judge(judge_connections, THREE_HOSTS, [], [], []), "pass").found == "all hosts reach each other"
    with reserve_port() as port:
        assert try_connection("127.0.0.1", port) == "127.0.0.1: Connection refused"


def link(start: str, end: str, bytes_per_s: float) -> dict[str, Any]:
    return {"from": start, "to": end, "bytes_per_s": bytes_per_s}


def test_links() -> None:
    pairs = ["ab", "ba", "ac", "ca", "bc", "cb"]
    even = [link(*pair, 1e9 + ord(pair[0]) * 1e6) for pair in pairs]
    assert only(judge_links(even), "pass").found.endswith("slowest: a -> b, 1.1 GB/s")
    slow = only(judge_links([link(*pair, 12e6 if pair[0] == "b" else 1e9) for pair in pairs]), "warn")
    assert slow.found == "the slowest link is b -> a, 12 MB/s; then b -> c, 12 MB/s; the median is 1 GB/s"
    two = only(judge_links([link("a", "b", 1e9), link("b", "a", 12e6)]), "warn")
    assert two.found == "the slowest link is b -> a, 12 MB/s; the median is 1 GB/s"
    assert judge_links([]) == []


# --- real ranks -------------------------------------------------------------------------------------------------------

ALL = ["versions", "run_dir", "connections", "collectives"]


def test_two_ranks(tmp_path: Path) -> None:
    done = check(samestep_command("doctor", "--nproc-per-node", "2", "--device", "cpu", "--json", cwd=tmp_path))
    record = read_facts("doctor", done.stdout)
    assert (record["status"], record["world_size"], len(record["hosts"])) == ("pass", 2, 1)
    assert [finding["check"] for finding in record["findings"]] == ALL
    assert not list(tmp_path.iterdir())


# --- planted faults: what replaces a check's measurement on one rank -------------------------------------------------

Faults = dict[tuple[str, int], Callable[[Context], Any]]  # check and rank -> its measurement there


def find_other_version(context: Context) -> Any:
    return {**look_at_versions(context), "torch": "2.0.1"}


def raise_error(context: Context) -> Any:
    raise PermissionError(13, "it is forbidden")


def hang(context: Context) -> Any:
    context.doing = "a call that does not return"
    time.sleep(600)


def reach_nobody(context: Context) -> Any:
    doctor.try_connection = lambda address, port: f"{address}: No route to host"
    return look_at_connections(context)


def add_wrongly(context: Context) -> Any:
    """Change one element of each sum on this rank."""
    add = dist.all_reduce
    dist.all_reduce = lambda tensor: (add(tensor), tensor[-1:].add_(1))
    return look_at_collectives(context)


def send_slowly(context: Context) -> Any:
    """Delay what is measured, but not the answers to it."""
    send = dist.send

    def delay(tensor: Tensor, rank: int) -> None:
        time.sleep(0.2 if len(tensor) > 1 else 0)
        send(tensor, rank)

    dist.send = delay
    return look_at_collectives(context)


def examine_with(faults: Faults, are_nodes: bool) -> int:
    """Examine as one of the ranks. `are_nodes`: each rank is a node of its own."""
    environment = read_environment()
    if are_nodes:
        doctor.read_host_id = lambda scope: str(environment.rank)
    looks = {check.name: faults.get((check.name, environment.rank), check.look) for check in CHECKS}
    checks = [
        replace(check, look=looks[check.name], limit_s=2.0 if looks[check.name] is hang else check.limit_s)
        for check in CHECKS
    ]
    return examine(environment, checks, json=True)


def find_faults(
    capfd: Any, num_ranks: int, faults: Faults, *, are_nodes: bool = False
) -> tuple[str, dict[str, list[str]]]:
    """Examine ranks with planted faults. Returns the name of this host, and for each check what is wrong."""
    code = samestep.spawn(examine_with, num_ranks, (faults, are_nodes))
    report = json.loads(capfd.readouterr().out)
    wrong: dict[str, list[str]] = {}
    for finding in report["findings"]:
        if finding["status"] != "pass":
            assert finding["advice"], finding
            wrong.setdefault(finding["check"], []).append(finding["found"])
    assert code == (report["status"] == "FAIL")
    return report["hosts"][0].partition(" ")[0], wrong


def test_planted_faults_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Another version, a check that raises, one that hangs, and a wrong sum."""
    host, wrong = find_faults(capfd, 2, {
        ("versions", 1): find_other_version, ("connections", 0): raise_error, ("connections", 1): hang,
        ("collectives", 1): add_wrongly,
    })  # fmt: skip
    [version], [total] = wrong.pop("versions"), wrong.pop("collectives")
    assert version.startswith(f"torch is 2.0.1 on rank 1 on {host}, and ")
    assert total.endswith(f"numbers of an all-reduce are wrong: rank 1 on {host}")
    assert wrong == {
        "connections": [
            f"could not be checked on rank 0 on {host}: PermissionError: [Errno 13] it is forbidden "
            "(it had just begun)",
            f"could not be checked on rank 1 on {host}: it hung, and was abandoned after 2 s "
            "(a call that does not return)",
        ]
    }


def test_faults_of_a_node_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Each rank is a node. One reaches no other, and what another one sends is slow."""
    faults: Faults = {("connections", 2): reach_nobody, ("collectives", 1): send_slowly}
    host, wrong = find_faults(capfd, 3, faults, are_nodes=True)
    [links] = wrong.pop("links")
    assert links.startswith("the slowest link is ")
    assert all(f"{host} (node 1) -> {host} (node {other}), " in links for other in (0, 2))
    assert wrong == {
        "connections": [
            f"{host} (node 2) cannot reach {host} (node {other}) at 127.0.0.1: No route to host" for other in (0, 1)
        ]
    }


@pytest.mark.soak
def test_under_torchrun(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "samestep", "doctor", "--json"]
    env = {"OMP_NUM_THREADS": "1"}
    done = check(run_command(sys.executable, *words, "--run-dir", tmp_path / "runs", cwd=tmp_path, env=env))
    assert json.loads(done.stdout)["world_size"] == 2
    given = run_command(sys.executable, *words, "--nproc-per-node", "2", cwd=tmp_path, env=env)
    assert "--nproc-per-node was given, but a launcher has started the ranks already: leave it out" in given.stderr


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    """Nothing hangs: the other ranks report it, and a rank that finds no other one reports that."""
    script = "import sys; from samestep.tools import doctor; doctor.JOIN_S = 1.0; "
    script += "from samestep.cli import main; sys.exit(main(['doctor']))"
    with reserve_port() as port:
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank, words in enumerate(("rank 1 did not come within 1 s", "rank 1 cannot reach the rendezvous store")):
            env = variables | {"RANK": str(rank)}
            done = check(run_command(sys.executable, "-c", script, cwd=tmp_path, env=env), 2)
            assert words in done.stderr
            assert done.stderr.endswith("[SS507]\n")
