"""`samestep doctor`: starts the ranks, or runs as one of them."""

import sys
from typing import Any

import click

from samestep.config import Option, to_flags
from samestep.errors import Error
from samestep.launch.flags import FLAGS
from samestep.launch.launcher import check_run_dir, check_target
from samestep.launch.script_command import ScriptCommand
from samestep.launch.target import Target
from samestep.tools.doctor.facts import DoctorOptions
from samestep.tools.launch_command import start
from samestep.world.environment import count_job_nodes, read_environment

RANK_FLAGS: dict[str, Option] = {
    "json": Option(bool, "", "print one JSON object instead of the table"),
    "run_dir": Option(str, "DIR", "directory for runs, or a URL; default: runs in the working directory"),
    **{name: FLAGS[name] for name in ("device", "num_threads", "batch_size", "micro_batch_size")},
}
START_FLAGS: dict[str, Option] = {
    name: FLAGS[name]
    for name in ("nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "rdzv_id", "rdzv_secret", "rdzv_timeout")
}


class DoctorCommand(ScriptCommand):
    """`samestep doctor`, whose script follows --script, and is not its target."""

    usage = "[--script SCRIPT | --script -m MODULE]"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options for every rank, and those for starting the ranks, and keep them in `ctx.obj`.

        Raises:
            Error: an argument is invalid, options contradict each other, or there is no such script.
        """
        if ctx.resilient_parsing:  # to complete a word
            return super().parse_args(ctx, args)
        values, left = self.take(ctx, args)
        if left[:1] == ["--script"]:
            check_target(self.build_target(left[1:]))
        elif left:
            raise self.reject_option(left[0])
        starting = {name: values.pop(name) for name in START_FLAGS if name in values}
        if values.get("device") == "cpu" and starting.get("nproc_per_node") == "gpu":
            raise Error(
                "--nproc-per-node gpu and --device cpu contradict each other: leave one of them out", code="SS104"
            )
        ctx.obj = DoctorOptions(script=tuple(left[1:]), **values), starting
        return []


@click.command("doctor", cls=DoctorCommand, flags=RANK_FLAGS | START_FLAGS)
def run_doctor(options: DoctorOptions, starting: dict[str, Any]) -> int:
    """Checks and measures this machine, or a whole cluster, before training, and gives advice.

    This concerns versions, devices, memory, the network, the directory for runs, collectives and links; with --script
    also whether the data loader keeps up with the model: trains the script for a few seconds, on one node, in a
    temporary directory.

      samestep doctor                        this machine, one rank per GPU (without GPUs one)
      samestep doctor --nproc-per-node 4     four ranks here, with collectives
      samestep doctor --nnodes 2 --rdzv-endpoint HOST:29400 --nproc-per-node 8 --run-dir /shared/runs
                                             on every node, as with samestep launch
      torchrun ... -m samestep doctor        under any launcher, on all its ranks; also srun samestep doctor
      samestep doctor --nproc-per-node 2 --script train.py --lr 0.1

    Each line gives pass, warn or FAIL, the result, and advice. Bus bandwidth is defined as in nccl-tests.
    Exit code: 0; 1 if a check fails; 2 for invalid arguments.
    """
    environment = read_environment()
    if environment.launcher != "python":
        if starting:
            given = to_flags(starting)[0]
            raise Error(f"{given} was given, but a launcher has started the ranks already: leave it out", code="SS104")
        from samestep.tools.doctor.examination import examine

        return examine(environment, options)
    check_run_dir(options.run_dir)
    if (num_nodes := count_job_nodes()) > 1 and "nnodes" not in starting:
        found = f"this job has {num_nodes} nodes, and only this one is checked"
        print(f"samestep doctor: {found}: srun samestep doctor checks all", file=sys.stderr, flush=True)
    words = to_flags({name: value for name, value in vars(options).items() if name in RANK_FLAGS and value})
    words += ["--script", *options.script] if options.script else []
    values = {**starting, "device": options.device, "num_threads": options.num_threads}
    return start(Target("module", "samestep", ["doctor", *words]), values)
