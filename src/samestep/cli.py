"""The `samestep` command, and what its commands share: options made from `Option`s, errors in one sentence, JSON.

Imports a command's module only to run it, and nothing slow, so that `--help` and a typing error are fast.
"""

import inspect
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from samestep.config import Option, name_flag
from samestep.console import print_error
from samestep.errors import Error, add_code, explain
from samestep.processes import leave
from samestep.version import __version__
from samestep.world.environment import allow_all_characters, drop_output, fix_hash_seed

HELP = """\
samestep trains PyTorch models and gives the same run at any number of ranks and through any crash:
the same samples, the same updates, the same bits.

Commands:
{commands}
Examples:
  samestep train digits --nproc-per-node 2        a small CNN on real handwritten digits, in seconds
  samestep launch --nproc-per-node 4 train.py --lr 0.1
  samestep inspect runs/digits --digest           a hash of the whole state, equal at any number of ranks

Each command has a --help, and docs/errors.md explains the code of an error, such as [SS101]. `samestep --version`
prints the version.
"""
COMMANDS = {  # name -> its words, what it does, and the module of samestep that defines run_NAME
    "train": ("[RECIPE]", "train one of the included recipes (default: digits)", "tools.launch_command"),
    "launch": ("SCRIPT ...", "start a script on ranks of this machine or of several", "tools.launch_command"),
    "node": (
        "SCRIPT ...",
        "the same, as one of several machines that torchrun or srun has started",
        "tools.launch_command",
    ),
    "slurm": ("SCRIPT ...", "print a batch script for Slurm: samestep slurm ... | sbatch", "tools.batch_script"),
    "inspect": ("RUN", "show a run directory: settings, snapshots, restarts, samples, digest", "tools.inspect"),
    "runs": ("[DIR]", "list the runs in a directory", "tools.inspect"),
    "report": ("RUN ...", "write an HTML page about runs: metrics, time, restarts", "tools.report"),
    "watch": ("RUN", "show the live state of every rank of a running job", "tools.inspect"),
    "replay": ("RUN SCRIPT", "compute a step of a run again, and compare its bits", "tools.replay"),
    "diff": ("RUN RUN", "show the first step in which two runs differ, and what differs", "tools.inspect"),
    "verify": (
        "SCRIPT ...",
        "check that a script gives the same run on any ranks, after kills",
        "tools.verify.command",
    ),
    "scale": ("SCRIPT ...", "measure how a script scales with the number of ranks", "tools.scale"),
    "doctor": ("", "check whether this machine or a cluster is fit for training", "tools.launch_command"),
    "export": ("RUN FILE", "write a snapshot's weights for other programs: safetensors", "tools.export"),
}


WIDTH = 110  # of --help
PATH = click.Path(path_type=Path)
JSON = Option(bool, "", "print JSON")  # of every command that prints facts, with `print_json`
json_option = click.option("--json", "is_json", is_flag=True, help=JSON.help)


class Program(click.Group):
    """The commands. Each is imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command. Returns None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"samestep.{COMMANDS[cmd_name][-1]}")
        command: click.Command = getattr(module, f"run_{cmd_name.replace('-', '_')}")
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments before a command's name."""
        return super().parse_args(ctx, ["--help"] if args[:1] in ([], ["help"]) else args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help text."""
        lines = (f"  {f'samestep {name} {words}':<30}{what}" for name, (words, what, _) in COMMANDS.items())
        formatter.write(HELP.format(commands="\n".join(lines) + "\n"))


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="samestep %(version)s")
def program() -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Without `arguments`, use the process's arguments, and exit."""
    try:
        if arguments is None:
            if sys.argv[1:2] in (["launch"], ["node"], ["train"]):
                # Slurm may send SIGUSR1 as soon as a job starts. It stays pending until the launcher handles it.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
                fix_hash_seed()
            allow_all_characters()
        code = run(program, "samestep", sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # such as of `| head`
        drop_output()
        code = 128 + signal.SIGPIPE
    except (Error, OSError) as error:
        if (known := explain(error)) is None:
            raise
        print_error(f"samestep: error: {add_code(str(known), known.code)}")
        if isinstance(error, OSError):
            drop_output()
        code = Error.exit_code
    except KeyboardInterrupt:
        code = 130
    if arguments is None and "torch" in sys.modules:
        leave(code)
    return code


# --- a command ------------------------------------------------------------------------------------------------------


class Command(click.Command):
    """A command of samestep. Call it with the arguments after its name; it returns the exit code.

    Raises:
        Error: an argument is invalid.
    """

    def __init__(self, name: str | None, **settings: Any) -> None:
        context_settings: dict[str, Any] = {
            "help_option_names": ["-h", "--help"],
            "terminal_width": WIDTH,
            "token_normalize_func": name_option,
        }
        super().__init__(name, context_settings=context_settings, **settings)

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
    from samestep.decoding import as_json  # imports msgspec, which is slow

    print(json.dumps(as_json(facts, lambda word: str(float(word))), indent=1), flush=True)
