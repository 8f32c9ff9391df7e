"""What a rank reports: its phases, the state of its main thread, and what `samestep watch` shows of it."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins
from support.runs import check, samestep_command
from support.waiting import DEADLINE_S, wait_until

import samestep
from samestep.decoding import convert, decode
from samestep.tools import inspect
from samestep.tools.inspect import describe_end, format_rows
from samestep.watch import progress
from samestep.watch.beats import EXCHANGES, Beat, PhaseClock, read_process_state
from samestep.watch.diagnosis import RankFacts, build_limits
from samestep.watch.heartbeat import BeatExchange, Heartbeat, Message
from samestep.watch.progress import Progress
from samestep.watch.records import has_ended


class Box:
    """A store in this process, with the beats of several heartbeats."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def put(self, name: str, value: Any) -> None:
        self.texts[name] = json.dumps(to_builtins(value))

    def read(self, names: Sequence[str], kind: type[Any]) -> list[Any] | None:
        return [decode(self.texts[name], kind) for name in names] if {*names} <= {*self.texts} else None


def refuse(*_: Any) -> None:
    raise AssertionError("no test is to be ended")


@contextmanager
def heartbeat(
    rank: int,
    box: Any,
    *,
    world_size: int = 2,
    is_last: bool = True,
    find_dir: Callable[[], Path | None] = lambda: None,
    **more: Any,
) -> Iterator[tuple[PhaseClock, list[str]]]:
    """Build a rank's heartbeat for this thread. Returns its pulse and the lines that it prints."""
    said: list[str] = []
    pulse = PhaseClock()
    limits = replace(build_limits(3), stop_s=1e9)
    facts = RankFacts(rank, range(world_size), "here", limits, said.append, refuse, refuse, refuse, **more)
    beating = Heartbeat(pulse, facts, find_dir, box)
    try:
        yield pulse, said
    finally:
        beating.close(is_last=is_last)


def test_a_disk_that_hangs_does_not_silence_the_leader() -> None:
    def hang() -> None:
        held.wait(DEADLINE_S)

    held = threading.Event()
    with heartbeat(0, Box(), world_size=1, find_dir=hang) as (pulse, said):
        pulse.enter("saving", 4)
        wait_until(lambda: said, "it names the rank that is stuck")
        held.set()
    assert re.match(r"rank 0 \(host here\) has been saving for ", said[0]), said


def test_a_failed_check_is_said_once() -> None:
    calls: list[int] = []

    def fail(rank: int) -> bool:
        calls.append(rank)
        raise KeyError(rank)

    with heartbeat(0, Box(), world_size=1, is_lost=fail) as (_, said):
        wait_until(lambda: len(calls) > 2, "it is checked again")
    assert said == ["the heartbeat's thread 'check' has failed: KeyError: 0"]


def test_an_old_beat_that_is_written_again_is_not_news() -> None:
    """Its signature is right, and anyone who reaches the store can write it, to hide that a rank has died."""
    box, texts = Box(), []
    for _ in range(2):  # two loops of one process
        with heartbeat(0, box, world_size=3):
            wait_until(lambda: "beat/0" in box.texts, "rank 0 tells")
            texts.append(box.texts.pop("beat/0"))
    exchange = BeatExchange(Box(), 1, range(2), 1.0, decode(texts[0], Message))
    for text, newest in ((texts[0], texts[0]), (texts[1], texts[1]), (texts[0], texts[1])):
        exchange.note(decode(text, Message))
        [beat] = exchange.collect(time.monotonic()) or []
        assert beat.number == json.loads(newest)["beat"]["number"]


def test_a_rank_whose_check_does_not_run_is_silent() -> None:
    """Its other threads do not keep it alive: another rank leads."""
    held, box = threading.Event(), Box()
    with heartbeat(1, box) as (_, said), heartbeat(0, box, is_lost=lambda rank: not held.wait(DEADLINE_S)):
        wait_until(lambda: said, "rank 1 leads")
        held.set()
    assert said[0].startswith("nothing was heard of rank 0 (host here) for "), said


# --- the state of a thread ------------------------------------------------------------------------------------------


def test_a_process_that_nobody_has_waited_for_is_dead() -> None:
    child = subprocess.Popen(["true"])
    wait_until(lambda: read_process_state(child.pid) == "dead", "it is a zombie")
    child.wait()


# --- samestep watch ---------------------------------------------------------------------------------------------------


def build_rank(rank: int, **more: Any) -> Beat:
    spent_s = {"starting": 9.0, "loading": 1.0, "forward": 1.0, "backward": 2.0, "reducing": 1.0}
    facts = {"rank": rank, "host": "here", "pid": 1, "number": 9, "step": 130, "phase": "forward", "for_s": 0.1}
    facts |= {"spent_s": spent_s, "num_micro_batches": 100, "age_s": 0.2}
    return convert(facts | more, Beat)


