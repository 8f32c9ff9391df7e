"""The progress bar on a pseudo-terminal, the plain lines in a pipe, and the arithmetic of both."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Popen, run

from samestep.watch import progress
from samestep.watch.progress import Pace, Progress, build_progress

RUN = """
import threading
from samestep.watch.progress import build_progress
p = build_progress(rank=0)
p.print("before")
p.begin(total_steps=720, done_steps=100, epochs=20)
assert threading.active_count() == 1
for number in range(101, 721):
    p.step(number, 64, number // 36)
    if number % 10 == 0:
        p.log({"train/loss": 1 / number, "learning rate": 3e-4})
    if number == 200:
        p.print("in the", "middle", "[bold]" + "x" * 200, sep="-")
    if number % 360 == 0:
        p.log({"validation/accuracy": 0.98123})
"""
END = """
p.end({"validation accuracy": 0.98611, "steps": 720, "samples/s": 12345.6, "written to": "runs/[x]"})
p.print("after")
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that a test advances."""
    now = [1000.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


def run_on_terminal(*words: str, columns: int = 100, term: str = "xterm") -> tuple[int, str]:
    """Return the exit code, and everything that the terminal received."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        env = {**os.environ, "TERM": term}
        for name in ("COLUMNS", "NO_COLOR"):
            env.pop(name, None)
        process = Popen([sys.executable, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        output = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if not chunk:
                break
            output += chunk
        return process.wait(), output.decode()
    finally:
        os.close(ours)


def run_in_pipe(script: str, *, real: bool = False) -> tuple[int, str]:
    done = run(
        [sys.executable, "-c", script],
        real=real,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def plain(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)


def test_bar_on_a_terminal() -> None:
    code, output = run_on_terminal("-c", RUN + END)
    text = plain(output)
    assert code == 0, text
    bars = [line for line in re.split(r"[\r\n]+", text) if re.match(r"\d+/720", line)]
    assert re.fullmatch(r"720/720  epoch 20  loss 0\.001389  [\d,]+ samples/s  eta 0 s  lr 3\.00e-04", bars[-1])
    for line in (
        "before",
        "in the-middle-[bold]" + "x" * 200,
        "step 360/720  epoch 10  validation/accuracy 0.9812",
        "step 720/720  epoch 20  validation/accuracy 0.9812",
        "after",
    ):
        assert re.search(rf"(^|[\r\n]){re.escape(line)} *\r?\n", text), (line, text)
    for name, value in (
        ("validation accuracy", "0.9861"),
        ("samples/s", "12,346"),
        ("written to", "runs/[x]"),
    ):
        assert re.search(rf"{name} +{re.escape(value)}", text), text
    assert "\x1b[?" not in output, "a killed process would leave the terminal in another mode"
    assert text.index("written to") < text.index("after")


def test_a_launched_rank_draws_its_bar(tmp_path: Path) -> None:
    """Its output is a pipe. It draws on the launcher's terminal, and a hidden rank does not."""
    script = tmp_path / "script.py"
    script.write_text(RUN)
    code, output = run_on_terminal("-m", "samestep", "launch", "--nproc-per-node", "2", str(script))
    assert code == 0, output
    assert output.count(f"{progress.CLEAR}101/720") == 1


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_has_one_line(columns: int) -> None:
    code, output = run_on_terminal("-c", RUN + "p.close()\n", columns=columns)
    assert code == 0
    bars = [line for line in re.split(r"[\r\n]+", plain(output)) if re.match(r"\d+/720", line)]
    assert max(map(len, bars)) <= columns
    assert re.match(r"720/720.* loss 0\.001", bars[-1]), bars[-1]


def test_lines_in_a_pipe() -> None:
    code, output = run_in_pipe(RUN + END)
    assert code == 0, output
    lines = output.splitlines()
    assert "\x1b" not in output
    assert lines[0] == "before"
    assert lines[1].startswith("step 110/720  epoch 3  loss 0.009091  lr 3.00e-04  ")
    assert "in the-middle-[bold]" + "x" * 200 in lines
    assert "step 360/720  epoch 10  validation/accuracy 0.9812" in lines
    last = lines.index("step 720/720  epoch 20  validation/accuracy 0.9812")
    assert re.fullmatch(
        r"step 720/720  epoch 20  loss 0\.001389  lr 3\.00e-04  [\d,]+ samples/s  eta 0 s", lines[last - 1]
    )
    assert lines[last + 1 :] == [
        "validation accuracy  0.9861",
        "steps                720",
        "samples/s            12,346",
        "written to           runs/[x]",
        "after",
    ]
    assert len(lines) < 20, "62 rows at once would be too many lines"


def test_lines_come_every_two_seconds_and_the_last_one_always(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Progress()
    lines.begin(total_steps=None, done_steps=0, epochs=None)
    for number in range(1, 102):
        lines.step(number, 32, 0)
        lines.log({"train/loss": float(number)})
        clock(0.1)
    lines.log({"validation/loss": 1.0}, 102)  # by the script, before the step has ended
    lines.close()
    lines.close()
    said = capsys.readouterr().out.splitlines()
    assert said.pop() == "step 102  validation/loss 1"
    assert [line.split("  ")[0] for line in said] == [f"step {1 + 20 * k}" for k in range(6)]
    assert said[0] == "step 1  loss 1"
    assert said[1] == "step 21  loss 21  320 samples/s"


def test_a_line_has_values_of_one_step(clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]) -> None:
    lines = Progress()
    lines.begin(total_steps=None, done_steps=0, epochs=None)
    for values, number in (({"x": 0.0, "y": 0.0}, 9), ({"z": 1.0}, 10), ({"x": 2.0}, 12), ({"loss": 2.0}, 12)):
        lines.log(values, number)
    lines.close()
    assert capsys.readouterr().out.splitlines() == ["step 9  x 0  y 0", "step 12  x 2  loss 2"]


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    silent = build_progress(rank=1)
    assert type(silent) is Progress
    silent.begin(total_steps=3, done_steps=0, epochs=1)
    silent.step(1, 32, 0)
    silent.log({"validation/loss": 1.0})
    silent.print("nothing")
    silent.end({"steps": 3})
    silent.close()
    assert capsys.readouterr() == ("", "")


def test_pace_does_not_count_the_first_step_nor_those_of_before(clock: Callable[[float], None]) -> None:
    pace = Pace(total_steps=1100, done_steps=1000, epochs=2)
    assert pace.place() == "step 1000/1100"
    clock(60.0)  # it compiles
    pace.step(1001, 32, 1)
    assert pace.texts() == []
    for number in range(1002, 1011):
        clock(0.5)
        pace.step(number, 32, 1)
    clock(30.0)  # it validates
    assert pace.place() == "step 1010/1100  epoch 1"
    assert pace.texts() == ["64 samples/s", "eta 45 s"]


def test_most_steps_only_count(clock: Callable[[float], None]) -> None:
    """The bar is built at intervals of time, not for each step."""
    pace = Pace()
    num_drawn = 0
    for number in range(1, 1001):
        num_drawn += pace.step(number, 32, 0)
        clock(progress.DRAW_EVERY_S / 100)
    assert num_drawn in (10, 11)
