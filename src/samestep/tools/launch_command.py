"""The commands that start ranks on this machine or on several hosts: `launch`, `node`, `train` and `doctor`.

Does not import torch to start them.
"""

from typing import Any

import click

from samestep.cli import JSON, Command, build_options, name_option, take_values
from samestep.config import Option, to_flags
from samestep.console import join_words
from samestep.errors import Error
from samestep.launch.target import (
    COMMAND,
    FLAGS,
    ScriptCommand,
    Target,
    build_recipe_target,
    describe_recipes,
    find_recipes,
)
from samestep.processes import run_captured
from samestep.world.environment import read_environment, read_secret

LAUNCH_HELP = """\
Starts the script on several ranks of this machine and waits for them. Everything after the script is an argument of the
script, as with torchrun.
Ranks get the environment of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...); the script does not have to use samestep.
The output of ranks that are not shown is in logs/ in the run directory.

Several machines: give the same command on each, with --nnodes 2 --rdzv-endpoint HOST:29400, where HOST is one of them,
and --node-rank 0 on HOST, 1 on the other. torchrun and srun set these values for `samestep node`.
All need the same secret: SAMESTEP_RDZV_SECRET=`openssl rand -hex 32`.
Machines that do not share the run directory each keep a copy.

The first Ctrl-C, SIGTERM or SIGUSR1 stops the run: it completes the current step, saves and exits. The second one kills
the ranks. With --max-restarts, all ranks restart from the newest snapshot after a rank has died.
Exit code: 0 if the run is complete; the exit code of the rank that failed first (128 + signal if a signal killed it);
130 after Ctrl-C; 75 after SIGTERM or SIGUSR1 if the run has saved (the same command resumes it); 2 after an error in
the input, or if the end of the run could not be saved.
"""
NODE_HELP = """\
Starts the script on several ranks of this machine, as `samestep launch` does. torchrun, srun or another engine starts
one such command per machine, and gives it the number of the machine:

  torchrun --nnodes 2 --node-rank R --nproc-per-node 1 --master-addr HOST -m samestep.node --nproc-per-node 4 train.py
  srun --nodes 2 --ntasks-per-node 1 samestep node --nproc-per-node 4 train.py

All need the same secret: SAMESTEP_RDZV_SECRET=`openssl rand -hex 32`.
The exit code is that of `samestep launch`.
"""
MEETING = ("nnodes", "node_rank", "rdzv_endpoint")  # options that the engine's variables replace
TRAIN_HELP = """\
Trains a recipe: a training script to read and copy. Options may be given in any order.
`samestep train RECIPE --help` shows the recipe's own options.

Recipes:
"""
RANK_FLAGS: dict[str, Option] = {  # of `doctor`
    "json": JSON,
    "run_dir": Option(str, "DIR", "directory for runs, or a URL; default: runs in the working directory"),
    "device": FLAGS["device"],
}
START_FLAGS: dict[str, Option] = {
    name: FLAGS[name] for name in ("nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "rdzv_timeout")
}


class TrainCommand(ScriptCommand):
    """`samestep train`, which starts only recipes. Its options and those of the recipe may be given in any order."""

    usage = "[RECIPE]"

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.context_settings.update(ignore_unknown_options=True, allow_interspersed_args=True)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options. The other words, without the recipe's name, are the recipe's."""
        named = next((word for word in args if word in find_recipes()), "")
        ctx.obj = named  # for --help
        values, words = self.take(ctx, args)
        if named in words:
            words.remove(named)
        elif words and not words[0].startswith("-"):
            raise Error(
                f"there is no recipe {words[0]}: give {join_words([*find_recipes()], 'or')}",
                code="SS103",
            )
        usual = [name_option(word) + "".join(word.partition("=")[1:]) if word[:2] == "--" else word for word in words]
        ctx.params = {"target": build_recipe_target(named or "digits", usual, values), "values": values}
        return []

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help of the recipe that the arguments name; without one, of the command."""
        if not (named := ctx.find_object(str)):
            formatter.write(f"\n{TRAIN_HELP}{describe_recipes()}\n")
            return
        formatter.write(f"\n{run_captured([*COMMAND[:-1], f'samestep.recipes.{named}', '--help']).stdout}\n")


def start(target: Target, values: dict[str, Any]) -> int:
    """Start a target with the options of `samestep launch`. Returns the exit code."""
    from samestep.launch.launcher import parse_nodes, run_launch

    nodes = parse_nodes(
        values.pop("nnodes", None),
        values.pop("node_rank", None),
        values.pop("rdzv_endpoint", None),
        values.pop("rdzv_timeout", 300),
        read_secret(),
    )
    return run_launch(target, values, nodes)


def start_node(target: Target, values: dict[str, Any]) -> int:
    """Start the ranks of this machine, as one of the nodes that torchrun or srun has started."""
    from samestep.launch.launcher import read_nodes, run_launch

    return run_launch(target, values, read_nodes(values.pop("rdzv_timeout", 300), read_secret()))


run_launch = ScriptCommand("launch", start, FLAGS, help=LAUNCH_HELP)
run_node = ScriptCommand(
    "node", start_node, {name: option for name, option in FLAGS.items() if name not in MEETING}, help=NODE_HELP
)
run_train = TrainCommand("train", start, FLAGS)


@click.command("doctor", cls=Command, params=build_options(RANK_FLAGS | START_FLAGS))
def run_doctor(**parameters: Any) -> int:
    """Checks the ranks of this machine, or of a whole cluster, before training, and gives advice.

    Do the versions agree, do all nodes share the directory for runs, do the nodes reach each other, are the results of
    collectives right, and which link between two nodes is slow?

      samestep doctor --nproc-per-node 4     four ranks on this machine
      samestep doctor --nnodes 2 --node-rank R --rdzv-endpoint HOST:29400 --nproc-per-node 8 --run-dir /shared/runs
                                             on every node, as with samestep launch
      torchrun ... -m samestep doctor        under any launcher, on all its ranks; also srun samestep doctor

    Each line gives pass, warn or FAIL, the result, and advice.
    Exit code: 0; 1 if a check fails; 2 for invalid arguments.
    """
    values = take_values(parameters)
    starting = {name: value for name, value in values.items() if name in START_FLAGS}
    own = {name: value for name, value in values.items() if name in RANK_FLAGS}
    environment = read_environment()
    if environment.launcher != "python":
        if starting:
            raise Error(
                f"{to_flags(starting)[0]} was given, but a launcher has started the ranks already: leave it out",
                code="SS104",
            )
        from samestep.tools.doctor import examine

        return examine(environment, **own)
    device = {"device": own["device"]} if "device" in own else {}
    return start(Target("module", "samestep", ["doctor", *to_flags(own)]), {**starting, **device})
