"""Print docs/decisions/size.md with the lines of each feature: python website/size.py."""

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "samestep"
PAGE = ROOT / "docs" / "decisions" / "size.md"
ROW = re.compile(r"^\| ([^|]+) \| ((?:`[^`|]+`(?:, )?)+) \|", re.MULTILINE)


def read_features() -> dict[str, list[str]]:
    """The patterns of the modules of each feature of the page."""
    return {feature: re.findall("`([^`]+)`", modules) for feature, modules in ROW.findall(PAGE.read_text())}


def find_modules(pattern: str) -> set[Path]:
    """The modules below src/samestep that a pattern of the page names: all of a folder if it ends in a slash."""
    return set(SOURCE.glob(f"{pattern}**/*.py" if pattern.endswith("/") else pattern))


def count_lines(modules: Iterable[Path]) -> int:
    return sum(len(module.read_text().splitlines()) for module in modules)


def build_size() -> str:
    """The page with a column of lines, and a table of the lines that belong to no feature of the page."""
    text = PAGE.read_text()
    text = text.replace("| feature | modules |", "| feature | lines | modules |", 1).replace("|---|", "|---|---:|", 1)
    counted: set[Path] = set()
    for feature, patterns in read_features().items():
        modules = set().union(*map(find_modules, patterns))
        text = text.replace(f"| {feature} | ", f"| {feature} | {count_lines(modules):,} | ", 1)
        counted |= modules
    rest: dict[str, set[Path]] = {}
    for module in set(SOURCE.rglob("*.py")) - counted:
        rest.setdefault(module.relative_to(SOURCE).parts[0].removesuffix(".py"), set()).add(module)
    rows = [f"| `{name}` | {count_lines(rest[name]):,} |" for name in sorted(rest)]
    total = f"| all of `src/samestep` | {count_lines(SOURCE.rglob('*.py')):,} |"
    return "\n".join([text, "The rest, by package:\n", "| package | lines |", "|---|---:|", *rows, total]) + "\n"


if __name__ == "__main__":
    print(build_size(), end="")
