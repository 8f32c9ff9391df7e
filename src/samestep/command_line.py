"""Commands on click: options from `Option`s, and errors in one sentence. Imports nothing slow."""

import difflib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from samestep.config import Option, name_flag
from samestep.errors import Error

MAX_NAMED = 8  # suggestions in one message
WIDTH = 110  # of --help
PATH = click.Path(path_type=Path)  # the type of an option or argument, which a shell completes
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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises Error where click raises UsageError."""
        given = [*args]  # click empties the list
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise Error(explain(error, self, ctx, given), code="SS103") from None

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


def explain(error: click.UsageError, command: click.Command, ctx: click.Context, given: Sequence[str]) -> str:
    """Return click's error about the arguments `given` as a sentence: what is wrong, and what to do."""
    path = ctx.command_path
    see = f"see {ctx.command_path} --help"
    options = {flag: param for param in command.get_params(ctx) for flag in param.opts if flag.startswith("--")}
    if isinstance(error, click.NoSuchOption):
        missing = error.option_name
        named = [word.partition("=")[0] for word in given]
        if not missing.startswith("--"):  # click reads -heal as -h -e -a -l
            missing = next(word for word in named if word.startswith("-") and missing[1] in word)
        wrong = next((word for word in named if name_option(word) == missing), missing)
        return (
            f"{ctx.command_path.removeprefix('samestep ')} has no option {wrong}{suggest(name_option(wrong), options)}"
        )
    if isinstance(error, click.BadOptionUsage):
        option = options[error.option_name].to_info_dict()
        return f"{error.option_name} " + ("takes no value" if option["is_flag"] else f"needs a value: {option['help']}")
    if isinstance(error, click.MissingParameter) and error.param:
        missing = error.param.human_readable_name if isinstance(error.param, click.Argument) else error.param.opts[-1]
        return f"{path}: the following arguments are required: {missing}; {see}"
    return f"{path}: {error.format_message().rstrip('.')}; {see}"


def name_option(token: str) -> str:
    """Return the name of an option in its usual form: --nproc_per_node=2 -> --nproc-per-node."""
    return token.partition("=")[0].replace("_", "-")


def suggest(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that rejects `word`: the most similar known one, or all."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(known)}" if len(known) <= MAX_NAMED else "; see --help"


def print_json(facts: Any) -> None:
    """Print the facts of a command with --json. Numbers that JSON lacks become strings, such as "nan"."""
    from samestep.decoding import as_json

    print(json.dumps(as_json(facts, lambda word: str(float(word))), indent=1), flush=True)
