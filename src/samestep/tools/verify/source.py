"""Finds lines of a script that may cause a difference, without running it."""

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

RANK_NAMES = {"rank", "local_rank", "world_size", "get_rank", "get_world_size", "is_main_process"}
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
MAX_NAMED = 4


def find_rank_readers(files: Iterable[str]) -> str:
    """Where a rank or the number of ranks is read, such as "train.py:31 (run.rank)"; "" where nowhere."""
    return _name(files, _reads_rank)


def _reads_rank(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in RANK_NAMES and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Constant) and node.value in RANK_VARIABLES


def _name(files: Iterable[str], wanted: Callable[[ast.AST], bool]) -> str:
    found = [place for file in files for place in _search(Path(file), wanted)]
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return ", ".join(found[:MAX_NAMED]) + more


def _search(file: Path, wanted: Callable[[ast.AST], bool]) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text())
    except (OSError, ValueError, SyntaxError):
        return
    for node in ast.walk(tree):
        if wanted(node) and isinstance(node, ast.expr):
            yield f"{file.name}:{node.lineno} ({ast.unparse(node)[:60]})"
