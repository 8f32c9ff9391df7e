"""The rules of the source that no linter has: names, and how files are opened.

Layers and cycles of imports are import-linter's; the environment, collectives, JSON, copies of files and private
attributes are ruff's: see pyproject.toml. To change a rule, change it here or there, with the reason.
"""

import ast
import re
from collections.abc import Callable, Iterator

import pytest
from support.source import parse_source

# Files are opened by files.py, which follows no link, blocks on no FIFO, and replaces files atomically.
# Module, or its package with "/" -> why it opens files itself.
OPENS_FILES = {
    "files.py": "it is that place",
    "recipes/": "scripts, as users write them, whose data set is trusted",
    "sources.py": "the data set is trusted, and may be links",
    "data/source.py": "the data set is trusted, and may be links",
    "adapters/": "what the adapted library writes",
    "tools/report.py": "files of this package",
    "world/environment.py": "the null device",
    "launch/forkserver.py": "the null device",
}
FILE_METHODS = ("read_text", "read_bytes", "write_text", "write_bytes")

# The state of an object is written by its own methods, or by the module that defines its class.
# Module, or its package with "/" -> which other objects it writes.
WRITES_ATTRIBUTES = {
    "adapters/": "objects of the adapted library",
    "recipes/": "scripts, as users write them",
    "tools/": "commands, whose records no other module reads",
    "torch_internals.py": "torch's",
    "console.py": "a thread",
    "data/loader.py": "the generator of `random`",
    "launch/rank_process.py": "the module `__main__`",
    "launch/target.py": "click's context",
    "snapshot/serialization.py": "torch's metadata of a state_dict",
    "sources.py": "a tar file, whose list of members would grow",
    "train/determinism.py": "torch's settings",
    "train/stopping.py": "the hook of `sys`",
    "world/environment.py": "a class of os, to recognize who reads it",
}

# Name of several classes -> why.
SHARED_CLASS_NAMES = {
    "Trainer": "as in the libraries that adapters adapt, and in the tutorial of PyTorch that recipes/mlp.py follows",
}

# Part of a name -> what to use instead.
BANNED_NAMES = {
    r"utils?": "a noun that says what is in it",
    r"Manager": "what it is, not that it manages",
    r"Base(?![a-z])\w*": "the thing itself; the plainest one is the base",
    r"iterations?|num_iters?": "step",
    r"sub_?batch|minibatch": "micro_batch",
    r"global_?batch(_size)?|effective_?batch(_size)?": "batch",
}


def name_of(path: str) -> str:
    """The full name of a module, such as "samestep.plan.tree". `__init__.py` has the name of its package."""
    return ".".join(["samestep", *path.removesuffix(".py").removesuffix("__init__").split("/")]).strip(".")


def find_name_faults(path: str, tree: ast.Module) -> Iterator[str]:
    named = [(0, part) for part in name_of(path).split(".")[1:]]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            named.append((node.lineno, node.name))
        elif isinstance(node, ast.arg):
            named.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            named.append((node.lineno, node.id if isinstance(node, ast.Name) else node.attr))
    for line, name in named:
        for banned, instead in BANNED_NAMES.items():
            if re.search(rf"(^|_|(?<=[a-z0-9])(?=[A-Z]))({banned})($|_|(?=[A-Z]))", name):
                yield f"src/samestep/{path}:{line}: {name!r}; call it {instead}"


def find_file_faults(path: str, tree: ast.Module) -> Iterator[str]:
    """Calls that open files without `open_regular`."""
    if any(path.startswith(place) for place in OPENS_FILES):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and opens_file(node):
            yield f"src/samestep/{path}:{node.lineno}: opens a file; use read_bytes or open_regular of files.py"


def opens_file(call: ast.Call) -> bool:
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if isinstance(call.func, ast.Name):
        return call.func.id == "open" and keywords.get("opener") != "open_regular"
    last = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if last == "open":  # of a Path: Image.open and PassAttempt.open take other arguments
        mode = ast.unparse(call.args[0]) if call.args else ""
        return bool(re.fullmatch(r"'[rwax][bt+]*'", mode)) or bool({"mode", "encoding"} & {*keywords})
    return last in FILE_METHODS


def find_write_faults(path: str, tree: ast.Module) -> Iterator[str]:
    """Assignments to attributes of objects whose class another module defines. `.grad` and `.data` are torch's."""
    if any(path.startswith(place) for place in WRITES_ATTRIBUTES):
        return
    own = {"grad", "data", "__cause__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            own.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            own |= {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr not in own:
            yield f"src/samestep/{path}:{node.lineno}: writes {ast.unparse(node)}; add a method to its class"


# The whole source is parsed, and its syntax trees walked: 24 s on a busy machine.
@pytest.mark.parametrize("rule", [find_name_faults, find_file_faults, find_write_faults])
def test_the_source_follows_the_rules(rule: Callable[[str, ast.Module], Iterator[str]]) -> None:
    faults = [fault for path, tree in parse_source().items() for fault in rule(path, tree)]
    assert not faults, "\n".join(faults)


# The first test of a process that needs it parses the whole source: 21 s, and 26 s on a busy machine.
def test_no_two_modules_have_one_name() -> None:
    """Packages, too: tracebacks and tabs of editors show the last part only."""
    names = [name_of(path).rpartition(".")[2] for path in parse_source()]
    assert sorted({name for name in names if names.count(name) > 1}) == []


# The first test of a process that needs it parses the whole source: 21 s, and 26 s on a busy machine.
def test_no_two_classes_have_one_name() -> None:
    """Private ones, too: a search for a class, or its name in a traceback, then leads to one place."""
    places: dict[str, list[str]] = {}
    for path, tree in parse_source().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path)
    assert {name: files for name, files in places.items() if len(files) > 1 and name not in SHARED_CLASS_NAMES} == {}
