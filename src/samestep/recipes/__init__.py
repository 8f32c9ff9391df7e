"""Example scripts, to run and to copy."""

import argparse
import ast
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path


@cache
def find_recipes() -> dict[str, Path]:
    """Return the recipes: name -> file."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return {file.stem: file for file in files if not file.stem.startswith("_")}


def read_options(file: Path) -> dict[str, type]:
    """Return the options of a recipe's argparse with the type of their values: int, float or object, for any other.

    They are read from its source, because importing it would import torch.
    """
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    adding = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    options: dict[str, type] = {}
    for call in adding:
        types = [word.value.id for word in call.keywords if word.arg == "type" and isinstance(word.value, ast.Name)]
        kind = {"int": int, "float": float}.get(types[0] if types else "", object)
        words = [word.value for word in call.args if isinstance(word, ast.Constant)]
        options |= {word: kind for word in words if isinstance(word, str) and word.startswith("-")}
    return options


def read_other_names(file: Path) -> dict[str, str]:
    """Return the names of options in other programs -> a recipe's own, from `OTHER_NAMES` in its source."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OTHER_NAMES":
            return dict(ast.literal_eval(node.value))
    return {}


def show_recipe_help(recipe: str) -> None:
    """Print the help of a recipe by running it with --help in this process."""
    from samestep.launch.rank_process import load_main

    code, main_module = load_main("recipe", f"samestep.recipes.{recipe}", ["--help"])
    try:
        exec(code, main_module.__dict__)
    except SystemExit:
        print()


def run_main(main: Callable[[], None]) -> None:
    """Run the main function of `python -m samestep.recipes.NAME`.

    An Error raised before the run exists also ends the program with its message and exit code 2.
    """
    from samestep.train.shutdown import report_errors
    from samestep.world.environment import read_rank

    report_errors(read_rank())
    main()


def check_numbers(
    parser: argparse.ArgumentParser, args: argparse.Namespace, names: str, least: float, most: float = math.inf
) -> None:
    """End the program with a message if one of the options `names` is set, and not from `least` to `most`."""
    for name in names.split():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            span = f"{least:g} or more" if most == math.inf else f"a number from {least:g} to {most:g}"
            parser.error(f"--{name.replace('_', '-')} is {value}: give {span}")


def describe_recipes() -> str:
    """Return a line for each recipe: its name, and the first line of its docstring."""
    lines = []
    for name, file in find_recipes().items():
        docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
        lines.append(f"  {name:<12} {docstring.partition(chr(10))[0]}\n")
    return "".join(lines)
