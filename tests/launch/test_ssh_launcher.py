"""`samestep launch --hosts`: launchers on several hosts, started over ssh, behave as one launch."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import MARK, Command
from support.commands import Popen, find_programs
from support.hosts import open_hosts
from support.hosts import why_not as why_no_hosts
from support.selection import one_in
from support.ssh import SshHosts, open_ssh_hosts, why_not
from support.waiting import DEADLINE_S, wait_until

from samestep.errors import Error
from samestep.launch import ssh_launcher as of_hosts
from samestep.launch.ssh_launcher import Host, Sessions, parse_hosts
from samestep.launch.ssh_node import MARK as ANSWER

SEEN = """
import json, os, sys, torch.distributed as dist
dist.init_process_group("gloo")
seen = {name: os.environ.get(name) for name in ("ON_HOST", "RANK", "LOCAL_RANK", "OMP_NUM_THREADS", "SECRET_TOKEN")}
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, {**seen, "argv": sys.argv[1:], "cwd": os.getcwd()})
if dist.get_rank() == 0:
    print(json.dumps(everyone))
dist.destroy_process_group()
"""

# Ends its step and exits after a signal, like a run; rank 1 fails on request.
STOPPABLE = """
import os, signal, sys, time, torch, torch.distributed as dist
told = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda signum, frame: told.append(signum))
dist.init_process_group("gloo")
rank = dist.get_rank()
with open(f"pid{rank}", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"pid{rank}", f"ready{rank}")  # not empty once it is there
stop = torch.zeros(1)
while not stop:
    stop[0] = len(told)
    dist.all_reduce(stop)
    if "fall" in sys.argv and rank == 1:
        raise ValueError("oh no")
    if "deaf" in sys.argv:
        stop[0] = 0
