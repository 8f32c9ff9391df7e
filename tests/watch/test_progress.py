"""The progress display: which lines it prints, and when."""

from collections.abc import Callable

import pytest

from samestep.watch import progress
from samestep.watch.progress import Progress


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
