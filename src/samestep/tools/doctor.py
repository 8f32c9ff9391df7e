"""`samestep doctor`: starts the ranks, or runs as one of them. Does not import torch to start them."""

from typing import Any

import click

from samestep.cli import JSON, Command, build_options, take_values
from samestep.config import Option, to_flags
from samestep.errors import Error
from samestep.launch.target import FLAGS, Target
from samestep.tools.launch_command import start
from samestep.world.environment import read_environment

RANK_FLAGS: dict[str, Option] = {
    "json": JSON,
    "run_dir": Option(str, "DIR", "directory for runs, or a URL; default: runs in the working directory"),
    "device": FLAGS["device"],
}
START_FLAGS: dict[str, Option] = {
    name: FLAGS[name] for name in ("nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "rdzv_timeout")
}


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
            given = to_flags(starting)[0]
            raise Error(f"{given} was given, but a launcher has started the ranks already: leave it out", code="SS104")
        from samestep.tools.doctor_checks import CHECKS
        from samestep.tools.examination import examine

        return examine(environment, CHECKS, **own)
    device = {"device": own["device"]} if "device" in own else {}
    return start(Target("module", "samestep", ["doctor", *to_flags(own)]), {**starting, **device})
