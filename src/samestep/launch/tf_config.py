"""TF_CONFIG, which lists the workers of TensorFlow's MultiWorkerMirroredStrategy: here, the ranks.

The format: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
"""

import json
import os
import socket
from typing import Any

from samestep.errors import Error
from samestep.world.environment import read_environment, read_master
from samestep.world.host import find_source
from samestep.world.process_group import StoreExchange

TIMEOUT_S = 60.0  # for the other ranks, which all start at the same time


def begin(_: Any) -> None:
    """Set TF_CONFIG in this rank. Called in each rank before its script, see `set_hook`. Each worker gets a free port.

    Raises:
        Error: a rank did not start in time.
    """
    environment = read_environment()
    host, _port = read_master()
    address = find_source(host) or host
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as reserved:  # until every rank has a port
        exchange = StoreExchange(environment, TIMEOUT_S)
        port = reserved.getsockname()[1]
        own = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        workers = exchange.exchange("tf_config", own, TIMEOUT_S)
        if missing := [rank for rank in range(environment.world_size) if rank not in workers]:
            raise Error(
                f"rank {missing[0]} did not give its address for TF_CONFIG within {TIMEOUT_S:.0f} s", code="SS507"
            )
        exchange.exchange("tf_config/read", True, TIMEOUT_S)
    config = {
        "cluster": {"worker": [workers[rank] for rank in range(environment.world_size)]},
        "task": {"type": "worker", "index": environment.rank},
    }
    os.environ["TF_CONFIG"] = json.dumps(config)  # noqa: TID251 TensorFlow reads it
