"""The options of `launch`, and its target. Imports nothing slow."""

from dataclasses import replace

from samestep.config import OPTIONS, Option, whole
from samestep.errors import Error
from samestep.plan.sizes import check_positive

MAX_LOCAL_RANKS = 1 << 12  # more than any machine runs, so a larger number is a typing error

FLAGS: dict[str, Option] = {
    "nproc_per_node": Option(int, "N", "ranks per node; default: one per GPU, else 1", whole(1, MAX_LOCAL_RANKS)),
    "show_all": Option(bool, "", "show the output of all ranks, not only of rank 0"),
    "max_restarts": Option(
        int, "N", "how often to restart all ranks from the newest snapshot after one has failed; default: 0", whole(0)
    ),
    "heal": Option(bool, "", "if a rank dies, or a node except node 0, the others continue in the same step"),
    "nnodes": Option(int, "N", "number of machines; default: 1", whole(1)),
    "node_rank": Option(int, "R", "number of this machine: 0 at --rdzv-endpoint"),
    "rdzv_endpoint": Option(str, "H:P", "where the machines meet: the address of node 0 ([v6]) and a free port there"),
    "rdzv_timeout": Option(int, "S", "seconds to wait for the other nodes; default: 300", whole(1)),
    "tf_config": Option(bool, "", "set TF_CONFIG in each rank, for TensorFlow's MultiWorkerMirroredStrategy"),
    **OPTIONS,
    # `Run` checks the two sizes together.
    **{name: replace(OPTIONS[name], check=check_positive) for name in ("batch_size", "micro_batch_size")},
}


def parse_sizes(text: str) -> list[int]:
    """Parse the value of --world-sizes, such as "1,2,4". Raises Error if it is none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise Error(f"--world-sizes takes numbers of ranks such as 1,2,4, not {text!r}", code="SS101")
    return [*dict.fromkeys(map(int, words))]
