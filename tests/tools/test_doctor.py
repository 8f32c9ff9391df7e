"""`samestep doctor`: its findings for planted values, and its report on this machine, with one and two ranks."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest
from support.ports import reserve_port
from support.runs import check, run_command, samestep_command

from samestep.errors import Error
from samestep.tools.doctor.collectives import OPERATIONS, judge_collectives, judge_links, plan_rounds
from samestep.tools.doctor.data_loading import judge_data_loading, measure_rank
from samestep.tools.doctor.disk import find_existing, judge_disk, measure_speed
from samestep.tools.doctor.examination import CHECKS, describe_error
from samestep.tools.doctor.facts import (
    CheckFacts,
    DoctorCheck,
    DoctorOptions,
    Finding,
    Participants,
    format_s,
    judge_answers,
    run_judge,
)
from samestep.tools.doctor.gpus import judge_gpus, read_gpus
from samestep.tools.doctor.host_resources import (
    judge_memory,
    judge_versions,
    read_driver,
)
from samestep.tools.doctor.network import Echo, judge_network, ping
from samestep.tools.doctor.run_doctor import run_doctor
from samestep.units import format_bytes
from samestep.world.memory_room import read_memory_room

DOCTORED = Path(__file__).with_name("doctored.py")
ALONE = Participants(("a",), (0,))
TWO_RANKS = Participants(("a", "a"), (0, 0))
TWO_HOSTS = Participants(("a", "a", "b", "b"), (0, 0, 1, 1))
THREE_HOSTS = Participants(("a", "b", "c"), (0, 1, 2))
GB = 1 << 30


def judge(judgement: Any, participants: Participants, *facts: Any) -> list[Finding]:
    by_rank = {rank: fact for rank, fact in enumerate(facts) if fact is not None}
    return run_judge("the check", judgement, CheckFacts(participants, by_rank))


def only(findings: list[Finding], status: str) -> Finding:
    """Return the single finding after a check of its status. A problem must come with advice."""
    assert [finding.status for finding in findings] == [status], findings
    assert findings[0].advice or status == "pass"
    return findings[0]


# --- who is named -----------------------------------------------------------------------------------------------------


def test_ranks_and_hosts_are_named() -> None:
    assert TWO_HOSTS.leaders == [0, 2]
    assert TWO_HOSTS.name_ranks([2, 3]) == "b"
    assert TWO_HOSTS.name_ranks([1, 2, 3]) == "rank 1 (a), b"
    assert TWO_HOSTS.name_ranks(range(4)) == "all ranks"
    assert TWO_HOSTS.summarize() == "4 ranks on 2 hosts (a, b)"
    assert ALONE.summarize() == "1 rank on a"
    alike = Participants(("a", "a"), (0, 1))
    assert [alike.name_node(0), alike.name_node(1)] == ["a (node 0)", "a (node 1)"]
    many = Participants([f"h{i}" for i in range(9)], range(9))
    assert many.name_nodes(range(1, 9)) == "h1, h2, h3, h4, h5, h6 and 2 more"


def test_readable_numbers() -> None:
    assert [format_bytes(n) for n in (1, 1023, 1 << 10, 256 << 20, 1.5 * GB)] == [
        "1 B",
        "1023 B",
        "1 KB",
        "256 MB",
        "1.5 GB",
    ]
    assert [format_s(s) for s in (2.1e-5, 0.0034, 1.25)] == ["21 us", "3.4 ms", "1.25 s"]


def test_a_check_that_fails_does_not_stop_the_others() -> None:
    memory = next(check for check in CHECKS if check.name == "memory")
    answers = {0: {"facts": {"shm_free_bytes": GB, "free_bytes": GB}}, 1: {"error": "OSError: no"}}
    findings = judge_answers(memory, TWO_HOSTS, answers)
    assert [(f.check, f.status) for f in findings] == [("memory", "fail"), ("memory", "fail"), ("memory", "pass")]
    assert findings[0].found == "could not be checked on rank 1 (a): OSError: no"
    assert findings[1].found == "could not be checked on b: it did not answer"
    broken = DoctorCheck(lambda context: None, {"x": lambda facts: [][0]})
    assert only(judge_answers(broken, ALONE, {0: {"facts": 1}}), "fail").found.startswith(
        "could not be judged: IndexError"
    )
    assert describe_error(RuntimeError("\n first line \nsecond")) == "RuntimeError: first line"


# --- machines ---------------------------------------------------------------------------------------------------------


def test_versions() -> None:
    version = {"python": "3.11.7", "torch": "2.13.0", "NCCL": ""}
    assert only(judge(judge_versions, TWO_RANKS, version, version), "pass").found == (
        "python 3.11.7, torch 2.13.0 on all ranks"
    )
    found = only(judge(judge_versions, THREE_HOSTS, version, {**version, "torch": "2.12.0"}, version), "fail")
    assert found.found == "torch is 2.12.0 on b, and 2.13.0 on the others"
    assert found.advice == "install torch 2.13.0 there"
    found = only(judge(judge_versions, THREE_HOSTS, {**version, "NCCL": "2.29"}, version, version), "fail")
    assert found.found == "NCCL is 2.29 on a, and missing on the others"
    driver = [{**version, "driver": number} for number in ("580.1", "570.2")]
    assert "driver is 570.2 on rank 1 (a)" in only(judge(judge_versions, TWO_RANKS, *driver), "warn").found
    old = {**version, "torch": "2.10.0"}
    found = only(judge(judge_versions, TWO_RANKS, old, old), "warn")
    assert found.found == "torch 2.10.0 is installed, and samestep supports 2.11 to 2.15"


def test_the_driver_is_read(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert read_driver(file) == ""
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Fri Jan 24\nGCC version: 12\n")
    assert read_driver(file) == "570.86.15"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    assert read_driver(file) == "580.65.06"


@pytest.mark.parametrize(
    ("files", "room_bytes"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "5"}, None),
        ({"pod/memory.max": "4096", "pod/memory.current": "1024"}, 3072),
        ({"memory/memory.limit_in_bytes": "4096", "memory/memory.usage_in_bytes": "4097"}, 0),
    ],
)
def test_control_groups(tmp_path: Path, files: dict[str, str], room_bytes: int | None) -> None:
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    own = tmp_path / "own"
    own.write_text("0::/pod/task\n")
    room = read_memory_room(tmp_path / "groups", own)
    assert room == room_bytes if room_bytes is not None else room > 1 << 20


def test_memory() -> None:
    well = {"free_bytes": 30 * GB, "shm_free_bytes": 8 * GB}
    assert only(judge(judge_memory, ALONE, well), "pass").found == "30 GB can be allocated, /dev/shm has 8 GB left"
    docker = only(judge(judge_memory, TWO_RANKS, well, {**well, "shm_free_bytes": 64 << 20}), "warn")
    assert docker.found == "/dev/shm has 64 MB left on rank 1 (a)"
    assert "--ipc=host" in docker.advice
    assert (
        only(judge(judge_memory, ALONE, {**well, "shm_free_bytes": None}), "fail").found == "there is no /dev/shm on a"
    )


# --- GPUs -------------------------------------------------------------------------------------------------------------


def gpus(*each: dict[str, Any], **more: Any) -> dict[str, Any]:
    well = {"name": "H100", "free_bytes": 79 * GB, "total_bytes": 80 * GB, "ecc_errors": 0}
    there = [{**well, **gpu} for gpu in each]
    return {
        "device": "cuda", "problem": "", "num_gpus": len(each), "num_present": len(each), "torch": "2.13.0",
        "no_peers": [], "gpus": there, "names": [gpu["name"] for gpu in there], **more,
    }  # fmt: skip


def test_gpus() -> None:
    none = gpus(device="cpu")
    assert only(judge(judge_gpus, ALONE, none), "pass").found == "no GPU: ranks run on the CPU"
    assert only(judge(judge_gpus, ALONE, gpus({}, {})), "pass").found == "2 x H100, nothing wrong with them"
    wrong = {
        "GPU 1 of a has 40 GB free of 80 GB": ("warn", gpus({}, {"free_bytes": 40 * GB})),
        "GPU 0 of a is slowed down, too hot, at 91 C": (
            "warn", gpus({"slowdowns": ["slowed down, too hot"], "temperature": 91})
        ),
        "GPU 0 of a has had 3 memory errors that ECC could not correct": ("fail", gpus({"ecc_errors": 3})),
        "GPU 0 of a has memory rows to be remapped (pending)": ("warn", gpus({"rows": "pending"})),
        "GPUs 0 and 1 of a cannot reach each other's memory": ("warn", gpus({}, {}, no_peers=[[0, 1], [1, 0]])),
        "torch 2.13.0 cannot use the 8 GPUs of a": ("fail", gpus(num_present=8, device="cpu")),
        "nvidia-ml-py is missing on a": ("warn", gpus({}) | {"gpus": None}),
        "GPUs of several models: A100, H100": ("warn", gpus({}, {"name": "A100"})),
    }  # fmt: skip
    for sentence, (status, fact) in wrong.items():
        assert sentence in only(judge(judge_gpus, ALONE, fact), status).found
    without_nvml = judge(judge_gpus, ALONE, gpus({}) | {"gpus": None})
    assert only(without_nvml, "warn").found.endswith("of its GPUs were not checked (H100)")
    uneven = judge(judge_gpus, THREE_HOSTS, gpus({}, {}), gpus({}), gpus({}, {}))
    assert only(uneven, "warn").found == "GPUs: 2 on a, 1 on b, 2 on c"
    mixed = judge(judge_gpus, TWO_RANKS, gpus({}), {"device": "cpu", "problem": "2 ranks on a machine with 1 GPUs"})
    assert [f.status for f in mixed] == ["fail", "fail"]
    assert mixed[0].found == "2 ranks on a machine with 1 GPUs (on rank 1 (a))"


class NVML:
    """The part of pynvml that is used, with one good and one bad GPU."""

    NVMLError = type("NVMLError", (Exception,), {})

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> list[int]:
        return [index]

    def nvmlDeviceGetUUID(self, gpu: list[int]) -> bytes:
        return b"GPU-%d" % gpu[0]

    def nvmlDeviceGetName(self, gpu: list[int]) -> bytes:
        return b"NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, gpu: list[int]) -> SimpleNamespace:
        return SimpleNamespace(free=GB, total=2 * GB)

    def nvmlDeviceGetTemperature(self, gpu: list[int], kind: int) -> int:
        return 60

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: list[int]) -> int:
        return (0x01 | 0x04, 0x40)[gpu[0]]  # idle and power-capped are normal; the others slow the GPU down

    def nvmlDeviceGetTotalEccErrors(self, gpu: list[int], kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0)
        if gpu[0] == 0:
            raise self.NVMLError("not supported")
        return 2

    def nvmlDeviceGetRemappedRows(self, gpu: list[int]) -> tuple[int, int, int, int]:
        return (0, 0, gpu[0], 0)


def test_gpus_are_read() -> None:
    well, ill = read_gpus(NVML())
    assert well["slowdowns"] == []
    assert "ecc_errors" not in well, "what a GPU does not support is left out"
    assert (well["name"], well["free_bytes"], well["rows"]) == ("NVIDIA H100", GB, "")
    assert (ill["slowdowns"], ill["ecc_errors"], ill["rows"]) == (
        ["slowed down by its hardware, too hot"],
        2,
        "pending",
    )
    assert len(read_gpus(NVML(), ["1"])) == 1, "those that torch sees"
    assert read_gpus(None) is None


# --- network ----------------------------------------------------------------------------------------------------------


def seen(problem: str = "", at: str = "large") -> dict[str, Any]:
    return {"problem": problem, "at": at, "rtt_s": None if problem and at == "connect" else 1e-4}


def host(number: int, **more: Any) -> dict[str, Any]:
    """What host `number` of three measures of the others."""
    return {
        "interface": "eth0", "mtu": 1500, "IPv4": f"10.0.0.{number}", "IPv6": "", "own_name": "", "is_lost": False,
        "seen": {str(other): {"IPv4": seen()} for other in range(3) if other != number}, **more,
    }  # fmt: skip


def judge_hosts(*hosts: dict[str, Any]) -> Finding:
    (network,) = judge(judge_network, THREE_HOSTS, *hosts)
    return network


def test_a_good_network() -> None:
    assert judge_hosts(host(0), host(1), host(2)).found == (
        "all hosts reach each other by IPv4 over eth0, MTU 1500, a round trip takes 100 us to 100 us"
    )
    assert only(judge(judge_network, ALONE, None), "pass").found.startswith("one host")


def test_a_bad_network() -> None:
    blocked = host(0)
    blocked["seen"]["1"]["IPv4"] = seen(problem="Connection refused", at="connect")
    network = judge_hosts(blocked, host(1), host(2))
    assert (network.status, network.found) == ("fail", "a cannot reach b at 10.0.0.1 (eth0): Connection refused")
    assert "firewall" in network.advice
    swallowed = host(2)
    swallowed["seen"]["0"]["IPv4"] = seen(problem="timed out", at="large")
    network = judge_hosts(host(0), host(1), swallowed)
    assert (network.status, "MTU" in network.advice) == ("fail", True)
    assert network.found == "only small packets get from c to a at 10.0.0.0 (eth0) and back (timed out)"
    assert judge_hosts(host(0), host(1, mtu=9000), host(2)).status == "warn"
    assert "9000 on b" in judge_hosts(host(0), host(1, mtu=9000), host(2)).found
    lost = judge_hosts(host(0), host(1, is_lost=True, own_name="127.0.1.1"), host(2))
    assert lost.status == "fail"
    assert "no interface is set on b, where the host's own name resolves to 127.0.1.1" in lost.found
    assert "export GLOO_SOCKET_IFNAME=eth0" in lost.advice
    both = [host(number, IPv6=f"fd::{number}") for number in range(3)]
    for one in both:
        for pings in one["seen"].values():
            pings["IPv6"] = seen()
    assert "by IPv4 and IPv6" in judge_hosts(*both).found
    both[0]["seen"]["2"]["IPv6"] = seen(problem="No route to host", at="connect")
    network = judge_hosts(*both)
    assert (network.status, network.found) == ("warn", "a cannot reach c at fd::2 (eth0): No route to host")


def test_a_ping_through_a_socket() -> None:
    echo = Echo()
    try:
        found = ping("127.0.0.1", echo.port, echo.token)
        assert found["problem"] == ""
        assert 0 < found["rtt_s"] < 1
        refused = ping("127.0.0.1", echo.port, b"x" * 16)
        assert refused["problem"]
        assert refused["rtt_s"] is None, "it gets no answer"
    finally:
        echo.close()
    assert ping("127.0.0.1", echo.port, echo.token)["problem"] == "Connection refused"


# --- the directory ----------------------------------------------------------------------------------------------------


def disk(writer: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "wanted": "runs", "place": "/home/runs", "problem": "", "writer": writer, "free_bytes": 100 * GB,
        "write_bytes_per_s": 500e6, "fsync_s": 0.002, **more,
    }  # fmt: skip


def test_directories() -> None:
    found = only(judge(judge_disk, THREE_HOSTS, disk(), disk(), disk()), "pass").found
    assert found == "runs is one for all hosts, 100 GB left, takes 500 MB/s, fsync 2 ms"
    own = only(judge(judge_disk, THREE_HOSTS, disk(), disk(), disk(2)), "warn")
    assert own.found == "runs on c differs from that on a: a run keeps a copy on each such host"
    full = only(judge(judge_disk, ALONE, disk(free_bytes=GB // 2)), "fail")
    assert full.found == "512 MB are left at /home/runs on a"
    assert only(judge(judge_disk, ALONE, disk(free_bytes=5 * GB)), "warn")
    slow = only(judge(judge_disk, ALONE, disk(write_bytes_per_s=10e6)), "warn")
    assert slow.found == "/home/runs on a takes 10 MB/s: a snapshot of 1 GB takes 100 s"
    assert "needs 250 ms" in only(judge(judge_disk, ALONE, disk(fsync_s=0.25)), "warn").found
    shut = only(judge(judge_disk, ALONE, disk(problem="Permission denied")), "fail")
    assert shut.found == "/home/runs cannot be written on a (Permission denied)"


def test_a_directory_is_measured(tmp_path: Path) -> None:
    assert find_existing(tmp_path / "a" / "b") == tmp_path
    with TemporaryFile(dir=tmp_path, buffering=0) as file:
        measured = measure_speed(file, 1 << 20)
    assert measured["write_bytes_per_s"] > 0
    assert 0 < measured["fsync_s"] < 60


def test_a_url(tmp_path: Path) -> None:
    """A URL is not used as a local path: the store is checked, and the disk of the working copy measured."""
    words = ["doctor", "--device", "cpu", "--json", "--run-dir"]
    copy = f"the working copy of file://{tmp_path}/runs, in {tmp_path}"
    for url, found in [
        (f"file://{tmp_path}/runs", f"{copy}(: | on )"),  # on: a warning of a slow disk
        ("nowhere://bucket/run", "nowhere://bucket/run cannot be written on .*Protocol not known: nowhere"),
    ]:
        env = {"SAMESTEP_LOCAL_DIR": str(tmp_path / "copies")}
        done = run_command(sys.executable, "-m", "samestep", *words, url, cwd=tmp_path, env=env)
        findings = [each["found"] for each in json.loads(done.stdout)["findings"] if each["check"] == "run_dir"]
        assert findings
        assert all(re.match(found, each) for each in findings), findings
        assert done.returncode == (0 if found.startswith("the") else 1)
    assert list(tmp_path.iterdir()) == []


# --- collectives ------------------------------------------------------------------------------------------------------


def told(links: Any = (), wrong: Any = ()) -> dict[str, Any]:
    rows = [
        {"bytes": 1024, "time_s": 1e-4, "bus_bytes_per_s": 1e7},
        {"bytes": 1 << 20, "time_s": 1e-3, "bus_bytes_per_s": 1e9},
    ]
    return {"wrong": list(wrong), "curves": {"all-reduce": rows}, "links": list(links), "device": "cpu"}


def link(start: int, end: int, bytes_per_s: float) -> dict[str, Any]:
    return {"from": start, "to": end, "bytes_per_s": bytes_per_s, "latency_s": 1e-4}


def test_collectives() -> None:
    assert only(judge(judge_collectives, ALONE, None), "pass").found.startswith("one rank: nothing to exchange")
    assert only(judge(judge_collectives, TWO_RANKS, told(), told()), "pass").found == (
        "right, over gloo; all-reduce 100 us at 1 KB, 1 GB/s at 1 MB (bus bandwidth)"
    )
    sentence = "1 of 3 numbers of an all-reduce are wrong"
    wrong = only(judge(judge_collectives, TWO_RANKS, told(), told(wrong=[sentence])), "fail")
    assert wrong.found == f"{sentence}: rank 1 (a)"


def test_links() -> None:
    pairs = [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]
    even = told(link(*pair, 1e9 + pair[0] * 1e8) for pair in pairs)
    assert only(judge(judge_links, THREE_HOSTS, even), "pass").found.endswith("slowest: a -> b, 1 GB/s")
    slow = only(
        judge(judge_links, THREE_HOSTS, told(link(*pair, 12e6 if pair[0] == 1 else 1e9) for pair in pairs)), "warn"
    )
    assert slow.found == "the slowest link is b -> a, 12 MB/s; and b -> c, 12 MB/s; the median is 1 GB/s"
    assert "switch port of b" in slow.advice
    busy = [link(*pair, {1: 12e6, 2: 4e8}.get(pair[0], 1e9)) for pair in pairs]
    assert "switch port of b" in only(judge(judge_links, THREE_HOSTS, told(busy)), "warn").advice
    spread = [link(*pair, 12e6 if pair in {(0, 1), (1, 0), (2, 0)} else 1e9) for pair in pairs]
    assert "switch port of a" in only(judge(judge_links, THREE_HOSTS, told(spread)), "warn").advice
    unclear = [link(*pair, 12e6 if pair in {(0, 1), (1, 2), (2, 0)} else 1e9) for pair in pairs]
    assert "switch port (ethtool" in only(judge(judge_links, THREE_HOSTS, told(unclear)), "warn").advice
    two = only(judge(judge_links, TWO_HOSTS, told([link(0, 1, 1e9), link(1, 0, 12e6)])), "warn")
    assert two.found == "the slowest link is b -> a, 12 MB/s; the median is 1 GB/s"
    assert judge(judge_links, ALONE, told()) == []


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 7, 16])
def test_every_pair_meets_once(num_nodes: int) -> None:
    rounds = plan_rounds(num_nodes)
    pairs = [pair for one in rounds for pair in one]
    assert sorted(pairs) == [(a, b) for a in range(num_nodes) for b in range(a + 1, num_nodes)]
    for one in rounds:
        nodes = [node for pair in one for node in pair]
        assert len(nodes) == len(set(nodes))


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    factors = {operation.name: operation.factor(4) for operation in OPERATIONS}
    assert factors == {"all-reduce": 1.5, "all-gather": 0.75, "all-to-all": 0.75}


# --- the data loader --------------------------------------------------------------------------------------------------


def fed(loading_s: float, model_s: float = 1.0, num_workers: int = 0, **more: Any) -> dict[str, Any]:
    rank = {"num_steps": 9, "num_samples": 1000, "num_workers": num_workers, "loading_s": loading_s, "model_s": model_s}
    return {"script": "train.py", "code": 0, "ranks": [rank], "last_words": ["  bye"], "num_cores": 8, **more}


def test_the_loader_against_the_model() -> None:
    slow = only(judge(judge_data_loading, ALONE, fed(1.25, 0.2)), "warn")
    assert (
        slow.found
        == "the data loader delivers 800 samples/s, the model uses 5,000: 86% of a step goes to waiting for data"
    )
    assert slow.advice == "give it workers: run.epochs(..., num_workers=7)"
    too_slow = only(judge(judge_data_loading, ALONE, fed(4.0, 0.2)), "warn")
    assert too_slow.advice.endswith("num_workers=7) (8 cores have no room for the 20 it would take)")
    assert "leave none free to load" in only(judge(judge_data_loading, ALONE, fed(1.0, num_cores=1)), "warn").advice
    more = only(judge(judge_data_loading, ALONE, fed(1.0, num_workers=2)), "warn")
    assert more.found.startswith("the data loader delivers 500 samples/s, the model uses 1,000: 50%")
    assert more.advice == "give it workers: run.epochs(..., num_workers=5, not 2)"
    assert "keeps up" in only(judge(judge_data_loading, ALONE, fed(0.01)), "pass").found
    nothing = only(judge(judge_data_loading, ALONE, fed(0) | {"ranks": [None], "code": 1}), "fail")
    assert nothing.found == "train.py ended with exit code 1, before it had done 5 steps: bye"
    assert only(judge(judge_data_loading, ALONE, fed(0) | {"ranks": [None]}), "warn")


def test_paces_are_those_of_the_later_steps() -> None:
    def line(step: int, loading_s: float, forward_s: float) -> dict[str, Any]:
        spent = {"loading": loading_s, "forward": forward_s, "saving": 100.0 * step}
        return {"step": step, "at_s": float(step), "spent_s": spent, "num_samples": 8, "num_workers": 2}

    lines = [line(0, 9.0, 50.0), line(1, 9.1, 50.5), line(2, 9.2, 51.0), line(3, 10.0, 60.0), line(4, 11.0, 62.0)]
    assert measure_rank(lines[:4]) is None
    assert measure_rank([*lines, line(5, 12.0, 64.0)]) == {
        "num_steps": 2, "num_samples": 16, "num_workers": 2, "loading_s": 2.0, "model_s": 4.0,
    }  # fmt: skip


SCRIPT = """
import time
import torch
import samestep

