"""Simulated runs from fresh seeds, and from the seeds of failures found before. See docs/dev/simulation.md."""

import sys

import pytest
from support.runs import check, find_tests, run_command

from sim.planted import PLANTED, SOURCE
from sim.scenarios import Scenario, plan


def explore(*arguments: str) -> str:
    """Run explore.py in a process of its own, which it changes. Returns what it prints."""
    command = [sys.executable, "-m", "sim.explore", *arguments]
    env = {"PYTHONHASHSEED": "0", "PYTHONPATH": find_tests()}
    return check(run_command(*command, cwd=SOURCE.parents[1], env=env, timeout=280, real=True)).stdout


def test_random_runs_give_the_run_of_one_rank() -> None:
    print(explore("--minutes", "0.2", "--pinned"))


@pytest.mark.release
def test_a_scenario_reproduces_all_that_happens() -> None:
    """In two processes, before more random runs."""
    again = ("--verbose", "--scenario", "seed=5 script=gan | 3 heal kill@900/1 freeze@1500/0+3 | 2 power@700 | 1")
    once = explore(*again)
    printed = explore(*again, "--minutes", "0.6")
    print(printed)
    assert printed.startswith(once)
    assert once.count(" s  start ") == 3


def test_scenarios_have_a_text_form() -> None:
    for scenario in map(plan, range(200)):
        assert Scenario.parse(str(scenario)) == scenario


def test_each_planted_fault_is_in_the_source() -> None:
    counts = {each.what: (SOURCE / each.file).read_text().count(each.old) for each in PLANTED}
    wrong = {what: count for what, count in counts.items() if count != 1}
    assert not wrong, "adapt the texts in planted.py to the source"
    assert len(counts) == len(PLANTED) >= 40
