"""What is released: the site and what its scripts generate, the wheel, the source distribution, and the image."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from support.pages import Page

import samestep

pytestmark = pytest.mark.release
ROOT = Path(__file__).parents[1]
WEBSITE = ROOT / "website"
SCRIPT = """
import json, sys
from pathlib import Path

for number, cell in enumerate(json.loads(Path(sys.argv[1]).read_text())["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), globals())
"""


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WEBSITE))


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# The whole site is built, and every page of it parsed: 49 s, and 92 s on a busy machine.
def test_the_site_has_no_broken_link(tmp_path: Path) -> None:
    run(sys.executable, WEBSITE / "build.py", tmp_path, cwd=tmp_path)
    public = tmp_path / "public"
    pages = {page: Page(page.read_text()) for page in public.rglob("*.html") if page.name != "404.html"}
    anchors = {page: {*content.list_values("id")} for page, content in pages.items()}
    assert len(pages) == len(list((tmp_path / "pages").rglob("*.md")))
    for page, content in pages.items():
        for target in content.list_values("href", "src"):
            url = urlsplit(target)
            if url.scheme or url.netloc or target.startswith("/"):
                assert "samestep" not in target
                continue
            file = (page.parent / unquote(url.path)).resolve() if url.path else page
            file = file / "index.html" if file.is_dir() else file
            assert file.exists(), f"{page.relative_to(public)} links to {target}"
            if url.fragment and file in pages and not url.fragment.startswith("__"):
                assert unquote(url.fragment) in anchors[file], f"{page.relative_to(public)} links to {target}"
    assert "start.md" not in (public / "index.html").read_text()
    found = {item["location"] for item in json.loads((public / "search.json").read_text())["items"]}
    assert any(location.startswith("concepts/") for location in found)


def list_pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for each in (entry.values() if isinstance(entry, dict) else entry) for page in list_pages(each)]


def test_the_navigation_lists_each_page_once() -> None:
    from build import NAMES, name_on_site

    pages = list_pages(tomllib.loads((WEBSITE / "zensical.toml").read_text())["project"]["nav"])
    files = [*NAMES, *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
    assert sorted(pages) == sorted({str(name_on_site(file)) for file in files})


def test_the_pictures_are_current() -> None:
    import pictures

    for name in ("step", "tree", "ledger"):
        drawn = getattr(pictures, f"draw_{name}")()
        assert (pictures.PICTURES / f"{name}.svg").read_text() == drawn, "run python website/pictures.py"


# A new interpreter runs all cells, which train on two ranks: 47 s, and 67 s on a busy machine.
def test_the_notebook_trains_on_two_ranks(tmp_path: Path) -> None:
    from notebook import NOTEBOOK, build_notebook

    assert NOTEBOOK.read_text() == build_notebook(), "run python website/notebook.py"
    assert "resumed at step 40 (was 2 ranks)" in run(sys.executable, "-c", SCRIPT, NOTEBOOK, cwd=tmp_path)


# --- the wheel, the source distribution and the image -----------------------------------------------------------------


TRAIN = """
import samestep, torch

run = samestep.Run("run", batch_size=8, micro_batch_size=4)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model=model, optimizer=optimizer)
for epoch in run.epochs(torch.ones(16, 2), 1):
    for step in epoch:
        for x in step:
            step.backward(model(x).mean())
        optimizer.step()
print(samestep.__file__)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it, as for an index."""
    pytest.importorskip("hatchling", reason="hatchling builds the packages: make .venv/installed-dev")
    directory = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-W", "error", "-m", "hatchling", "build", "--directory", directory]
    said = run(*build, "--target", "sdist", cwd=ROOT)
    (source,) = directory.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(directory, filter="data")
    (unpacked,) = (path for path in directory.iterdir() if path.is_dir())
    said += run(*build, "--target", "wheel", cwd=unpacked)
    (wheel,) = directory.glob("*.whl")
    assert "warn" not in said.lower()
    return source, wheel


def test_the_source_distribution_has_what_its_tests_need(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = run("git", "ls-files", cwd=ROOT).split()
    left_out = {name for name in tracked if not name.startswith(".") and name != "Dockerfile"} - names
    assert not left_out


# A launch and doctor, in new interpreters that import torch: 73 s, and 80 s on a busy machine.
def test_the_wheel_works_in_an_empty_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Its dependencies are those of this environment, found by a path file: torch takes minutes to install."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(packages)
        metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        text = wheel.read(metadata).decode()
    assert re.search(rf"^Version: {re.escape(samestep.__version__)}$", text, re.M)
    (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    (tmp_path / "train.py").write_text(TRAIN)
    said = run(python, "-m", "samestep", "launch", "--nproc-per-node", "2", "train.py", cwd=tmp_path)
    assert str(packages / "samestep") in said
    assert "pass" in run(python, "-m", "samestep", "doctor", "--run-dir", tmp_path / "runs", cwd=tmp_path)


def test_all_files_name_one_version() -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert cited[1] == newest[1] == samestep.__version__
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


# --- the image to train in --------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_image_runs() -> None:
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker engine")
    subprocess.run(["docker", "build", "-q", "-t", "samestep-test", ROOT], check=True)
    start = ["docker", "run", "--rm"]
    assert run(*start, "samestep-test", "--version", cwd=ROOT).startswith("samestep ")
    assert int(run(*start, "--entrypoint", "id", "samestep-test", "-u", cwd=ROOT)) > 0, "it runs as root"