open(f"saved{rank}", "w").write(" ".join(map(str, told)))
"""

# Waits in its second step until a file is there.
TRAINS = """
import os, time, samestep, torch
run = samestep.Run("run", batch_size=4, micro_batch_size=1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.prepare(model=model, optimizer=optimizer)
for step in run.steps(torch.ones(8, 2), 3):
    for x in step:
        if step.number == 1 and not os.path.exists(name := f"ready{run.rank}"):
            open("pid" + name, "w").write(str(os.getpid()))
            os.rename("pid" + name, name)
            while not os.path.exists("go"):
                time.sleep(0.01)
        step.backward(model(x).mean())
    optimizer.step()
"""


@pytest.fixture
def hosts(command: Command, tmp_path: Path) -> Iterator[SshHosts]:
    """Two, a and b; all that runs there has the command's mark."""
    if why_not():
        pytest.skip(why_not())
    with open_ssh_hosts(tmp_path / "ssh", ("a", "b"), {MARK: command.mark}) as opened:
        command.variables["PATH"] = f"{opened.path}:{command.variables['PATH']}"
        command.python = str(find_programs() / "python")
        yield opened


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_two_hosts_are_one_launch(command: Command, hosts: SshHosts, real: bool) -> None:
    """Each host gets its number of ranks, the same directory, all arguments unchanged, and no secrets."""
    if real:
        command.python = sys.executable
    command.write("a dir/seen.py", SEEN)
    command.variables |= {"OMP_NUM_THREADS": "2", "SECRET_TOKEN": "hush"}
    arguments = ["a b", "it's", 'a "quote"', "two\nlines", "$HOME `x` \\ !", "", "-x", "--seed=1", "*", "ü"]
    flags = ["--hosts", "a,b:2", "--nproc-per-node", "1"]
    done = command.run("launch", *flags, "a dir/seen.py", *arguments)
    assert done.returncode == 0, done.stderr
    prefix, found, text = done.stdout.partition("[a] ")
    assert (prefix, found) == ("", "[a] ")
    everyone = json.loads(text)
    places = [(seen["ON_HOST"], seen["RANK"], seen["LOCAL_RANK"]) for seen in everyone]
    assert places == [("a", "0", "0"), ("b", "1", "0"), ("b", "2", "1")]
    for seen in everyone:
        assert (seen["argv"], seen["cwd"]) == (arguments, str(command.directory))
        assert (seen["OMP_NUM_THREADS"], seen["SECRET_TOKEN"]) == ("2", None)
    said = r"\[{}\] samestep: ranks 0 on node 0 \(.*\), 1-2 on node 1 \(.*\)"
    lines = sorted(done.stderr.splitlines())
    assert [bool(re.fullmatch(said.format(name), line)) for name, line in zip("ab", lines, strict=True)] == [True] * 2
    command.assert_nothing_left()


@pytest.mark.parametrize(("signum", "code"), one_in(4, [(signal.SIGTERM, 75), (signal.SIGINT, 130)]))
def test_a_signal_is_passed_on(command: Command, hosts: SshHosts, signum: signal.Signals, code: int) -> None:
    """Once, to all: they end their step, save and leave."""
    command.write("stoppable.py", STOPPABLE)
    launch = command.start("launch", "--hosts", "a,b", "--nproc-per-node=1", "stoppable.py")
    command.wait_for("ready0", "ready1")
    os.killpg(launch.pid, signum)
    assert command.finish(launch).returncode == code
    saved = [(command.directory / f"saved{rank}").read_text() for rank in range(2)]
    assert set(saved) - {""} == {str(int(signum))}, "who hears of it first has all stop"
    command.assert_nothing_left()


def test_a_second_signal_kills(command: Command, hosts: SshHosts) -> None:
    command.write("stoppable.py", STOPPABLE)
    launch = command.start("launch", "--hosts", "a,b", "--nproc-per-node=1", "stoppable.py", "deaf")
    command.wait_for("ready0", "ready1")
    for _ in range(2):
        launch.send_signal(signal.SIGTERM)
        launch.send_signal(signal.SIGINT)
    assert command.finish(launch).returncode in (130, 143)
    command.assert_nothing_left()


@pytest.mark.parametrize("victim", one_in(10, ["command", "rank", "launcher", "watcher", "sshd"]))
def test_nothing_is_left_of_a_launch(command: Command, hosts: SshHosts, victim: str) -> None:
    """Whatever is killed, everything ends on every host, and the command says what it was."""
    is_forked = victim in ("command", "rank")
    if not is_forked:  # a program forked by the command server has other parents
        command.python = sys.executable
    command.write("stoppable.py", STOPPABLE)
    launch = command.start("launch", "--hosts", "a,b", "--nproc-per-node=1", "stoppable.py")
    command.wait_for("ready0", "ready1")
    rank = psutil.Process(int((command.directory / "ready1").read_text()))
    processes = {"command": psutil.Process(launch.pid), "rank": rank}
    if not is_forked:
        _, launcher, watcher, sshd = rank.parents()[:4]
        assert "samestep.launch.ssh_node" in watcher.cmdline()
        assert "sshd" in sshd.name()
        processes |= {"launcher": launcher, "watcher": watcher, "sshd": sshd}
    processes[victim].kill()
    done = command.finish(launch)
    command.assert_nothing_left()
    codes = {"command": [-9], "rank": [137], "launcher": [137, 1], "watcher": [1], "sshd": [1]}
    said = {
        "command": "",
        "rank": "[a] samestep: rank 1 was killed by SIGKILL (out of memory?), on node 1",
        "launcher": "samestep: the launcher on host b was killed by SIGKILL; the others were stopped",
        "watcher": "samestep: the connection to host b was lost",
        "sshd": "samestep: the connection to host b was lost",
    }
    assert said[victim] in done.stderr
    assert done.returncode in codes[victim], done.stderr
    if victim == "command":
        assert all((command.directory / f"saved{rank}").exists() for rank in range(2)), "it could save"


def test_the_failing_rank_is_named_with_its_cause(command: Command, hosts: SshHosts) -> None:
    command.write("stoppable.py", STOPPABLE)
    done = command.run("launch", "--hosts", "a,b", "--nproc-per-node=1", "stoppable.py", "fall")
    assert done.returncode == 1
    assert "[b] ValueError: oh no\n" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "[a] samestep: rank 1 raised ValueError: oh no, on node 1" in done.stderr
    command.assert_nothing_left()


@pytest.mark.parametrize("fault", ["down", "key", "python", "samestep", "directory", "unknown"])
def test_an_unusable_host(command: Command, hosts: SshHosts, fault: str, tmp_path: Path) -> None:
    """One sentence names it, and says why; nothing is started on the others."""
    command.write("touch.py", "open('started', 'w').close()")
    names = "a,b"
    if fault == "down":
        hosts.shut_down("b")
    elif fault == "key":
        (hosts.directory / "client").write_text(
            (hosts.directory / "client").read_text().replace("user_key\n\nHost *", "other_key\n\nHost *")
        )
        hosts.make_key("other_key")
    elif fault == "unknown":
        names = "a,nowhere.invalid"
    elif fault == "python":
        hosts.force("b", "exec /no/such/python3")
    elif fault == "samestep":
        hosts.force("b", f"cd / && exec env -u PYTHONPATH {sys.executable} -S -P -m samestep.launch.ssh_node")
    elif fault == "directory":
        if os.geteuid() != 0:
            pytest.skip("hides a directory by a mount, as root")
        there = f'mount -t tmpfs none {tmp_path} && eval "$SSH_ORIGINAL_COMMAND"'
        hosts.force("b", f"exec unshare -m sh -c {shlex.quote(there)}")
    done = command.run("launch", "--hosts", names, "--nproc-per-node=1", "touch.py")
    said = {
        "down": r"host b cannot be reached \(ssh: connect to host 127\.0\.0\.1 port \d+: Connection refused\): .*",
        "key": r"host b cannot be reached \(.*: Permission denied \(publickey.*\)\.\): .*",
        "python": r"host b has no /.* \(.*/no/such/python3.*\): install the same environment there, .*",
        "samestep": r"host b cannot start samestep \(.*No module named '?samestep'?.*\): .*",
        "directory": r"host b: the directory /.*/here cannot be used there \(No such file or directory\): .*",
        "unknown": r"host nowhere\.invalid cannot be reached \(.*nowhere\.invalid.*\): .*",
    }
    assert re.fullmatch(rf"samestep: error: {said[fault]} \[SS511\]\n", done.stderr), done.stderr
    assert (done.returncode, done.stdout) == (2, "")
    command.assert_nothing_left()
    assert not (command.directory / "started").exists()


@pytest.mark.soak
def test_a_lost_connection(command: Command) -> None:
    """A connection that is lost without a word ends the launcher, too; the run can save."""
    command.write("stoppable.py", STOPPABLE)
    code = "from samestep.launch import ssh_node; ssh_node.SILENT_S = 3.0; ssh_node.main()"
    watcher = Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=command.variables)
    assert watcher.stdin is not None
    arguments = ["launch", "--nproc-per-node=1", "stoppable.py"]
    for line in ({"directory": str(command.directory), "variables": {}, "nonce": "1"}, {"arguments": arguments}):
        watcher.stdin.write(json.dumps(line).encode() + b"\n")
    watcher.stdin.flush()

    def beat() -> bool:
        watcher.stdin.write(b"{}\n")
        watcher.stdin.flush()
        return (command.directory / "ready0").exists()

    wait_until(beat, "it trains, as long as somebody is there")
    assert watcher.wait(DEADLINE_S) == 75
    assert (command.directory / "saved0").read_text() == str(int(signal.SIGTERM))
    watcher.stdin.close()
    watcher.stdout.close()


