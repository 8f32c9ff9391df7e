"""docs/checks.md lists all checks of a user's program: each error and warning in the source has a row."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.source import parse_source

ROOT = Path(__file__).parents[1]
# What a script's calls, data, models and optimizers go through. Other modules check files, options and hosts.
SCANNED = (
    "checks", "data", "engine", "plan", "snapshot/inspection.py", "snapshot/snapshotter.py",
    "tools/replay/interceptor.py", "train", "world/version_check.py",
)  # fmt: skip
ERRORS = {"Error", "InvalidType", "InvalidValue", "RunDirectoryError", "UsageError"}
# Functions that build a message -> the module that has them.
BUILDERS = {
    "explain_drift": "watch/replica_checksums.py",
    "explain": "data/sample_errors.py",
}
# Variables with a message of another place: that the last snapshot was not written, and what a stuck worker means.
NO_CHECKS = {"failure", "sentence"}


def read_text(node: ast.AST) -> str:
    """The literal parts of a string, and {} for the others."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


@cache
def read_builder(name: str) -> str:
    tree = parse_source()[BUILDERS[name]]
    function = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    return " ".join(read_text(node) for node in ast.walk(function))


def find_messages() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each error, and of the beginning of each warning of any module."""
    for path, tree in parse_source().items():
        is_scanned = any(Path(path).is_relative_to(entry) for entry in SCANNED)
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
                continue
            place, first = f"{path}:{node.lineno}", node.args[0]
            starts = [read_text(each.value) for each in node.keywords if each.arg == "start"]
            if node.func.id == "warn" and starts:
                yield place, starts[0]
            elif not is_scanned or node.func.id not in ERRORS:
                continue
            elif isinstance(first, ast.Call) and isinstance(first.func, ast.Name):
                yield place, read_builder(first.func.id)
            elif not (isinstance(first, ast.Name) and first.id in NO_CHECKS):
                yield place, read_text(first)


def find_printed_explanations() -> list[str]:
    """Find functions whose sentence, if there is one, is printed by `say`: the page does not list these."""
    found = []
    for tree in parse_source().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and any(isinstance(each, ast.NamedExpr) for each in ast.walk(node.test)):
                asked = re.findall(r":= (explain_\w+)\(", ast.unparse(node.test))
                found += [name for name in asked if ast.unparse(node.body[0]) == "say(sentence)"]
    return found


def read_rows() -> set[str]:
    """The quoted parts of messages in the first column of the page's tables."""
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "checks.md").read_text(), re.MULTILINE)
    return {part for row in rows for part in re.findall(r"`` (.+?) ``|`([^`]+)`", row) for part in part if part}


# The first test of a process that needs it parses the whole source: 21 s, and 26 s on a busy machine.
def test_the_page_lists_every_check() -> None:
    messages, rows = [*find_messages()], read_rows()
    assert len(messages) > 100
    assert [f"{place}: {text}" for place, text in messages if not any(row in text for row in rows)] == []
    assert [row for row in rows if not any(row in text for _, text in messages)] == [], "no check has this message"


# The first test of a process that needs it parses the whole source: 21 s, and 26 s on a busy machine.
def test_what_the_page_leaves_out_is_no_check_of_a_script() -> None:
    """A check that is printed by `say`, not by `warn`, would be on no page and could not be hidden."""
    assert find_printed_explanations() == ["explain_torch"], "of what is installed"


# The first test of a process that needs it parses the whole source: 21 s, and 26 s on a busy machine.
def test_each_warning_names_how_to_hide_it() -> None:
    """A filter's message is compared with the beginning, and PYTHONWARNINGS is split at commas and colons."""
    calls = [node for tree in parse_source().values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    warnings = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "warn"]
    starts = {read_text(each.value) for call in warnings for each in call.keywords}
    page = (ROOT / "docs" / "checks.md").read_text()
    rows = re.findall(r"^\| `(.*?)` \|", page.partition("## The loop")[0], re.MULTILINE)
    assert sorted(starts) == sorted(rows)
    assert not any(set(",:") & {*row} for row in rows)
