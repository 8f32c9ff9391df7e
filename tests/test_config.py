"""The declaration of the options, and intervals."""

import inspect
import os
from typing import Any, get_type_hints

import pytest

from samestep import Run
from samestep.config import NO_INTERCEPTORS, OPTIONS, Interval, RunConfig, parse_interval, to_variables
from samestep.errors import Error
from samestep.world.environment import read_overrides


@pytest.mark.parametrize(
    ("text", "every"),
    [
        (10, Interval(10)), ("10", Interval(10)), ("10steps", Interval(10)),
        ("1 step", Interval(1)),
        ("2epochs", Interval(2, "epochs")), ("1epoch", Interval(1, "epochs")), (" 3 epochs ", Interval(3, "epochs")),
        ("30min", Interval(1800, "s")), ("90 s", Interval(90, "s")), ("2h", Interval(7200, "s")),
        (None, None), ("never", None),
    ],
)  # fmt: skip
def test_what_a_person_may_write(text: int | str | None, every: Interval | None) -> None:
    assert parse_interval("snapshot_every", text) == every
    assert every is None or parse_interval("snapshot_every", str(every)) == every


@pytest.mark.parametrize(
    ("every", "due"), [(Interval(4), [4, 8, 12]), (Interval(2, "epochs"), [6, 12]), (Interval(1, "s"), [])]
)
def test_when_an_interval_is_due(every: Interval, due: list[int]) -> None:
    """Epochs have 3 steps."""
    assert [step for step in range(13) if every.is_due(step, None if step % 3 else step // 3)] == due


@pytest.mark.parametrize("text", [0, -1, "0", "", "10minutes", "epochs", "1.5epochs", 2.0, True, "1e3", "٣ x"])
def test_what_a_person_may_not_write(text: object) -> None:
    with pytest.raises(Error, match=r"such as 10, of epochs such as 2epochs, a time such as 30min, or never$"):
        parse_interval("snapshot_every", text)


@pytest.mark.parametrize("text", ["0", "1.5s", "often", "never"])
def test_a_message_names_only_what_the_option_takes(text: str) -> None:
    with pytest.raises(Error, match=f"log_every is '{text}': give") as caught:
        OPTIONS["log_every"].check("log_every", text)
    assert "or never" not in str(caught.value)


def test_run_takes_every_option_of_a_script_and_its_defaults_are_allowed() -> None:
    taken = inspect.signature(Run.__init__).parameters
    arguments = {name for name in OPTIONS if not hasattr(RunConfig, name)}
    assert arguments | {"self", "config"} == set(taken)
    for name in arguments - {"run_dir", "batch_size", "micro_batch_size"}:
        OPTIONS[name].check(name, taken[name].default)


def test_no_interceptor_of_an_option_is_installed_beside_a_tool() -> None:
    assert NO_INTERCEPTORS
    assert all(not OPTIONS[name].check(name, value) for name, value in NO_INTERCEPTORS.items())


def test_options_travel_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    samples: dict[type, Any] = {str: "x", int: 7, bool: True}
    given = {name: samples[option.type] for name, option in OPTIONS.items()}
    variables = to_variables(given)
    assert set(variables) == {f"SAMESTEP_{name.upper()}" for name in OPTIONS}
    monkeypatch.setattr(os, "environ", variables)
    assert read_overrides() == given
    assert to_variables({"seed": None}) == {}
    assert set(get_type_hints(RunConfig)) == set(OPTIONS)
