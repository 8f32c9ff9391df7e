"""The syntax trees of the source, parsed once per process."""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "samestep"


@cache
def parse_source() -> Mapping[str, ast.Module]:
    """Path of each module, relative to the package -> its tree."""
    return {str(file.relative_to(SOURCE)): ast.parse(file.read_text()) for file in sorted(SOURCE.rglob("*.py"))}
