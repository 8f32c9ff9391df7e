"""When snapshots are due."""

import pytest

from samestep.errors import Error
from samestep.snapshot.policy import Every, parse_every


@pytest.mark.parametrize(
    ("text", "every"),
    [
        (10, Every(steps=10)), ("10", Every(steps=10)), ("10steps", Every(steps=10)), ("1 step", Every(steps=1)),
        ("2epochs", Every(epochs=2)), ("1epoch", Every(epochs=1)), (" 3 epochs ", Every(epochs=3)),
        ("30min", Every(seconds=1800)), ("90 s", Every(seconds=90)), ("2h", Every(seconds=7200)),
        (None, None), ("never", None),
    ],
)  # fmt: skip
def test_what_a_person_may_write(text: int | str | None, every: Every | None) -> None:
    assert parse_every(text) == every


@pytest.mark.parametrize("text", [0, -1, "0", "", "10minutes", "epochs", "1.5epochs", 2.0, True, "1e3", "٣ x"])
def test_what_a_person_may_not_write(text: object) -> None:
    with pytest.raises(Error, match=r"such as 10, one of epochs such as 2epochs, a time such as 30min, or never$"):
        parse_every(text)  # type: ignore[arg-type]


def test_steps_are_due_anywhere() -> None:
    every = Every(steps=3)
    assert [step for step in range(10) if every.is_due(step)] == [3, 6, 9]
    assert every.is_due(6, 2)
    assert not every.is_due(7, 2)


def test_epochs_are_due_at_their_ends() -> None:
    every = Every(epochs=2)
    assert not any(every.is_due(step) for step in range(10))
    assert [epochs for epochs in range(7) if every.is_due(5 * epochs, epochs)] == [2, 4, 6]


def test_a_time_is_not_due_by_what_was_done() -> None:
    assert not any(Every(seconds=1).is_due(step, epochs) for step in range(10) for epochs in (None, 1, 2))
