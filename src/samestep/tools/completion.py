"""`samestep completion`: a script that completes samestep's commands, options and files in a shell."""

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from samestep.command_line import Command
from samestep.world.environment import COMPLETION

SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
# An interactive shell without a configuration has not loaded its completion system yet.
BEFORE = {"zsh": "(( $+functions[compdef] )) || { autoload -U +X compinit && compinit -i; }\n"}


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(list(SHELLS)), default="bash")
def run_completion(shell: str) -> int:
    """Prints a script that completes commands, options and files in a shell: bash (the default), zsh or fish.

    Keep the output in a file and source that for a faster start of the shell.
    """
    # Without the subcommands: the script calls the program for completions.
    command = click.Command("samestep")
    print(BEFORE.get(shell, "") + SHELLS[shell](command, {}, "samestep", COMPLETION).source(), end="")
    return 0
