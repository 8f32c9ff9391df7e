"""Which of many cases `make test` runs. `make soak` runs more."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[Any, ...]


def one_in(n: int, cases: Iterable[Any]) -> list[Any]:
    """Return all cases for `pytest.mark.parametrize`. `make test` runs the first and every n-th after it, `make soak`
    all.
    """
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=[pytest.mark.soak] if i % n else []) for i, row in enumerate(rows)]


def cover(names: Iterable[str], factors: Mapping[str, Sequence[Any]], is_allowed: Callable[..., bool]) -> list[Row]:
    """Return a row for each name, (name, a value of each factor, ...), so that each two values of two factors occur
    together about equally often. `is_allowed` gets a row's values by position.
    """
    counts: Counter[Any] = Counter()
    rows = []

    def count_pairs(row: Row) -> int:
        return sum(counts[pair] for pair in combinations(enumerate(row), 2))

    for name in names:
        possible = [(name, *values) for values in product(*factors.values())]
        row = min((row for row in possible if is_allowed(*row)), key=count_pairs)
        counts.update(combinations(enumerate(row), 2))
        rows.append(row)
    return rows
