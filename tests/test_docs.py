"""Every script and command of README and docs/ is run."""

import doctest
import inspect
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from reference import INTERNAL, build_options, build_reference
from support import commands
from support.commands import run_line
from support.runs import refuse

import samestep
from samestep.world.environment import SECRET, START_AGAIN

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
USED = (ROOT, ROOT / "docs", ROOT / "docs" / "recipes")  # whose pages are about using samestep
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 120
DOCS = ROOT / "docs"
SHORTENED = ("README.md", "run-directories.md", "report.md", "start.md")  # runs of 320 steps: they end after FEW_STEPS
FEW_STEPS = 70  # more than an epoch of 64
LONG = ("coming-from.md", "ray.md")  # the recipes' pages, too: the tests of recipes and adapters run the same code


def find_blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(page.read_text()) if kind == language]


def find_commands(page: Path) -> Iterator[str]:
    """Each line is a command. From one in the background on, the lines of a block are one command."""
    for block in find_blocks(page, "sh"):
        lines = [line.partition("  #")[0].strip() for line in block.splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        first = next((i for i, line in enumerate(lines) if line.endswith(" &")), len(lines))
        yield from lines[:first]
        if lines[first:]:
            yield "\n".join(lines[first:])


def run_command(command: str, cwd: Path) -> str:
    """Run a documented command with this test's interpreter and package. Returns its output."""
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = run_line(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def apply_diff(diff: str, side: str) -> str:
    """The text before (`-`) or after (`+`) a diff."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in (" ", side))


def write_scripts(page: Path, directory: Path) -> tuple[list[str], dict[str, set[str]]]:
    """Write the scripts of a page into a directory, under the names in their first lines. Returns those that can run,
    and those that cannot, each with the trainers that it imports and that are not installed.
    """
    names, left_out = [], {}
    for script in [*find_blocks(page, "python"), *(apply_diff(each, "+") for each in find_blocks(page, "diff"))]:
        name = re.match(r"# (\w+\.py)\n", script)
        assert name, f"a script in {page.name} without a name: {script[:60]}"
        (directory / name[1]).write_text(script)
        trainers = re.findall(
            r"^from (?:samestep.adapters.)?(accelerate|transformers|lightning|datasets) import", script, re.M
        )
        trainers += re.findall(r"^import (lightning|ray)\b", script, re.M)
        missing = {trainer for trainer in trainers if not find_spec(trainer)}
        if missing:
            left_out[name[1]] = missing
        else:
            names.append(name[1])
    return names, left_out


@pytest.mark.timeout(900)  # a dozen commands, each with its own limit
@pytest.mark.parametrize(
    "page",
    [
        ROOT / "README.md",
        *(
            pytest.param(page, marks=[pytest.mark.soak if page.name in LONG else pytest.mark.release])
            for page in sorted(DOCS.glob("*.md"))
            if page.name != "errors.md"  # its programs fail: see test_errors.py
        ),
        *(pytest.param(page, marks=pytest.mark.soak) for page in sorted((DOCS / "recipes").glob("*.md"))),
    ],
    ids=lambda page: page.name,
)
# A page has up to 25 commands, each a launch of its own: 18 s for the README, and over a minute on a busy machine.
def test_pages(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the scripts and commands of a page in its order. A script that no command names is run first."""
    if page.name in SHORTENED:
        monkeypatch.setenv("SAMESTEP_MAX_STEPS", str(FEW_STEPS))
    shutil.copy(DOCS / "train.py", tmp_path)  # for pages without a `train.py` of their own
    scripts, left_out = write_scripts(page, tmp_path)
    if page.parent == ROOT:
        (tmp_path / "docs").symlink_to(DOCS)
    commands = [command for command in find_commands(page) if not command.startswith(("make ", "source "))]
    commands[:0] = [f"python {script}" for script in scripts if not any(script in command for command in commands)]
    digests = []
    for command in commands:
        output = run_command(command, tmp_path)
        if "--digest" in command:
            digests.append(output.strip())
    assert len(set(digests)) <= 1
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert len(digests) == 3 or page.name != "README.md"
    if left_out:
        words = [f"{name} (needs {', '.join(sorted(missing))})" for name, missing in left_out.items()]
        pytest.skip(f"all of {page.name} ran but {', '.join(words)}: make test-adapters runs them")


# Two starts of the README's script, in new interpreters that import torch: 15 s, and 22 s on a busy machine.
def test_the_script_of_the_readme_survives_a_second_start(tmp_path: Path) -> None:
    """Its loop has no step left then, so that `epoch` and `step` are not set after it."""
    write_scripts(ROOT / "README.md", tmp_path)
    said = [run_command("python train.py", tmp_path) for _ in range(2)]
    assert "nothing left to do" in said[1]
    assert "steps       320\n" in said[0]


def test_the_script_after_the_diff_of_the_readme_is_a_file() -> None:
    assert (DOCS / "train.py").read_text() == apply_diff(find_blocks(ROOT / "README.md", "diff")[0], "+")


def test_the_script_before_the_diff_of_the_readme_trains(tmp_path: Path) -> None:
    (tmp_path / "single.py").write_text(apply_diff(find_blocks(ROOT / "README.md", "diff")[0], "-"))
    run_command("python single.py", tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(
    "script",
    [
        "averaged.py",
        "penalty.py",
        "memory.py",
        "curriculum.py",
        "contrastive.py",
        "grpo.py",
        "actnorm.py",
    ],
)
def test_techniques_are_the_same_on_two_ranks(script: str, tmp_path: Path) -> None:
    write_scripts(DOCS / "techniques.md", tmp_path)
    run_dir = f"runs/{script.removesuffix('.py')}"
    ends = []
    for num_ranks in (1, 2):
        output = run_command(f"samestep launch --nproc-per-node {num_ranks} {script}", tmp_path)
        digest = run_command(f"samestep inspect {run_dir} --digest", tmp_path)
        ends.append((digest, re.findall(r"loss of the averaged weights: .*", output)))
        (tmp_path / run_dir).rename(tmp_path / f"{num_ranks}")
    assert ends[0] == ends[1]
    assert len(ends[0][1]) == (script == "averaged.py")


@pytest.mark.release
def test_make_train(tmp_path: Path) -> None:
    """Run it in the virtual environment of `make test`, if there is one; else compare the commands of make."""
    made = (ROOT / ".venv" / "installed").exists()
    arguments = f'ARGS="--epochs 1 --run-dir {tmp_path / "run"}"'
    done = subprocess.run(
        ["bash", "-c", f"make {'-o .venv/installed' if made else '-n'} train {arguments}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert ("validation accuracy" if made else "samestep train digits --nproc-per-node 2") in done.stdout
    if made:
        done = subprocess.run([ROOT / ".venv" / "bin" / "samestep", "--version"], capture_output=True, text=True)
        assert done.stdout == f"samestep {samestep.__version__}\n"


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent not in USED], ids=str)
def test_pages_about_the_source(page: Path) -> None:
    """Their commands run in the repository."""
    for command in find_commands(page):
        if not command.startswith(("make ", "git ")):
            run_command(command, ROOT)


def test_the_generated_pages_are_those_of_the_source() -> None:
    for page, text in (("options.md", build_options()), ("reference.md", build_reference())):
        assert (DOCS / page).read_text() == text, "run python tests/reference.py"


def read_docstrings(module: str) -> dict[str, str]:
    """Those of all public objects of a module, and of the public methods of samestep's classes, by name."""
    public = import_module(module)
    things = {name: getattr(public, name) for name in public.__all__ if name != "__version__"}
    for name, thing in [*things.items()] if public is samestep else ():
        for method, member in vars(thing).items() if inspect.isclass(thing) else ():
            is_public = not method.startswith("_") and method not in INTERNAL.get(name, ())
            if is_public and (inspect.isfunction(member) or isinstance(member, property)):
                things[f"{name}.{method}"] = member
    return {name: doc for name, thing in things.items() if (doc := inspect.getdoc(thing))}


def find_examples(docstrings: dict[str, str]) -> dict[str, str]:
    """The examples, by name. A docstring without one must refer to one, which must use its name."""
    examples = {name: doc.partition("Example::")[2] for name, doc in docstrings.items() if "Example::" in doc}
    for name in docstrings.keys() - examples.keys():
        reference = re.search(r"Example: see `([\w.]+)`\.$", docstrings[name])
        assert reference, f"the docstring of {name} has no Example::"
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", examples[reference[1]]), f"the example does not use {name}"
    return examples


class Checker(doctest.OutputChecker):
    """Accepts any output where an example shows none: a run prints a table at its end."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def run_examples(docstrings: dict[str, str], directory: Path) -> str:
    """The report of the lines whose output differs."""
    report = io.StringIO()
    for name, docstring in docstrings.items():
        (directory / name).mkdir()
        os.chdir(directory / name)
        test = doctest.DocTestParser().get_doctest(docstring, {}, name, None, 0)
        assert test.examples, f"the docstring of {name} has no example that can run"
        doctest.DocTestRunner(Checker(), optionflags=doctest.ELLIPSIS).run(test, out=report.write)
    return report.getvalue()


@pytest.mark.parametrize("module", ["", ".sources", ".adapters.lightning", ".adapters.transformers"])
def test_examples_of_docstrings(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of `spawn` in this process, which has a fork server; a rank would start another one."""
    library = module.partition(".adapters.")[2]
    if library and not find_spec(library):
        pytest.skip(f"{library} is not installed: make test-adapters runs this")
    examples = find_examples(read_docstrings(f"samestep{module}"))
    here = {name: examples.pop(name) for name in ("spawn",) if name in examples}
    monkeypatch.chdir(tmp_path)
    assert samestep.spawn(run_examples, 1, (examples, tmp_path)) == run_examples(here, tmp_path) == ""


def test_links_and_names_of_source_files_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", FENCE.sub("", page.read_text())):  # code has x["y"](z)
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|md))`", page.read_text()):
            assert any((root / name).exists() for root in (ROOT, ROOT / "src" / "samestep")), (
                f"{page.name} names {name}"
            )


def test_names_in_the_guide_for_contributors_exist() -> None:
    source = "".join(path.read_text() for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py"))
    names = re.findall(r"`(?:\w+\.)*([A-Z]\w+|[a-z]+_\w+)[`(]", (ROOT / "CONTRIBUTING.md").read_text())
    assert [name for name in names if not re.search(rf"\b{name}\b", source)] == []


def test_the_script_that_uses_the_whole_public_api_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, whose fork server its `samestep.spawn` uses."""
    script = str(ROOT / "tests" / "scripts" / "typed.py")
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path / "run")])
    runpy.run_path(script, run_name="__main__")
    lines = capfd.readouterr().out.splitlines()
    for line in ("run starts at step 0", "0 2 2 ['error', 'loss', 'norm', 'size']", str(tmp_path / "run"), "done"):
        assert line in lines, lines
    assert lines[-1].startswith("loss ")


def test_launch_accepts_the_command_of_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but its script, which is in the image: launch says that there is none here."""
    (block,) = find_blocks(DOCS / "kubernetes.md", "yaml")
    manifest = yaml.safe_load(block)
    (group,) = manifest["spec"]["replicatedJobs"]
    pods = group["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    words = shlex.split(container["command"][2].partition("exec samestep ")[2].replace("\\\n", ""))
    values = dict(pairwise(words))
    assert int(values["--nnodes"]) == pods["completions"] == pods["parallelism"]
    assert int(values["--nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert values["--node-rank"] == "$JOB_COMPLETION_INDEX", "which Kubernetes sets in each pod"
    assert pods["podFailurePolicy"]["rules"][0]["onExitCodes"] == {"operator": "In", "values": [START_AGAIN]}
    (variable,) = container["env"]
    monkeypatch.setenv(variable["name"], "the pods' secret")
    assert variable["name"] == SECRET
    monkeypatch.chdir(tmp_path)
    replaced = {values["--rdzv-endpoint"]: "127.0.0.1:29400", values["--node-rank"]: "0"}  # what only the cluster knows
    assert "there is no script train.py" in refuse(*(replaced.get(word, word) for word in words))


@pytest.mark.soak
def test_samestep_loses_no_sample_in_the_comparison() -> None:
    """With one kill; the other trainers are not installed here."""
    command = [sys.executable, ROOT / "benchmarks" / "peers" / "compare.py", "--quick", "--forked", "--json"]
    env = os.environ | {"PEERS_STEP_S": "0"}
    done = commands.run(command, env=env, check=True, capture_output=True, text=True)
    (row,) = json.loads(done.stdout)
    assert row["same bits on 1 process"]
    assert row["same bits after the kills"]
    assert (row["steps in the final weights"], row["samples skipped"], row["samples repeated"]) == (100, 0, 0)
    assert row["steps lost"] == 7  # the first snapshot comes later
