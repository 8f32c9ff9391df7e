"""Lines of a script at which a reason may stand, found without running it."""

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

RANK_NAMES = {"rank", "local_rank", "world_size", "get_rank", "get_world_size", "is_main_process"}
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
GENERATORS = {"default_rng", "RandomState", "Generator", "Random", "SystemRandom"}
MAX_NAMED = 4


def find_rank_readers(files: Iterable[str]) -> str:
    """Where a rank or the number of ranks is read, such as "train.py:31 (run.rank)"; "" where nowhere."""
    return _name(files, _reads_rank)


def find_generator_makers(files: Iterable[str], *, unseeded: bool = False) -> str:
    """Where a random generator is made; `unseeded`: only those that begin elsewhere in each process."""
    return _name(files, _makes_unseeded if unseeded else _makes_generator)


def _reads_rank(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in RANK_NAMES and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Constant) and node.value in RANK_VARIABLES


def _makes_generator(node: ast.AST) -> bool:
    return _name_called(node) in GENERATORS


def _makes_unseeded(node: ast.AST) -> bool:
    name = _name_called(node)
    if not isinstance(node, ast.Call) or name not in GENERATORS | {"seed"}:
        return False
    seeds = [word for word in (*node.args, *(keyword.value for keyword in node.keywords)) if not _is_none(word)]
    if name == "Generator":  # numpy's around Philox(), say; torch's own begins at one fixed seed, until its seed()
        return any(isinstance(word, ast.Call) and not word.args and not word.keywords for word in seeds)
    return name == "SystemRandom" or not seeds


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _name_called(node: ast.AST) -> str:
    """What a call calls, without what it is an attribute of; "" for what is no call."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


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
