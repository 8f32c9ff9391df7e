"""How well `samestep scale` predicts: fitted to 1 and 2 ranks, against 3 and 4 ranks, 2 hosts, and slow links.

A transformer of 12 micro-batches per step. Each rank has a CPU quota, so that 4 ranks on 2 cores behave like machines.
The cases are 1 to 4 ranks on one host, measured as the command does, and a rank on each of two hosts (network
namespaces), the link unshaped, at 1 Gbit/s and at 100 Mbit/s. They take turns, so that a change of the machine's speed
affects all. The prediction for the hosts is the model of the one host with buckets for a network and the link's latency
and time per byte, which the start on the hosts measures. Needs root.
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import build_parser, print_json, print_machine, print_table
from two_hosts import INTERFACE, Host, open_two_hosts, shape_link, start_on

from samestep.config import NO_INTERCEPTORS, to_variables
from samestep.console import format_ranks
from samestep.launch.target import Target
from samestep.tools.scale.cpu_quota import open_quota
from samestep.tools.scale.measurement import INTERCEPTOR, Size, Starts, add_steps
from samestep.tools.scale.step_model import LinkSpeed, StepModel, fit_model
from samestep.tools.traced_script import read_lines
from samestep.world.environment import HOOK, TRACE
from samestep.world.workdir import WorkDir

TARGET = 0.1
NUM_MICRO_BATCHES = 12
PORTS = itertools.count(29400)
LINKS = {"unshaped": None, "1 Gbit/s": 1000, "100 Mbit/s": 100}
WARM_UP = 3
FITTED = " (fitted)"
SCRIPT = f"""
import sys

sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from reduction import Sequences, Shape, Transformer, compute_loss

import samestep

shape = Shape(num_layers=int(sys.argv[1]), width=int(sys.argv[2]), num_heads=4, sequence=64)
run = samestep.Run("runs/scaling", batch_size={NUM_MICRO_BATCHES}, micro_batch_size=1)
model = Transformer(shape)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
run.prepare(model=model, optimizer=optimizer)
for step in run.steps(Sequences(shape), 10_000):
    for rows in step:
        step.backward(compute_loss(model, rows))
    optimizer.step()
"""


def start_on_two_hosts(size: Size, starts: Starts, hosts: list[Host]) -> None:
    """Start a rank on each host, and add what was measured."""
    place = Path(tempfile.mkdtemp(dir=starts.home))
    options = {
        "run_dir": place / "run", "max_steps": WARM_UP + starts.num_steps, "snapshot_every": "never",
        "compare_every": "never", **NO_INTERCEPTORS,
    }  # fmt: skip
    variables = to_variables(options) | {"GLOO_SOCKET_IFNAME": INTERFACE}
    variables[TRACE] = json.dumps({"interceptor": INTERCEPTOR, "dir": str(place)})
    variables[HOOK] = json.dumps(["samestep.tools.scale.cpu_quota", starts.quota])
    script, endpoint = starts.target.to_command()[1], f"{hosts[0].address}:{next(PORTS)}"
    words = [sys.executable, "-m", "samestep", "launch", "--nnodes", "2", "--rdzv-endpoint", endpoint, *script]
    with open(place / "said", "w+") as said:
        with start_on(hosts, [words, words], said, variables) as launchers:
            while any(launcher.poll() is None for launcher in launchers):
                time.sleep(0.1)
        said.seek(0)
        if any(launcher.returncode for launcher in launchers):
            sys.exit(f"the launchers failed:\n{said.read()}")
    ranks = [read_lines(place / f"rank-{rank}.jsonl") for rank in range(2)]
    size.facts = ranks[0][0]
    add_steps(size, [rank[1 + WARM_UP :] for rank in ranks], "2 hosts")


def predict_hosts(model: StepModel, links: Mapping[str, float]) -> float:
    link = LinkSpeed(links["message_s"], links["byte_s"])
    return replace(model, ranks_per_host=1, remote=link).predict(NUM_MICRO_BATCHES, 2)


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each start")
    parser.add_argument("--repeats", type=int, default=3, help="starts of each case")
    parser.add_argument("--quota", type=float, default=0.2, help="cores per rank")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.repeats = 3, 1
    one_host = {size: Size(size, NUM_MICRO_BATCHES) for size in (1, 2, 3, 4)}
    two_hosts = {link: Size(2, NUM_MICRO_BATCHES) for link in LINKS}
    with WorkDir("scaling-") as work, open_two_hosts() as hosts, open_quota(args.quota, max(one_host)) as quota:
        (work.path / "train.py").write_text(SCRIPT)
        target = Target("script", str(work.path / "train.py"), ["1", "64"] if args.quick else ["2", "256"])
        starts = Starts(target, {}, work.path, args.steps, WARM_UP, quota, work.lock.fileno())
        for _ in range(args.repeats):
            for size in one_host.values():
                starts.run(size, {})
            for link, mbit in LINKS.items():
                shape_link(hosts, mbit)
                start_on_two_hosts(two_hosts[link], starts, hosts)
    model = fit_model(one_host[1].to_json(), one_host[2].to_json(), args.quota)
    cases = [
        (f"{format_ranks(number)}, one host{FITTED * (number <= 2)}", size, model.predict(NUM_MICRO_BATCHES, number))
        for number, size in one_host.items()
    ]
    cases += [(f"2 hosts, {link}", size, predict_hosts(model, size.facts["links"])) for link, size in two_hosts.items()]
    rows: list[dict[str, Any]] = [
        {
            "case": case, "predicted_s": predicted_s, "measured_s": size.step_s, "spread": size.error,
            "error": predicted_s / size.step_s - 1,
        }
        for case, size, predicted_s in cases
    ]  # fmt: skip
    if args.json:
        print_json(rows=rows, model=model.to_json())
        return
    print_machine()
    print_table(
        ["case", "predicted ms", "measured ms", "standard error", f"prediction error (target {TARGET:.0%})"],
        [
            [
                row["case"], f"{1e3 * row['predicted_s']:,.0f}", f"{1e3 * row['measured_s']:,.0f}",
                f"{row['spread']:.1%}", f"{row['error']:+.1%}" + ("" if abs(row["error"]) <= TARGET else " MISSED"),
            ]
            for row in rows
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
