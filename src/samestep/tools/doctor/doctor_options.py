"""The options of `samestep doctor`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.config import name_flag, to_flags
from samestep.errors import Error

DESCRIPTION = """\
Checks and measures this machine, or a whole cluster, before training, and gives advice: versions, devices, cores and
threads, limits, network and clocks, the directory for runs, collectives and links; with --script also whether the data
loader keeps up with the model.

  samestep doctor                        this machine, one rank per GPU (without GPUs one)
  samestep doctor --nproc-per-node 4     four ranks here, with collectives
  samestep doctor --nnodes 2 --rdzv-endpoint HOST:29400 --nproc-per-node 8 --run-dir /shared/runs
                                         on every node, as with samestep launch
  torchrun ... -m samestep doctor        under any launcher, on all its ranks; also srun samestep doctor
  samestep doctor --nproc-per-node 2 --script train.py --lr 0.1
                                         also trains for a few seconds, in a temporary directory

Each line gives pass, warn or FAIL, the result, and advice. Bus bandwidth is defined as in nccl-tests.
Exit code: 0; 1 if a check fails; 2 for invalid arguments.
"""


@dataclass(frozen=True)
class Options:
    """The options for every rank.

    Attributes:
        json: print one JSON object instead of the table.
        run_dir: directory for runs; None: `runs` in the working directory.
        device: "cpu" or "cuda"; None: CUDA if available.
        num_threads: per rank; None: torch's default.
        batch_size, micro_batch_size: replace those of the script.
        script: a script, or -m and a module, and its arguments; trained for a moment.
    """

    json: bool = False
    run_dir: str | None = None
    device: str | None = None
    num_threads: int | None = None
    batch_size: int | None = None
    micro_batch_size: int | None = None
    script: tuple[str, ...] = ()

    def to_arguments(self) -> list[str]:
        """Return the words that `parse` converts to these options."""
        given = {name: value for name, value in vars(self).items() if name != "script" and value not in (None, False)}
        return to_flags(given) + (["--script", *self.script] if self.script else [])


@dataclass(frozen=True)
class Start:
    """The options for starting the ranks, as in `samestep launch`."""

    nproc_per_node: str | None = None
    nnodes: str | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_secret: str | None = None
    rdzv_timeout: int | None = None

    @property
    def given(self) -> list[str]:
        """The options that were given, as they are written."""
        return [name_flag(name) for name, value in vars(self).items() if value is not None]


def parse(arguments: Sequence[str]) -> tuple[Options, Start]:
    """Parse the arguments after `samestep doctor`.

    Raises:
        SystemExit: --help, or invalid arguments (2).
        Error: options contradict each other.
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
    add("--run-dir", metavar="DIR", help="directory for runs; default: runs in the working directory")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    add("--num-threads", type=_positive, metavar="N", help="CPU threads per rank, as for samestep.Run")
    add("--batch-size", type=_positive, metavar="N", help="batch size of the script")
    add("--micro-batch-size", type=_positive, metavar="N", help="micro-batch size of the script")
    script_help = "a script (or -m MODULE) and its arguments, trained for a moment on one node; must come last"
    add("--script", nargs=argparse.REMAINDER, metavar="...", help=script_help)
    start = parser.add_argument_group("starting the ranks, as samestep launch does")
    add = start.add_argument
    add("--nproc-per-node", metavar="N", help="ranks: a number, gpu, cpu or auto (one per GPU, else 1)")
    add("--nnodes", metavar="N", help="number of nodes; run the same command on each")
    add("--node-rank", type=int, metavar="R", help="rank of this node, from 0")
    add("--rdzv-endpoint", metavar="H:P", help="rendezvous: one of the nodes, and a free port there")
    add("--rdzv-id", metavar="ID", help="name of the launch, the same on all nodes")
    add("--rdzv-secret", metavar="FILE", help="file with a secret that all nodes share; default: SAMESTEP_RDZV_SECRET")
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
