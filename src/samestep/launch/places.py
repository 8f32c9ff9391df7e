"""Where the ranks of a node stand among all, and the environment that tells them."""

import secrets
import sys
from dataclasses import dataclass, field

from samestep.config import Overrides, to_variables
from samestep.world.environment import SECRET, Restart, child_variables

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Where the ranks of a node stand among all, and where all meet.

    Attributes:
        host, port: of the store that they meet in.
        interface: by which they reach each other; "": not known.
        num_restarts, restart: how often they were started again, and why the last time.
        secret: for all ranks, the same on all nodes.
    """

    port: int
    host: str = HOST
    interface: str = "lo" if sys.platform == "linux" else ""  # else gloo asks what address the host's name has
    node: int = 0
    num_nodes: int = 1
    first_rank: int = 0
    world_size: int | None = None
    num_restarts: int = 0
    restart: Restart | None = None
    secret: str = field(default_factory=secrets.token_hex)


def build_variables(num_ranks: int, place: Place, overrides: Overrides) -> list[dict[str, str]]:
    """The environment of each of the `num_ranks` ranks on this machine."""
    defaults = {
        "OMP_NUM_THREADS": str(overrides.get("num_threads", 1)),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # must be there before CUDA starts, for determinism
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if place.interface:
        defaults["GLOO_SOCKET_IFNAME"] = place.interface
    if place.interface and place.num_nodes > 1:
        defaults["NCCL_SOCKET_IFNAME"] = place.interface
    common = {
        **defaults,
        **child_variables(),
        **to_variables(overrides),
        **(place.restart.to_variables() if place.restart is not None else {}),
        SECRET: place.secret,
        "WORLD_SIZE": str(place.world_size or num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.port),
        # init_process_group joins the store that is there, instead of opening one in rank 0.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(place.num_restarts),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": str(place.port),
    }
    return [{**common, "RANK": str(place.first_rank + i), "LOCAL_RANK": str(i)} for i in range(num_ranks)]
