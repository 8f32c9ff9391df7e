"""`samestep doctor`: starts the ranks, or runs as one of them."""

import sys
from collections.abc import Sequence

from samestep.errors import Error
from samestep.tools.doctor.doctor_options import Options, Start, parse
from samestep.world.environment import Environment, count_job_nodes, read_environment


def run_doctor(arguments: Sequence[str]) -> int:
    """Run the command with the arguments after its name. Returns the exit code.

    Raises:
        Error: the arguments contradict each other, or the ranks do not join.
        SystemExit: in a rank, with its exit code.
    """
    options, start = parse(arguments)
    if options.script:
        _check_script(options)
    environment = read_environment()
    if environment.launcher == "python":
        num_nodes = count_job_nodes()
        if num_nodes > 1 and start.nnodes is None:
            found = f"this job has {num_nodes} nodes, and only this one is checked"
            print(f"samestep doctor: {found}: srun samestep doctor checks all", file=sys.stderr, flush=True)
        return _launch(options, start)
    if start.given:
        raise Error(f"{start.given[0]} was given, but a launcher has started the ranks already: leave it out")
    sys.exit(run_rank(environment, options))


def run_rank(environment: Environment, options: Options) -> int:
    """Run as one of the ranks. Returns its exit code."""
    from samestep.tools.doctor.examination import examine

    return examine(environment, options)


def _check_script(options: Options) -> None:
    from samestep.launch.launcher import check_target
    from samestep.launch.local_ranks import Target

    first, *rest = options.script
    if first == "-m":
        check_target(Target("module", rest[0], rest[1:]))
    else:
        check_target(Target("script", first, rest))


def _launch(options: Options, start: Start) -> int:
    from samestep.launch.handshake import find_secret
    from samestep.launch.launcher import run_launch
    from samestep.launch.local_ranks import Target
    from samestep.launch.rendezvous_client import parse_nodes

    nodes = parse_nodes(
        start.nnodes or "1", start.node_rank, start.rdzv_endpoint, start.rdzv_id or "", start.rdzv_timeout or 300,
        find_secret(start.rdzv_secret),
    )  # fmt: skip
    return run_launch(
        Target("module", "samestep", ["doctor", *options.to_arguments()]),
        num_ranks=start.nproc_per_node or "auto",
        show_ranks="0",
        overrides={"device": options.device, "num_threads": options.num_threads},
        nodes=nodes,
    )
