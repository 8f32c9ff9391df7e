"""`samestep doctor`: starts the ranks, or runs as one of them."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from samestep.config import Option, to_flags
from samestep.errors import Error
from samestep.launch.flags import FLAGS, describe_flags, name_flags, reject_option, take_flags, take_target
from samestep.launch.launcher import check_run_dir, check_target
from samestep.launch.local_ranks import Target
from samestep.tools.doctor.facts import Options
from samestep.world.environment import count_job_nodes, read_environment

HELP = """\
usage: samestep doctor [options] [--script SCRIPT [arguments of the script]]
       samestep doctor [options] [--script -m MODULE [arguments of the module]]

Checks and measures this machine, or a whole cluster, before training, and gives advice: versions, devices,
memory, the network, the directory for runs, collectives and links; with --script also whether the data loader keeps up
with the model: trains the script for a few seconds, on one node, in a temporary directory.

  samestep doctor                        this machine, one rank per GPU (without GPUs one)
  samestep doctor --nproc-per-node 4     four ranks here, with collectives
  samestep doctor --nnodes 2 --rdzv-endpoint HOST:29400 --nproc-per-node 8 --run-dir /shared/runs
                                         on every node, as with samestep launch
  torchrun ... -m samestep doctor        under any launcher, on all its ranks; also srun samestep doctor
  samestep doctor --nproc-per-node 2 --script train.py --lr 0.1

Each line gives pass, warn or FAIL, the result, and advice. Bus bandwidth is defined as in nccl-tests.
Exit code: 0; 1 if a check fails; 2 for invalid arguments.
"""

RANK_FLAGS: dict[str, Option] = {
    "json": Option(bool, "", "print one JSON object instead of the table"),
    "run_dir": Option(str, "DIR", "directory for runs, or a URL; default: runs in the working directory"),
    **{name: FLAGS[name] for name in ("device", "num_threads", "batch_size", "micro_batch_size")},
}
START_FLAGS: dict[str, Option] = {
    name: FLAGS[name]
    for name in ("nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "rdzv_id", "rdzv_secret", "rdzv_timeout")
}


def run_doctor(arguments: Sequence[str], start_ranks: Callable[[Target, dict[str, Any]], int]) -> int:
    """Run the command with the arguments after its name. Returns the exit code.

    Raises Error as `parse`, or if the directory for runs is a file.

    `start_ranks` starts a target with options of `samestep launch`, and returns the exit code.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        print(HELP, describe_flags("Options:", RANK_FLAGS), sep="\n")
        print(describe_flags("Options for starting the ranks, as in samestep launch:", START_FLAGS), end="")
        return 0
    options, starting = parse(arguments)
    environment = read_environment()
    if environment.launcher != "python":
        if starting:
            given = to_flags(starting)[0]
            raise Error(f"{given} was given, but a launcher has started the ranks already: leave it out")
        from samestep.tools.doctor.examination import examine

        return examine(environment, options)
    check_run_dir(options.run_dir)
    if (num_nodes := count_job_nodes()) > 1 and "nnodes" not in starting:
        found = f"this job has {num_nodes} nodes, and only this one is checked"
        print(f"samestep doctor: {found}: srun samestep doctor checks all", file=sys.stderr, flush=True)
    words = to_flags({name: value for name, value in vars(options).items() if name in RANK_FLAGS and value})
    words += ["--script", *options.script] if options.script else []
    values = {**starting, "device": options.device, "num_threads": options.num_threads}
    return start_ranks(Target("module", "samestep", ["doctor", *words]), values)


def parse(arguments: Sequence[str]) -> tuple[Options, dict[str, Any]]:
    """Return the options for every rank, and those for starting the ranks.

    Raises Error if an argument is invalid, options contradict each other, or there is no such script.
    """
    flags = RANK_FLAGS | START_FLAGS
    values, left = take_flags(arguments, stop_at_first=True, flags=flags)
    if left[:1] == ["--script"]:
        check_target(take_target("doctor", left[1:], flags))
    elif left:
        raise reject_option("doctor", left[0], [*name_flags(flags), "--script"])
    starting = {name: values.pop(name) for name in START_FLAGS if name in values}
    if values.get("device") == "cpu" and starting.get("nproc_per_node") == "gpu":
        raise Error("--nproc-per-node gpu and --device cpu contradict each other: leave one of them out")
    return Options(script=tuple(left[1:]), **values), starting
