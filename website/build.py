"""Build the documentation site: python website/build.py [DIRECTORY]. Needs `pip install ".[docs]"`.

The pages of DIRECTORY/public are complete; the default is website/build. A broken link is an error.
"""

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WEBSITE = ROOT / "website"
sys.path[:0] = [str(ROOT / "tests"), str(WEBSITE)]

from reference import build_options, build_reference  # noqa: E402

# Pages outside of docs/, and those that have another name on the site.
NAMES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "vulnerabilities.md",
    "benchmarks/README.md": "benchmarks.md",
    "docs/dev/README.md": "dev/index.md",
}
GENERATED = {
    "docs/options.md": build_options,
    "docs/reference.md": build_reference,
}
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
REFERENCE = re.compile(r"^\[([^\]]+)\]: (?!\w+:)(\S+)$", re.MULTILINE)  # [name]: target
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)")


def name_on_site(path: str) -> str | None:
    """The path below the site's root, or None for a file that is not part of the site."""
    if path in NAMES:
        return NAMES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def convert_links(text: str, path: str) -> str:
    """The text of a page with links that lead to the same files on the site. A link to source code becomes its text."""
    here = posixpath.dirname(str(name_on_site(path)))

    def find(target: str) -> str | None:
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if not (ROOT / file).exists():
            raise SystemExit(f"{path} links to {target}, which does not exist.")
        name = name_on_site(file)
        return posixpath.relpath(name, here or ".") if name else None

    def convert(link: re.Match[str]) -> str:
        mark, words, target, anchor = link.groups(default="")
        if not target:
            return link[0]
        found = find(target)
        return f"{mark}[{words}]({found}{anchor})" if found else words

    def convert_reference(link: re.Match[str]) -> str:
        return f"[{link[1]}]: {find(link[2])}"

    parts = FENCE.split(text)
    return "".join(
        part if part.startswith("```") else REFERENCE.sub(convert_reference, LINK.sub(convert, part)) for part in parts
    )


def collect_pages(pages: Path) -> None:
    """Write the Markdown pages of the site, and what they show, into an empty directory."""
    files = [*NAMES, *(str(file.relative_to(ROOT)) for file in sorted((ROOT / "docs").rglob("*")) if file.is_file())]
    for path in files:
        target = pages / str(name_on_site(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".md"):
            text = GENERATED[path]() if path in GENERATED else (ROOT / path).read_text()
            target.write_text(convert_links(text, path))
        else:
            shutil.copyfile(ROOT / path, target)
    shutil.copyfile(WEBSITE / "style.css", pages / "style.css")


if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else WEBSITE / "build"
    shutil.rmtree(directory / "pages", ignore_errors=True)
    collect_pages(directory / "pages")
    shutil.copyfile(WEBSITE / "zensical.toml", directory / "zensical.toml")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    raise SystemExit(subprocess.run(command, cwd=directory).returncode)
