"""Reads the source of the recipes for their descriptions. Importing a recipe would import torch."""

import ast
from functools import cache
from pathlib import Path

from samestep.files import read_text


@cache
def find_recipes() -> dict[str, Path]:
    """Return the recipes: name -> file."""
    files = sorted((Path(__file__).parents[1] / "recipes").glob("*.py"))
    return {file.stem: file for file in files if not file.stem.startswith("_")}


def describe_recipes() -> str:
    """Return a line for each recipe: its name, and the first line of its docstring."""
    texts = {
        name: ast.get_docstring(ast.parse(read_text(file, is_given=True))) for name, file in find_recipes().items()
    }
    return "".join(f"  {name:<12} {(text or '').partition(chr(10))[0]}\n" for name, text in texts.items())
