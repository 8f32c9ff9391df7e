"""`samestep launch --tf-config`: TensorFlow finds the ranks as its workers."""

import json
from pathlib import Path
from typing import Any

from processes import Command

# Each rank listens at its own address, and connects to that of the next rank. Both are in TF_CONFIG.
MEET = """
import json, os, pathlib, socket, sys, time
config = json.loads(os.environ["TF_CONFIG"])
workers, own = config["cluster"]["worker"], config["task"]["index"]
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
places = [(host, int(port)) for host, port in (worker.rsplit(":", 1) for worker in workers)]
listener = socket.create_server(places[own])
pathlib.Path(f"config-{own}-{attempt}.json").write_text(json.dumps(config))
peer = (own + 1) % len(places)
while not os.path.exists(f"config-{peer}-{attempt}.json"):
    time.sleep(0.01)
connection = socket.create_connection(places[peer])
listener.accept()
if "fail" in sys.argv and attempt == "0" and own == 1:
    os._exit(3)
"""


def read_configs(directory: Path, attempt: int, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((directory / f"config-{rank}-{attempt}.json").read_text()) for rank in range(num_ranks)]


def test_ranks_of_a_machine_meet_again_after_a_restart(command: Command) -> None:
    command.write("meet.py", MEET)
    done = command.run("launch", "--nproc-per-node", "3", "--max-restarts", "1", "--tf-config", "meet.py", "fail")
    assert done.returncode == 0, done.stderr
    for attempt in range(2):
        configs = read_configs(command.directory, attempt, 3)
        assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in range(3)]
        (workers,) = {tuple(config["cluster"]["worker"]) for config in configs}
        assert len(set(workers)) == 3
        assert all(worker.startswith("127.0.0.1:") for worker in workers)
    command.assert_nothing_left()
