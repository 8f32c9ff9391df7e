"""Which of many cases `make test` runs. `make soak` runs them all."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(n: int, cases: Iterable[Any]) -> list[Any]:
    """Return all cases for `pytest.mark.parametrize`. `make test` runs the first and every n-th after it, `make soak`
    all.
    """
    return [case if i % n == 0 else _leave(case) for i, case in enumerate(cases)]


def _leave(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)
