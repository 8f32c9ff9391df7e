"""Commands on click: options from `Option`s, and errors in one sentence. Imports nothing slow."""

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from samestep.config import Option, name_flag
from samestep.errors import Error

WIDTH = 110  # of --help
PATH = click.Path(path_type=Path)
JSON = Option(bool, "", "print JSON")  # of every command that prints facts, with `print_json`
json_option = click.option("--json", "is_json", is_flag=True, help=JSON.help)


class Command(click.Command):
    """A command of samestep. Call it with the arguments after its name; it returns the exit code.

    Raises:
        Error: an argument is invalid.
    """

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.context_settings = {
            "help_option_names": ["-h", "--help"],
            "terminal_width": WIDTH,
            "token_normalize_func": name_option,
        }

    def __call__(self, arguments: Sequence[str]) -> int:
        """Run the command, and return its exit code."""
        return run(self, f"samestep {self.name}", arguments)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help text as it is, with its examples and columns."""
        formatter.write(f"\n{inspect.cleandoc(self.help or '')}\n")


def run(command: click.Command, name: str, arguments: Sequence[str]) -> int:
    """Run a command, which `name` calls in messages. Returns its exit code. Raises Error if an argument is invalid."""
    try:
        with command.make_context(name, [*arguments]) as context:
            return int(command.invoke(context) or 0)
    except click.exceptions.Exit as end:  # after --help
        return end.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else name
        message = " ".join(error.format_message().split()).rstrip(".")
        raise Error(f"{path}: {message} (see {path} --help)", code="SS103") from None


def build_options(options: Mapping[str, Option]) -> list[click.Parameter]:
    """Return click's options for `Option`s by name."""
    return [
        click.Option(
            [name_flag(name)],
            is_flag=option.type is bool or None,  # False lets an option go without its value
            multiple=option.type is list,
            metavar=option.metavar or None,
            help=option.help,
            callback=partial(_convert, option),
        )
        for name, option in options.items()
    ]


def _convert(option: Option, ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Return the value of an option, of its type. Raises Error if it is not, or if its check fails."""
    if isinstance(value, str):
        value = option.parse(param.opts[-1], value)
        option.check(param.opts[-1], value)  # ranks get the value as it was given
    return value


def take_values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options that were given."""
    given = {name: [*value] if isinstance(value, tuple) else value for name, value in parameters.items()}
    return {name: value for name, value in given.items() if not (value is None or value is False or value == [])}


def name_option(token: str) -> str:
    """Return the name of an option in its usual form: --nproc_per_node=2 -> --nproc-per-node."""
    return token.partition("=")[0].replace("_", "-")


def print_json(facts: Any) -> None:
    """Print the facts of a command with --json. Numbers that JSON lacks become strings, such as "nan"."""
    from samestep.decoding import as_json

    print(json.dumps(as_json(facts, lambda word: str(float(word))), indent=1), flush=True)
