"""Measures the time of messages between the ranks of a run, for the model of `samestep scale`."""

import time
from collections.abc import Callable
from statistics import median

import torch

from samestep.engine import routes
from samestep.world.group import Group

SMALL_BYTES = 1 << 10
LARGE_BYTES = 2 << 20
NUM_SMALL = 30
NUM_LARGE = 6


def measure_links(group: Group) -> dict[str, float]:
    """Return the time of a message as alpha + beta * bytes (Hockney, "The communication challenge for MPP", 1994).

    Collective. Every rank sends to every other one. Messages go in both directions at once, as in a step.

    Returns:
        `message_s`: alpha in seconds. `byte_s`: beta in seconds per byte. `socket_message_s`: alpha of the sockets
        between the ranks of one host, which carry small messages; without them, the same as `message_s`. `cpu_byte_s`:
        CPU seconds of all threads of this process per byte that it sends and receives.
    """
    device = torch.device("cpu") if group.needs_staging(group.device) else group.device
    num_peers = group.world_size - 1

    def exchange(num_bytes: int, sockets: bool) -> Callable[[], None]:
        rows = torch.zeros(group.world_size, num_bytes, dtype=torch.uint8, device=device)
        local = group.local_sockets if sockets else None

        def run() -> None:
            routes.wait_all([routes.PendingOp(routes.run_direct(rows, group.rank, 0, local_sockets=local))])

        return run

    small_s, small_cpu_s = _time(exchange(SMALL_BYTES, False), NUM_SMALL)
    large_s, large_cpu_s = _time(exchange(LARGE_BYTES, False), NUM_LARGE)
    socket_s = _time(exchange(SMALL_BYTES, True), NUM_SMALL)[0] if group.local_sockets is not None else small_s
    num_bytes = num_peers * (LARGE_BYTES - SMALL_BYTES)
    return {
        "message_s": small_s / num_peers,
        "byte_s": max(0.0, large_s - small_s) / num_bytes,
        "socket_message_s": socket_s / num_peers,
        "cpu_byte_s": max(0.0, large_cpu_s - small_cpu_s) / num_bytes,
    }


def _time(run: Callable[[], None], num: int) -> tuple[float, float]:
    """Return the median and the mean CPU seconds of a call. A first one, which connects ranks, is left out."""
    run()
    seconds = []
    cpu_s = time.process_time()
    for _ in range(num):
        began_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began_s)
    return median(seconds), (time.process_time() - cpu_s) / num
