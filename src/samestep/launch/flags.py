"""The options of `launch`, and its target. Imports nothing slow."""

from dataclasses import replace
from typing import Any

from samestep.config import OPTIONS, Option, whole
from samestep.errors import Error
from samestep.plan.sizes import check_positive

FLAGS: dict[str, Option] = {
    "nproc_per_node": Option(
        str, "N", "ranks per node: a number, gpu (one per GPU), cpu (one per core) or auto (gpu, else 1)"
    ),
    "show_ranks": Option(str, "R", "ranks whose output is shown: all, or a list such as 0,2; default: 0"),
    "max_restarts": Option(
        int, "N", "how often to restart all ranks from the newest snapshot after one has failed; default: 0", whole(0)
    ),
    "heal": Option(bool, "", "if a rank dies, the others compute its micro-batches, and continue"),
    "nnodes": Option(str, "N", "number of machines; default: 1"),
    "node_rank": Option(int, "R", "number of this machine: 0 at --rdzv-endpoint"),
    "rdzv_endpoint": Option(str, "H:P", "where the machines meet: the address of node 0 ([v6]) and a free port there"),
    "rdzv_secret": Option(
        str, "FILE", "file with a secret that all nodes share and only you can read; default: SAMESTEP_RDZV_SECRET"
    ),
    "rdzv_timeout": Option(int, "S", "seconds to wait for the other nodes; default: 300", whole(1)),
    "tf_config": Option(bool, "", "set TF_CONFIG in each rank, for TensorFlow's MultiWorkerMirroredStrategy"),
    **OPTIONS,
    # `Run` checks the two sizes together.
    **{name: replace(OPTIONS[name], check=check_positive) for name in ("batch_size", "micro_batch_size")},
}

# Options of torchrun that `launch` accepts.
TORCHRUN: dict[str, Option] = {
    "standalone": Option(bool, "", "one node"),
    "rdzv_backend": Option(str, "B", "c10d or static"),
    "master_addr": Option(str, "HOST", "the host of --rdzv-endpoint"),
    "master_port": Option(int, "PORT", "the port of --rdzv-endpoint"),
}


def translate_torchrun(values: dict[str, Any]) -> None:
    """Replace the options of TORCHRUN by those of `launch`. Raises Error if they have no equivalent."""
    backend = values.pop("rdzv_backend", "c10d")
    if backend not in ("c10d", "static"):
        raise Error(
            f"launch has no --rdzv-backend {backend}: one of the nodes is the rendezvous, as with c10d; leave it out",
            code="SS103",
        )
    host = values.pop("master_addr", None)
    port = values.pop("master_port", None)
    nnodes = values.get("nnodes", "1")
    if values.pop("standalone", False):
        if nnodes not in ("1", "1:1"):
            raise Error(f"--standalone is for one node, and --nnodes is {nnodes}: leave one of them out", code="SS104")
        values.pop("rdzv_endpoint", None)
    elif nnodes not in ("1", "1:1") and (host or port):
        if host is None or "rdzv_endpoint" in values:
            raise Error(
                "the rendezvous is --rdzv-endpoint HOST:PORT, or --master-addr and --master-port: give one",
                code="SS104",
            )
        host = f"[{host}]" if ":" in host else host
        values["rdzv_endpoint"] = host if port is None else f"{host}:{port}"


def parse_sizes(option: str, text: str) -> list[int]:
    """Parse numbers of ranks, such as "1,2,4". Raises Error, with the option's name, if they are not."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise Error(f"{option} takes numbers of ranks such as 1,2,4, not {text!r}", code="SS101")
    return [*dict.fromkeys(map(int, parts))]
