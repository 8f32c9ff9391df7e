"""What README and docs tell a person to do is done here: their scripts are written out, their commands run."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 120


def find_blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(page.read_text()) if kind == language]


def find_commands(page: Path) -> Iterator[str]:
    for block in find_blocks(page, "sh"):
        for line in block.splitlines():
            command = line.partition("  #")[0].strip()
            if command and not command.startswith("#"):
                yield command


def run_command(command: str, cwd: Path) -> str:
    """Runs a documented command with this test's interpreter and package, and gives what it printed."""
    bin_dir = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-c", f'export PATH="{bin_dir}:$PATH"; {command}'],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(900)  # a dozen commands, each with a limit of its own
def test_readme_ladder_and_commands(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    for script in find_blocks(page, "python"):
        name = re.match(r"# (\w+\.py)\n", script)
        assert name, f"a script in README without a name: {script[:60]}"
        (tmp_path / name[1]).write_text(script)
    run_command("python single.py", tmp_path)
    digests = []
    for command in find_commands(page):
        if command.startswith("make "):
            continue  # `make train` below; `make test` is what runs this
        output = run_command(command, tmp_path)
        if "--digest" in command:
            digests.append(output.strip())
    assert len(digests) == 3
    assert len(set(digests)) == 1
    assert re.fullmatch("[0-9a-f]{64}", digests[0])


def test_make_train(tmp_path: Path) -> None:
    """With the virtual environment that `make test` has made; elsewhere, what make would do is looked at."""
    made = (ROOT / ".venv" / "installed").exists()
    arguments = f'ARGS="--epochs 1 --run-dir {tmp_path / "run"}"'
    done = subprocess.run(
        ["bash", "-c", f"make {'' if made else '-n'} train {arguments}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert ("validation accuracy" if made else "samestep train digits --nproc-per-node 2") in done.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "README.md" or page.parent != ROOT], ids=str)
def test_other_pages(page: Path, tmp_path: Path) -> None:
    """Other pages' commands run from a copy-free checkout: the repository itself, but nothing is left in it."""
    for command in find_commands(page):
        if command.startswith(("make ", "git ")):
            continue
        run_command(command, ROOT)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_examples_of_pages(page: Path, tmp_path: Path) -> None:
    """Scripts of pages under docs/ that begin with their own name."""
    for script in find_blocks(page, "python"):
        if name := re.match(r"# (\w+\.py)\n", script):
            (tmp_path / name[1]).write_text(script)
            run_command(f"python {name[1]}", tmp_path)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