@pytest.mark.soak  # half a minute
@pytest.mark.parametrize("names", ["b6,c6", "b,c"])
def test_hosts_with_networks_of_their_own(command: Command, tmp_path: Path, names: str) -> None:
    """They meet by the address that ssh has reached the first one by, IPv4 or IPv6, without a name being known to all;
    one whose plug is pulled ends, and so do the others.
    """
    if reason := why_not() or why_no_hosts():
        pytest.skip(reason)
    command.write("stoppable.py", STOPPABLE)
    with open_hosts(3) as (here, *there):
        places = dict(zip(names.split(","), there, strict=True))
        with open_ssh_hosts(tmp_path / "ssh", [*places], {MARK: command.mark}, places) as hosts:
            command.variables["PATH"] = f"{hosts.path}:{command.variables['PATH']}"
            words = ["launch", "--hosts", names, "--nproc-per-node=1", "stoppable.py"]
            launch = command.start(*words, host=here)
            command.wait_for("ready0", "ready1")
            there[1].pull_the_plug()
            done, first = command.finish(launch), next(iter(places))
            assert done.returncode == 1, done.stderr
            assert f"[{first}] samestep: ranks 0 on node 0 (h2), 1 on node 1 (h3)\n" in done.stderr
            assert f"[{first}] samestep: error: node 1 (h3) was lost" in done.stderr
            command.assert_nothing_left()


