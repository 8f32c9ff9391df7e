"""A command that starts a script, a module or a recipe: its options, and the words after them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from samestep.cli import Command, build_options, take_values
from samestep.config import OPTIONS, Option
from samestep.errors import Error
from samestep.launch.recipe_source import find_recipes
from samestep.launch.target import Target


class ScriptCommand(Command):
    """A command that starts SCRIPT, -m MODULE or RECIPE. Its options precede these; all words after them are theirs.

    The callback gets the words, the target and the values of the options that were given, by name.

    Args:
        flags: the options.
        words: name of a word before the target, such as "RUN", which options may follow; "": none.
    """

    usage = "SCRIPT | -m MODULE | RECIPE"

    def __init__(
        self,
        name: str,
        callback: Callable[..., int],
        flags: Mapping[str, Option],
        words: str = "",
        **settings: Any,
    ) -> None:
        module = click.Option(["-m", "is_module"], is_flag=True, hidden=True)
        super().__init__(name, callback=callback, **{**settings, "params": [*build_options(flags), module]})
        self._run = callback
        self._words = words
        self.context_settings = {**self.context_settings, "allow_extra_args": True, "allow_interspersed_args": False}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options, the word and the target, and keep them in `ctx.obj`, for `invoke`."""
        values, left = self.take(ctx, args)
        word = left[:1] if self._words else []
        if word:
            more, left = self.take(ctx, left[1:])
            values |= more
        if len(word) < bool(self._words) or not left:
            raise Error(
                f"{self.name} needs {f'{self._words} and ' if self._words else ''}a script or a recipe; see samestep "
                f"{self.name} --help",
                code="SS103",
            )
        target = self.build_target(left, values)
        values.pop("is_module", None)
        ctx.obj = (*word, target, values)
        return []

    def invoke(self, ctx: click.Context) -> int:
        """Run the command. Returns the exit code."""
        return self._run(*ctx.obj)

    def take(self, ctx: click.Context, args: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the values of the options at the beginning of `args`, and the other arguments."""
        inner = click.Context(self, ctx.parent, ctx.info_name, obj=ctx.obj, **self.context_settings)
        with inner.scope(cleanup=False):
            left = super().parse_args(inner, [*args])
        return take_values(inner.params), left

    def build_target(self, words: list[str], values: Mapping[str, Any]) -> Target:
        """Return the target that the words name, with its arguments. A script precedes a recipe of the same name."""
        name, *arguments = words
        if values.get("is_module"):
            return Target("module", name, arguments)
        if name not in find_recipes() or Path(name).is_file():
            return Target("script", name, arguments)
        return build_recipe_target(name, arguments, values)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the words of the usage line."""
        return [*self._words.split(), "[options]", self.usage, "[its arguments]"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        sections = {
            f"Options of {self.name}": [param for param in self.params if param.name not in OPTIONS],
            "These replace arguments of samestep.Run in the script": [p for p in self.params if p.name in OPTIONS],
        }
        for title, params in sections.items():
            if rows := [row for param in params if (row := param.get_help_record(ctx))]:
                with formatter.section(title):
                    formatter.write_dl(rows)


def build_recipe_target(name: str, arguments: list[str], values: Mapping[str, Any]) -> Target:
    """Return the target that runs a recipe."""
    if "batch_size" in values:  # the recipe derives other numbers from it
        arguments = [*arguments, f"--batch-size={values['batch_size']}"]
    return Target("recipe", f"samestep.recipes.{name}", arguments)
