"""The documentation site, and what its scripts generate."""

import json
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

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


class Links(HTMLParser):
    """The targets and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of_tag = dict(attrs)
        self.targets += [each for name in ("href", "src") if (each := of_tag.get(name))]
        if name := of_tag.get("id"):
            self.anchors.add(name)


# The whole site is built, and every page of it parsed: 49 s, and 92 s on a busy machine.
def test_the_site_has_no_broken_link(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, WEBSITE / "build.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    public = tmp_path / "public"
    pages = {page: Links(page.read_text()) for page in public.rglob("*.html") if page.name != "404.html"}
    assert len(pages) == len(list((tmp_path / "pages").rglob("*.md")))
    for page, links in pages.items():
        for target in links.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc or target.startswith("/"):
                assert "samestep" not in target
                continue
            file = (page.parent / unquote(url.path)).resolve() if url.path else page
            file = file / "index.html" if file.is_dir() else file
            assert file.exists(), f"{page.relative_to(public)} links to {target}"
            if url.fragment and file in pages and not url.fragment.startswith("__"):
                assert unquote(url.fragment) in pages[file].anchors, f"{page.relative_to(public)} links to {target}"
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
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, NOTEBOOK], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "resumed at step 40 (was 2 ranks)" in done.stdout + done.stderr