# Launchers and ranks on three hosts are new interpreters that import torch: 29 s, and 41 s on a busy machine.
def test_the_other_hosts_continue(command: Command, tmp_path: Path) -> None:
    """With --heal, the launcher of one host is killed; all others end with 0."""
    if reason := why_not() or why_no_hosts():
        pytest.skip(reason)
    command.write("trains.py", TRAINS)
    command.python = sys.executable  # a program forked by the command server has other parents
    with open_hosts(3) as (here, *there):
        places = dict(zip("bc", there, strict=True))
        with open_ssh_hosts(tmp_path / "ssh", [*places], {MARK: command.mark}, places) as hosts:
            command.variables["PATH"] = f"{hosts.path}:{command.variables['PATH']}"
            launch = command.start("launch", "--hosts", "b,c", "--heal", "--nproc-per-node=1", "trains.py", host=here)
            command.wait_for("ready0", "ready1")
            rank = psutil.Process(int((command.directory / "ready1").read_text()))
            rank.parents()[1].kill()
            rank.wait(DEADLINE_S)
            command.write("go", "")
            done = command.finish(launch)
            assert done.returncode == 0, done.stderr
            lost = "samestep: the launcher on host c was killed by SIGKILL; the others decide whether they continue\n"
            assert lost in done.stderr
            assert "[b] samestep: rank 1 is gone in step 1: rank 0 continues alone" in done.stdout
            command.assert_nothing_left()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [Host("a")]),
        ("a,user@b,c.example.com:4", [Host("a"), Host("user@b"), Host("c.example.com", "4")]),
        ("[fd00::1]:2,[fd00::2]", [Host("fd00::1", "2"), Host("fd00::2")]),
    ],
)
def test_names_of_hosts(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "a:x", "a:0", "-oProxyCommand=x", "u@-x", "a b", "fd00::1", "a,b,a"])
def test_invalid_host_names(text: str) -> None:
    with pytest.raises(Error, match="--hosts"):
        parse_hosts(text)


@pytest.mark.parametrize("answer", ['{"code": 0}', "{", '0123 {"code": 0}', "[]"])
def test_output_of_ranks_is_not_parsed_as_a_message(
    answer: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(of_hosts, "SSH", ("sh", "-c", f"printf '{ANSWER}{answer}\\n\\033[2Jhallo\\n'"))
    with Sessions([Host("a")], tmp_path, {}) as sessions:
        (session,) = sessions.all
        session.is_started = True
        while not session.has_ended:
            sessions.poll()
    assert (session.code, session.place) == (None, None)
    assert capfd.readouterr().out == f"[a] \\x1esamestep {answer}\n[a] \\x1b[2Jhallo\n"
