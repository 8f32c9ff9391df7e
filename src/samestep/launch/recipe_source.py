"""Reads the source of the recipes: their descriptions and options. Importing a recipe would import torch."""

import ast
from functools import cache
from pathlib import Path

from samestep.config import Option
from samestep.files import read_text


@cache
def find_recipes() -> dict[str, Path]:
    """Return the recipes: name -> file."""
    files = sorted((Path(__file__).parents[1] / "recipes").glob("*.py"))
    return {file.stem: file for file in files if not file.stem.startswith("_")}


def read_options(recipe: str) -> dict[str, Option]:
    """Return the options of a recipe's argparse, by name: of type int, float, bool (no value) or str (any other)."""
    options: dict[str, Option] = {}
    for call in ast.walk(_parse(recipe)):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "parser.add_argument":
            flag = ast.literal_eval(call.args[0])
            given = {word.arg: ast.unparse(word.value) for word in call.keywords}
            kind = bool if "action" in given else {"int": int, "float": float}.get(given.get("type", ""), str)
            metavar, text = (ast.literal_eval(given.get(key, "''")) for key in ("metavar", "help"))
            if flag.startswith("--"):
                name = flag[2:].replace("-", "_")
                options[name] = Option(kind, metavar or name.upper(), text.replace("%%", "%"))
    return options


def read_description(recipe: str) -> str:
    """Return the docstring of a recipe."""
    return ast.get_docstring(_parse(recipe)) or ""


def describe_recipes() -> str:
    """Return a line for each recipe: its name, and the first line of its docstring."""
    return "".join(f"  {name:<12} {read_description(name).partition(chr(10))[0]}\n" for name in find_recipes())


@cache
def _parse(recipe: str) -> ast.Module:
    return ast.parse(read_text(find_recipes()[recipe], is_given=True))
