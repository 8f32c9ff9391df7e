"""What `samestep doctor` can be asked for."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.errors import Error

DESCRIPTION = """\
Looks at this machine, or at all of a cluster, measures it, and says what to do, before anything trains: versions,
devices, cores and threads, limits, network and clocks, the directory for runs, collectives and links; with --script
also whether the data loader keeps up with the model.

  samestep doctor                        this machine, one rank per GPU (without GPUs one)
  samestep doctor --nproc-per-node 4     four ranks here: collectives, too
  samestep doctor --nnodes 2 --rdzv-endpoint HOST:29400 --nproc-per-node 8 --run-dir /shared/runs
                                         on every node, as with samestep launch
  torchrun ... -m samestep doctor        under any launcher, on all its ranks; so does srun samestep doctor
  samestep doctor --nproc-per-node 2 --script train.py --lr 0.1
                                         ... and trains for a few seconds; in no directory of yours

Each line says pass, warn or FAIL, what was found, and what to do. Bus bandwidth is that of nccl-tests.
Exit code: 0; 1 where something fails; 2 after a mistake in the arguments.
"""


@dataclass(frozen=True)
class Options:
    """The options that every rank knows.

    Attributes:
        json: one JSON object instead of the table.
        run_dir: where runs are to live; None: `runs` in the current directory.
        device: "cpu" or "cuda"; None: cuda where there is one.
        num_threads: per rank; None: as torch has it.
        batch_size, micro_batch_size: of the script, in place of its own.
        script: what is trained for a moment, and its arguments: a script, or -m and a module.
    """

    json: bool = False
    run_dir: str | None = None
    device: str | None = None
    num_threads: int | None = None
    batch_size: int | None = None
    micro_batch_size: int | None = None
    script: tuple[str, ...] = ()

    def to_arguments(self) -> list[str]:
        """The words that `parse` makes these options of."""
        words = ["--json"] if self.json else []
        for name in ("run_dir", "device", "num_threads", "batch_size", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        return words + (["--script", *self.script] if self.script else [])


@dataclass(frozen=True)
class Start:
    """How the ranks are to be started: the options of `samestep launch` of these names."""

    nproc_per_node: str | None = None
    nnodes: str | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_secret: str | None = None
    rdzv_timeout: int | None = None

    @property
    def given(self) -> list[str]:
        """Those that were given, as they are written."""
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]


def parse(arguments: Sequence[str]) -> tuple[Options, Start]:
    """The arguments after `samestep doctor`.

    Raises:
        SystemExit: --help, or they make no sense (2).
        Error: there is no such script.
    """
    parser = argparse.ArgumentParser(
        prog="samestep doctor",
        usage="samestep doctor [options] [--script SCRIPT ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="one JSON object on stdout instead of the table")
    add("--run-dir", metavar="DIR", help="where runs are to live; default: runs, in the current directory")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--num-threads", type=_positive, metavar="N", help="CPU threads per rank, as you give them to samestep.Run")
    add("--batch-size", type=_positive, metavar="N", help="of the script, in place of its own")
    add("--micro-batch-size", type=_positive, metavar="N", help="likewise")
    script_help = "a script (or -m MODULE), and all that follows is its own: trained for a moment, on one node"
    add("--script", nargs=argparse.REMAINDER, metavar="...", help=script_help)
    start = parser.add_argument_group("starting the ranks, as samestep launch does")
    add = start.add_argument
    add("--nproc-per-node", metavar="N", help="ranks: a number, gpu, cpu or auto (one per GPU, else 1)")
    add("--nnodes", metavar="N", help="nodes that are looked at together; the same command on each")
    add("--node-rank", type=int, metavar="R", help="this node's place among them, from 0")
    add("--rdzv-endpoint", metavar="H:P", help="where the nodes meet: one of them, and a free port there")
    add("--rdzv-id", metavar="ID", help="the same on all nodes")
    add("--rdzv-secret", metavar="FILE", help="holds a secret that all nodes know; default: SAMESTEP_RDZV_SECRET")
    add("--rdzv-timeout", type=_positive, metavar="S", help="seconds to wait for the other nodes; default: 300")
    values = vars(parser.parse_args(list(arguments)))
    started = Start(**{name: values.pop(name) for name in Start.__dataclass_fields__})
    script = values.pop("script")
    if script is not None and not [word for word in script if word != "-m"]:
        parser.error("--script needs a script")
    if values["device"] == "cpu" and started.nproc_per_node == "gpu":
        raise Error("--nproc-per-node gpu and --device cpu contradict each other: leave one of them out")
    return Options(script=tuple(script or ()), **values), started


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number
