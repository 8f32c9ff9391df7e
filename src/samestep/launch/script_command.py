"""A command that starts a script, a module or a recipe: its options, and the words after them."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from samestep.command_line import Command, build_options, name_option, suggest, take_values
from samestep.config import OPTIONS, Option
from samestep.errors import Error
from samestep.launch.flags import INSTEAD
from samestep.launch.recipe_source import find_recipes, read_options
from samestep.launch.target import Target


class ScriptCommand(Command):
    """A command that starts SCRIPT, -m MODULE or RECIPE. Its options precede these, or are anywhere beside RECIPE.

    The callback gets the words, the target and the values of the options that were given, by name.

    Args:
        flags: the options.
        words: names of the words before the target, such as "GOOD BAD".
        default: the target if none is given; None: one must be given.
    """

    usage = "SCRIPT | -m MODULE | RECIPE"

    def __init__(
        self,
        name: str,
        callback: Callable[..., int],
        flags: Mapping[str, Option],
        words: str = "",
        default: Target | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(name, callback=callback, **{**settings, "params": build_options(flags)})
        self._run = callback
        self._words = words
        self._default = default
        # Without -h: click would read -host, as mpirun has it, as -h and more.
        unknown = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": ["--help"]}
        self.context_settings = {**self.context_settings, **unknown}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options, the words and the target, and keep them in `ctx.obj`, for `invoke`."""
        if ctx.resilient_parsing:  # to complete a word
            self.params = self._mix_options(find_recipe(args))
            return super().parse_args(ctx, args)
        values, left = self.take(ctx, args) if self._words else ({}, args)
        num_words = len(self._words.split())
        words = left[:num_words]
        left = left[num_words:]
        if len(words) < num_words or (words and not left and not self._default):
            raise Error(
                f"{self.name} needs {self._words} and a script or a recipe; see samestep {self.name} --help",
                code="SS103",
            )
        target, more = self.find_target(ctx, left)
        ctx.obj = (*words, target, values | more)
        return []

    def invoke(self, ctx: click.Context) -> int:
        """Run the command. Returns the exit code."""
        return self._run(*ctx.obj)

    def take(self, ctx: click.Context, args: list[str], *, is_mixed: bool = False) -> tuple[dict[str, Any], list[str]]:
        """Return the values of this command's options in `args`, and the other arguments.

        Args:
            is_mixed: the options may be anywhere. Otherwise the first other argument ends them.
        """
        settings = {**self.context_settings, "allow_interspersed_args": is_mixed, "obj": find_recipe(args)}
        inner = click.Context(self, ctx.parent, ctx.info_name, **settings)
        with inner.scope(cleanup=False):
            left = super().parse_args(inner, [*args])
        if "-h" in (left if is_mixed else left[:1]):
            self.take(ctx, ["--help", *args])
        return take_values(inner.params), left

    def find_target(self, ctx: click.Context, args: list[str]) -> tuple[Target | None, dict[str, Any]]:
        """Return the target, and the values of the options. Raises Error if there is no target."""
        values, left = self.take(ctx, args)
        if not left and not self._default:
            raise Error(f"{self.name} needs a script or a recipe; see samestep {self.name} --help", code="SS103")
        if not left or left[0] not in find_recipes() or Path(left[0]).is_file():
            return self.build_target(left) if left else self._default, values
        values, (recipe, *left) = self.take(ctx, args, is_mixed=True)
        return self.build_recipe_target(recipe, left, values), values

    def build_target(self, words: list[str]) -> Target:
        """Return the target: a script or -m MODULE, and its arguments. Raises Error if it is neither."""
        kind, words = ("module", words[1:]) if words[:1] == ["-m"] else ("script", words)
        if not words:
            raise Error(f"{self.name} needs a {kind} to start; see samestep {self.name} --help", code="SS103")
        if words[0].startswith("-"):
            raise self.reject_option(words[0])
        return Target(kind, words[0], words[1:])

    def reject_option(self, token: str) -> Error:
        """Build the error for an option that the command does not have."""
        option = token.partition("=")[0]
        known = {flag for param in self.params for flag in param.opts}
        instead = INSTEAD.get(name_option(option).strip("-").replace("-", "_"), "")
        if instead and {*re.findall(r"--[\w-]+", instead)} <= known:
            return Error(f"{self.name} has no {option}: {instead}", code="SS103")
        return Error(f"{self.name} has no option {option}{suggest(name_option(option), known)}", code="SS103")

    def build_recipe_target(self, recipe: str, arguments: list[str], values: Mapping[str, Any]) -> Target:
        """Return the target that runs a recipe.

        Raises:
            Error: neither the command nor the recipe has an option, or its value is no number where it must be one.
        """
        command = f"{self.name} {recipe}"
        options = [*self._mix_options(recipe), click.Argument(["counts"], nargs=-1)]
        Command(command, params=options).make_context(command, [*arguments])
        if "batch_size" in values:  # the recipe derives other numbers from it
            arguments = [*arguments, f"--batch-size={values['batch_size']}"]
        usual = [re.sub("^--[^=]+", lambda flag: name_option(flag[0]), word) for word in arguments]
        return Target("recipe", f"samestep.recipes.{recipe}", usual)

    def _build_recipe_options(self, recipe: str) -> list[click.Parameter]:
        """Return the options of a recipe. Only a command with --run-dir takes a recipe's."""
        own = read_options(recipe) if recipe else {}
        has_run_dir = any(param.name == "run_dir" for param in self.params)
        return build_options({name: option for name, option in own.items() if name != "run_dir" or has_run_dir})

    def _mix_options(self, recipe: str) -> list[click.Parameter]:
        """Return the options of a recipe and of this command, whose own one is taken if both have one."""
        return [*{param.name: param for param in (*self._build_recipe_options(recipe), *self.params)}.values()]

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the words of the usage line."""
        return [*self._words.split(), "[options]", self.usage, "[its arguments]"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, after those of a recipe that the arguments name."""
        sections = {
            f"Options of the recipe {ctx.obj}": self._build_recipe_options(ctx.obj),
            f"Options of {self.name}": [param for param in self.params if param.name not in OPTIONS],
            "These replace arguments of samestep.Run in the script": [p for p in self.params if p.name in OPTIONS],
        }
        for title, params in sections.items():
            if rows := [row for param in params if (row := param.get_help_record(ctx))]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the options that begin with `incomplete`, or let the shell complete a file."""
        return super().shell_complete(ctx, incomplete) or [CompletionItem(incomplete, type="file")]


def find_recipe(args: list[str]) -> str:
    """Return the first argument that names a recipe; "" if there is none."""
    return next((word for word in args if word in find_recipes()), "")