def test_the_table() -> None:
    ranks = [build_rank(0), build_rank(1, phase="reducing", for_s=12.0, waits_in="the reduction")]
    first, second = format_rows(ranks, 4)
    assert first == ("0", "here", "130", "forward", "0 s", "30.0 ms", "80", "")
    assert second == ("1", "here", "130", "reducing", "12 s", "30.0 ms", "80", "waits in the reduction")
    [old] = format_rows([build_rank(2, age_s=1.42)], 4)
    assert (old[4], old[-1]) == ("0 s", "1.4 s ago"), "the rank is further by now"


def test_watching_a_run_that_has_ended(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"format": 1}))
    status = {"status": "failed", "reason": "rank 1: out of memory", "host": "elsewhere", "process": 1}
    (tmp_path / "status.json").write_text(json.dumps(status))
    done = check(samestep_command("watch", tmp_path, cwd=tmp_path))
    assert done.stdout == f"{tmp_path}: failed: rank 1: out of memory\n"
    done = check(samestep_command("watch", tmp_path, "--json", cwd=tmp_path))
    assert json.loads(done.stdout) == {"status": status, "time_s": None, "ranks": []}
    os.utime(tmp_path / "status.json")
    assert not has_ended(tmp_path), "a launcher may start it again"
    os.utime(tmp_path / "status.json", (0, 0))
    assert has_ended(tmp_path)
    (tmp_path / "status.json").write_text(json.dumps({**status, "status": "running"}))
    os.utime(tmp_path / "status.json", (0, 0))
    assert has_ended(tmp_path)
    assert "no heartbeat of the run" in describe_end(tmp_path)


def test_watching_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is shown until the run ends."""
    answers = iter([False, True])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(inspect, "has_ended", lambda run_dir: next(answers))
    monkeypatch.setattr(inspect, "POLL_S", 0.01)
    (tmp_path / "run.json").write_text(json.dumps({"format": 1}))
    (tmp_path / "status.json").write_text(json.dumps({"status": "done"}))
    with heartbeat(0, Box(), world_size=1, find_dir=lambda: tmp_path) as (pulse, _):
        pulse.enter("forward", 5)
        wait_until((tmp_path / "ranks.json").exists, "it is published")
        assert inspect.run_watch([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"^  0 +here +5 +forward +", shown, re.M)) == 2
    assert shown.endswith(f"{tmp_path}: done\n")


@pytest.mark.parametrize("package", ["engine", "world"])
def test_each_module_that_waits_for_other_ranks_is_known(package: str) -> None:
    """A rank that waits in another one would be named as the stuck one."""
    modules = Path(samestep.__file__).parent.joinpath(package).glob("*.py")
    waiting = {str(module) for module in modules if re.search(r"\.wait\(\)|communicate\(", module.read_text())}
    assert waiting
    assert waiting <= {*EXCHANGES}
    assert all(Path(name).exists() for name in EXCHANGES)


# --- the progress display: which lines it prints, and when ------------------------------------------------------------


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances the clock."""
    now = [1000.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


def begin(total_steps: int | None = None, *, has_epochs: bool = False) -> Progress:
    lines = Progress(is_shown=True)
    lines.begin(total_steps=total_steps, has_epochs=has_epochs)
    return lines


def test_a_run(forward: Callable[[float], None], capsys: pytest.CaptureFixture[str]) -> None:
    """The speed counts neither the first step, which compiles, nor validations."""
    lines = begin(130, has_epochs=True)
    lines.print("before")
    lines.log({"initial": 0.5}, 101)
    forward(60.0)
    for number in range(101, 131):
        lines.step(number, 64, number // 36)
        if number == 116:
            lines.log({"validation/accuracy": 0.98123}, number)
        if number % 10 == 0:
            lines.log({"train/loss": 1 / number, "learning rate": 3e-4}, number)
        forward(60.0 if number == 116 else 0.5)
    lines.end({"validation accuracy": 0.98611, "steps": 130, "samples/s": 12345.6, "written to": "runs/[x]"})
    lines.print("in the", "end", "[bold]" + "x" * 200, sep="-")
    assert capsys.readouterr().out.splitlines() == [
        "before",
        "step 101/130  epoch 0  initial 0.5",
        "step 110/130  epoch 3  loss 0.009091  lr 3.00e-04  128 samples/s  eta 10 s",
        "step 116/130  epoch 3  validation/accuracy 0.9812",
        "step 120/130  epoch 3  loss 0.008333  lr 3.00e-04  128 samples/s  eta 5 s",
        "step 130/130  epoch 3  loss 0.007692  lr 3.00e-04  128 samples/s  eta 0 s",
        "validation accuracy  0.9861",
        "steps                130",
        "samples/s            12,346",
        "written to           runs/[x]",
        "in the-end-[bold]" + "x" * 200,
    ]


def test_a_long_run_prints_a_line_a_minute(
    forward: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = begin()
    for number in range(1, 30_001):
        lines.step(number, 32, 0)
        lines.log({"train/loss": 1.0}, number)
        forward(1.0)
    steps = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert steps[:3] == [1, 3, 5]
    assert len(steps) < 900
    assert steps[-1] - steps[-2] == 60


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    silent = Progress(is_shown=False)
    silent.step(1, 32, 0)
    silent.log({"validation/loss": 1.0}, 1)
    silent.print("nothing")
    silent.end({"steps": 3})
    assert capsys.readouterr() == ("", "")
