"""The codes of errors: docs/errors.md has a row for each, a program of error_programs.md causes it, and a code survives
every way in which an error travels. (To the process that has called `spawn`: test_mistakes.py.)
"""

import ast
import copy
import pickle
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest
from support.commands import run_line
from support.runs import clean_variables, run_command
from support.selection import one_in
from support.source import parse_source

from samestep.data.loader import locate_error, pack
from samestep.errors import Error, InvalidValue, MissingPackage, explain
from samestep.launch.rank_reports import MAX_REASON, build_failure
from samestep.snapshot.mirror import Unreachable

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"SS\d{3}")
# Of an error that another process has sent, or that has been found before: not written where it is raised.
PASSED_ON = {"code", "error.code", "end.error_code", "failure.code", "failed.code", "answer.get('code', '')"}
INTRODUCTION, *SECTIONS = re.split(
    r"^### (?=SS)", (ROOT / "tests" / "error_programs.md").read_text(), flags=re.MULTILINE
)
ROW = re.compile(r"^\| (SS\d{3}) \| ([^|]+) \| (.+) \|$", re.MULTILINE)  # code, error, fix


def find_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


PROGRAMS = {each[:5]: each for each in SECTIONS if find_blocks(each, "python|sh")}


def find_codes(trees: Mapping[str, ast.Module]) -> tuple[set[str], list[str]]:
    """All codes that modules write, and the places of errors without a code."""
    bases = {"Error"}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for _ in range(3):  # as deep as they are nested
        bases |= {each.name for each in classes if {ast.unparse(base).split(".")[-1] for base in each.bases} & bases}
    coded = {
        each.name
        for each in classes
        if each.name in bases and any(ast.unparse(line).startswith("code = 'SS") for line in each.body)
    }
    codes = {node.value for tree in trees.values() for node in ast.walk(tree) if is_code(node)}
    missing = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).split(".")[-1]
            if name not in bases - coded and not name.startswith("KINDS["):
                continue
            given = next((each.value for each in node.keywords if each.arg == "code"), None)
            written = given is not None and any(is_code(each) for each in ast.walk(given))
            if given is None or not (written or ast.unparse(given) in PASSED_ON):
                missing.append(f"{path}:{node.lineno}: {ast.unparse(node)[:80]}")
    return codes, missing


def is_code(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(CODE.fullmatch(node.value))


# --- the page ---------------------------------------------------------------------------------------------------------


# The whole source is parsed, and its syntax trees walked several times: 19 s on a busy machine.
def test_each_error_has_a_code_and_each_code_a_row() -> None:
    codes, missing = find_codes(parse_source())
    assert missing == []
    rows = ROW.findall((ROOT / "docs" / "errors.md").read_text())
    assert [code for code, _, _ in rows] == sorted(codes)
    assert all(fix.endswith(".") and not error.endswith(".") for _, error, fix in rows)
    assert [each.splitlines()[0] for each in SECTIONS] == [f"{code}: {error}" for code, error, _ in rows]


@pytest.mark.parametrize("section", [each for each in SECTIONS if each[:5] not in PROGRAMS], ids=lambda text: text[:5])
def test_a_section_without_a_program_names_a_test_that_compares_the_code(section: str) -> None:
    [(name, path)] = re.findall(r"`(test_\w+)`\s+in\s+`(tests/[\w/]+\.py)`", section)
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    tests = {each.name: each for each in nodes if isinstance(each, ast.FunctionDef)}
    assert section[:5] in ast.unparse(tests[name])


@pytest.mark.parametrize("code", one_in(3, PROGRAMS))
def test_programs(code: str, tmp_path: Path) -> None:
    """A section's program ends with exit code 2, and prints the code at the end of its only error."""
    scripts, commands = (find_blocks(PROGRAMS[code], language) for language in ("python", "sh"))
    missing = [name for name in re.findall(r"^import (\w+)$", "".join(scripts), re.MULTILINE) if not find_spec(name)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: make test-adapters runs this")
    for script in find_blocks(INTRODUCTION, "python"):
        (tmp_path / script.splitlines()[0].removeprefix("# ")).write_text(script)
    for script in scripts:
        (tmp_path / "script.py").write_text(script)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    env = clean_variables({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PATH": path})
    for line in (commands[0] if commands else "python script.py").splitlines():
        done = run_line(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    said = re.findall(r"^samestep: error: .*", done.stderr, re.MULTILINE)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(said) == 1, done.stderr
    assert said[0].endswith(f" [{code}]"), said


# --- how a code travels -----------------------------------------------------------------------------------------------


class Mine(Error):
    """Of a script: other arguments, and no code."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} is not {b}")


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
@pytest.mark.parametrize(
    "error", [InvalidValue("a", rank=3, code="SS101"), Unreachable("s3://x", "no"), MissingPackage("b"), Mine(1, 2)]
)
def test_pickling(error: Error, pickler: ModuleType) -> None:
    for other in (pickler.loads(pickler.dumps(error)), copy.copy(error)):
        assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))


def test_from_the_data_set_to_the_rank() -> None:
    """In the rank itself, and in a loader worker. The error's class takes other arguments than a message."""
    error = Unreachable("s3://x", "no")
    for found in (error, pickle.loads(pickle.dumps(pack(error))).error):
        located = locate_error(found, None, 1, "step 2")
        assert (located.code, str(located)) == ("SS416", f"{error}, on rank 1 in step 2")


def test_from_a_rank_to_its_launcher() -> None:
    failure = build_failure(1, Error("x" * 2 * MAX_REASON, code="SS301"), 2)
    assert str(failure).endswith("x [SS301]")
    assert failure.reason == f"{str(failure)[:MAX_REASON]} [SS301]", "it is cut off, the code is not"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PermissionError(13, "Permission denied", "x"), "SS112"),
        (OSError(28, "No space left on device"), "SS113"),
        (OSError(28, "No space left on device", "x"), "SS113"),
    ],
)
def test_errors_of_the_system(error: OSError, code: str) -> None:
    assert explain(error).code == code


# --- warnings ---------------------------------------------------------------------------------------------------------


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


# --- before a run exists ----------------------------------------------------------------------------------------------


WITHOUT = "import sys\nsys.modules['transformers'] = None\nimport samestep.adapters.transformers\n"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["train.py"], "pip install 'samestep[transformers]'"),
        (["-m", "samestep.recipes.gpt", "--data", "missing"], "the token file missing cannot be read"),
    ],
    ids=["adapter", "recipe"],
)
def test_a_sentence_and_no_traceback(command: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITHOUT)
    done = run_command(sys.executable, *command, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("samestep: error: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
