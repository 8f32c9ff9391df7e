"""Which of many cases `make test` runs. `make soak` runs them all."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(n: int, cases: Iterable[Any]) -> list[Any]:
    """All cases, for `pytest.mark.parametrize`; those but every n-th, from the first on, are left to `make soak`."""
    return [case if i % n == 0 else _leave(case) for i, case in enumerate(cases)]


def _leave(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)