class Data:
    def __len__(self):
        return 120

    def __getitem__(self, index):
        time.sleep({seconds})
        return torch.ones(4) * index

run = samestep.Run("runs/mine", batch_size=4, micro_batch_size=1, device="cpu")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-9)
run.prepare(model=model, optimizer=optimizer)
for epoch in run.epochs(Data(), 1):
    for step in epoch:
        for x in step:
            step.backward(model(x).mean())
        optimizer.step()
"""


# --- real ranks -------------------------------------------------------------------------------------------------------

ALL = ["versions", "devices", "memory", "network", "run_dir", "collectives"]


def test_alone_with_a_script_whose_loader_is_slow(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(seconds=0.01))
    done = check(samestep_command("doctor", "--device", "cpu", "--script", "train.py", cwd=tmp_path))
    head, *lines, end = done.stdout.splitlines()
    assert head.startswith("samestep doctor: 1 rank on ")
    checks = [line.split()[:2] for line in lines if line[:8].strip()]
    assert list(dict.fromkeys(name for _, name in checks)) == [*ALL, "loader"]
    assert {status for status, _ in checks} <= {"pass", "warn"}
    found = re.search(r"warn  loader        the data loader delivers (\d+) samples/s, the model uses", done.stdout)
    assert found is not None
    assert 0 < int(found[1]) <= 100, "10 ms for each"
    assert re.search(r"\d warnings?, \d passed, in \d+.\d s", end)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "the run's directory is unchanged"


def test_two_ranks(tmp_path: Path) -> None:
    done = check(samestep_command("doctor", "--nproc-per-node", "2", "--device", "cpu", "--json", cwd=tmp_path))
    record = json.loads(done.stdout)
    assert (record["world_size"], len(record["hosts"])) == (2, 1)
    assert record["seconds"] < sum(check.limit_s or 0.0 for check in CHECKS)
    assert record["status"] in ("pass", "warn"), done.stdout  # other programs may use this machine
    assert list(dict.fromkeys(finding["check"] for finding in record["findings"])) == ALL
    curves = record["findings"][-1]["measured"]["curves"]
    assert list(curves) == ["all-reduce", "all-gather", "all-to-all"]
    for name, rows in curves.items():
        assert rows[0]["bytes"] == 1024, name
        assert [row["bytes"] for row in rows] == sorted(row["bytes"] for row in rows)
        assert all(row["time_s"] > 0 and row["bus_bytes_per_s"] > 0 for row in rows)
    assert not list(tmp_path.iterdir())


def test_planted_faults_are_named(tmp_path: Path) -> None:
    """Under samestep launch: another version, a check that raises, one that hangs, and a wrong sum."""
    plants = [("version", "1"), ("raise", "0"), ("hang", "1"), ("wrong", "1")]
    words = [word for plant in plants for word in ("--plant", *plant)]
    done = samestep_command("launch", "--nproc-per-node", "2", DOCTORED, *words, "--json", cwd=tmp_path)
    check(done, 1)
    assert "Traceback" not in done.stdout + done.stderr
    record = json.loads(done.stdout)
    assert record["status"] == "fail"
    name = record["hosts"][0]
    failures = {finding["found"] for finding in record["findings"] if finding["status"] == "fail"}
    assert failures >= {
        f"could not be checked on rank 0 ({name}): PermissionError: [Errno 13] it is forbidden",
        f"could not be checked on rank 1 ({name}): it hung in a call that does not return, and was abandoned after 2 s",
    }
    assert any(f"torch is 2.0.1 on rank 1 ({name}), and " in found for found in failures)
    assert any(found.endswith(f"numbers of an all-reduce are wrong: rank 1 ({name})") for found in failures)
    assert len(failures) == 4


def test_a_rank_that_hangs_in_the_group(tmp_path: Path) -> None:
    words = ["--plant", "hang-in-group", "1"]
    done = samestep_command("launch", "--nproc-per-node", "2", DOCTORED, *words, "--json", cwd=tmp_path)
    check(done, 1)
    record = json.loads(done.stdout)
    failures = [finding["found"] for finding in record["findings"] if finding["status"] == "fail"]
    which = f"could not be checked on rank 1 ({record['hosts'][0]})"
    assert f"{which}: it hung in a call that does not return, and was abandoned after 2 s" in failures
    assert {finding["check"] for finding in record["findings"] if finding["status"] == "fail"} == {"collectives"}


@pytest.mark.soak
def test_under_torchrun(tmp_path: Path) -> None:
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "samestep",
        "doctor",
        "--json",
    ]
    env = {"OMP_NUM_THREADS": "1"}
    done = check(run_command(sys.executable, *words, "--run-dir", tmp_path / "runs", cwd=tmp_path, env=env))
    assert json.loads(done.stdout)["world_size"] == 2
    given = run_command(sys.executable, *words, "--nproc-per-node", "2", cwd=tmp_path, env=env)
    assert "--nproc-per-node was given, but a launcher has started the ranks already: leave it out" in given.stderr


@pytest.fixture
def port() -> Iterator[int]:
    with reserve_port() as free:
        yield free


def test_a_rank_that_does_not_come(tmp_path: Path, port: int) -> None:
    """Nothing hangs: the other ranks report it, and a rank that finds no other one reports that."""
    for rank, words in (
        (0, "rank 1 did not come within 1 s"),
        (1, "rank 1 cannot reach the rendezvous store"),
    ):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        script = "import sys; from samestep.tools.doctor import examination as e; e.JOIN_S = 1.0; "
        script += "from samestep.cli import main; sys.exit(main(['doctor']))"
        done = check(run_command(sys.executable, "-c", script, cwd=tmp_path, env=variables), 1)
        assert words in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


# --- bad input --------------------------------------------------------------------------------------------------------


def parse(words: list[str]) -> tuple[DoctorOptions, dict[str, Any]]:
    """Return the options for every rank, and those for starting the ranks."""
    options, starting = run_doctor.make_context("doctor", [*words]).obj
    return options, starting


def test_help_without_torch() -> None:
    script = "import sys; from samestep.cli import main; main(['doctor', '--help']); print('torch' in sys.modules)"
    done = run_command(sys.executable, "-c", script, cwd=Path.cwd(), real=True)
    assert done.stdout.endswith("\nFalse\n"), done.stdout + done.stderr
    for words in ("--nnodes 2 --rdzv-endpoint", "torchrun", "srun", "--script train.py", "Exit code: 0; 1 if"):
        assert words in done.stdout


def test_options_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.touch()
    words = ["--run-dir", "x", "--json", "--num-threads", "2", "--nnodes", "2", "--script", str(script), "--json"]
    options, starting = parse(words)
    assert options == DoctorOptions(json=True, run_dir="x", num_threads=2, script=(str(script), "--json"))
    assert starting == {"nnodes": "2"}
    started: list[Any] = []
    start = "samestep.tools.doctor.run_doctor.start"
    monkeypatch.setattr(start, lambda target, values: started.append((target, values)) or 0)
    assert run_doctor(words) == 0
    ((target, values),) = started
    assert parse(target.arguments[1:]) == (options, {})
    assert values == {"nnodes": "2", "num_threads": 2, "device": None}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jsn"], "doctor has no option --jsn; did you mean --json?"),
        (["here"], "doctor has no option here; see --help"),
        (["--num-threads", "0"], "--num-threads must be a whole number from 1 to"),
        (["--device", "tpu"], "--device must be cpu, cuda or one GPU"),
        (["--script"], "doctor needs a script to start"),
        (["--script", "-m"], "doctor needs a module to start"),
        (["--script", "nowhere.py"], "there is no script nowhere.py"),
        (["--device", "cpu", "--nproc-per-node", "gpu"], "contradict each other"),
    ],
)
def test_what_it_refuses(arguments: list[str], words: str) -> None:
    with pytest.raises(Error, match=re.escape(words)):
        parse(arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nproc-per-node", "none"], "--nproc-per-node takes a number, gpu, cpu or auto, not 'none'"),
        (["--nnodes", "2"], "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
    ],
)
def test_what_the_launcher_refuses(arguments: list[str], words: str, tmp_path: Path) -> None:
    assert words in check(samestep_command("doctor", *arguments, cwd=tmp_path), 2).stderr
