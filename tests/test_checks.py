"""docs/checks.md lists each warning. tests/test_errors.py compares the errors with docs/errors.md."""

import ast
import re
from pathlib import Path

from support.source import parse_source

ROOT = Path(__file__).parents[1]


def read_text(node: ast.AST) -> str:
    """The literal parts of a string, and {} for the others."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


# The first test of a process that needs it parses the whole source: 21 s, and 26 s on a busy machine.
def test_each_warning_names_how_to_hide_it() -> None:
    """A filter's message is compared with the beginning, and PYTHONWARNINGS is split at commas and colons."""
    calls = [node for tree in parse_source().values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    warnings = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "warn"]
    starts = {read_text(each.value) for call in warnings for each in call.keywords}
    page = (ROOT / "docs" / "checks.md").read_text()
    rows = re.findall(r"^\| `(.*?)` \|", page.partition("## Errors")[0], re.MULTILINE)
    assert sorted(starts) == sorted(rows)
    assert not any(set(",:") & {*row} for row in rows)
