"""How well `samestep scale` predicts: fitted to 1 and 2 ranks, against 3 and 4 ranks, 2 hosts, and slow links.

A transformer of 12 micro-batches per step. Each rank has a CPU quota, so that 4 ranks on 2 cores behave like machines.
Ranks on one host first: sizes 1 to 4 in turns, as the command measures them. Then a rank on each of two hosts (network
namespaces), the link unshaped, at 1 Gbit/s and at 100 Mbit/s. The prediction for the hosts is the model of the one host
with buckets for a network and the link's latency and time per byte, which the start on the hosts measures. Needs root.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import build_parser, print_json, print_machine, print_table
from two_hosts import INTERFACE, Host, open_two_hosts, shape_link, start_on

from samestep.config import to_variables
from samestep.tools.scale.cpu_quota import open_quota
from samestep.tools.scale.measurement import Size, add_steps
from samestep.tools.scale.step_model import Link, StepModel
from samestep.tools.traced_script import read_lines
from samestep.world.environment import HOOK, TRACE

TARGET = 0.1
NUM_MICRO_BATCHES = 12
PORT = 29400
WARM_UP = 3
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


def measure_one_host(script: list[str], folder: Path, args: Any) -> dict[str, Any]:
    """The result of `samestep scale` for 1 to 4 ranks."""
    words = [sys.executable, "-m", "samestep", "scale", "--json", "--world-sizes", "1,2,3,4"]
    words += ["--warm-up", str(WARM_UP), "--steps", str(args.steps), "--repeats", str(args.repeats)]
    words += ["--cpu-quota", str(args.quota), *script]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"samestep scale failed:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure_two_hosts(hosts: list[Host], script: list[str], folder: Path, args: Any) -> Size:
    """The steps of a rank on each host."""
    size = Size(2, NUM_MICRO_BATCHES)
    with open_quota(args.quota, 2) as quota:
        for number in range(args.repeats):
            place = Path(tempfile.mkdtemp(dir=folder))
            options = {
                "run_dir": place / "run", "max_steps": WARM_UP + args.steps, "snapshot_every": "never",
                "compare_every": "never", "check_compute_every": "never",
            }  # fmt: skip
            variables = to_variables(options) | {"GLOO_SOCKET_IFNAME": INTERFACE}
            variables[TRACE] = json.dumps({"dir": str(place), "paces": True, "scale": True})
            variables[HOOK] = json.dumps(["samestep.tools.scale.cpu_quota", quota])
            endpoint = f"{hosts[0].address}:{PORT + number}"
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
    return size


def predict_hosts(model: StepModel, links: Mapping[str, float]) -> float:
    link = Link(links["message_s"], links["byte_s"])
    return replace(model, ranks_per_host=1, remote=link).predict(NUM_MICRO_BATCHES, 2)


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each start")
    parser.add_argument("--repeats", type=int, default=3, help="starts of each case")
    parser.add_argument("--quota", type=float, default=0.2, help="cores per rank")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.repeats = 3, 1
    rows: list[dict[str, Any]] = []

    def add(case: str, predicted_s: float, measured_s: float, error: float) -> None:
        wrong = predicted_s / measured_s - 1
        rows.append(
            {"case": case, "predicted_s": predicted_s, "measured_s": measured_s, "spread": error, "error": wrong}
        )

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "train.py").write_text(SCRIPT)
        script = [str(folder / "train.py"), *(["1", "64"] if args.quick else ["2", "256"])]
        found = measure_one_host(script, folder, args)
        model = StepModel.from_json(found["model"])
        for row in found["strong"]["sizes"]:
            size = row["world_size"]
            fitted = " (fitted)" if size <= 2 else ""
            add(f"{size} ranks, one host{fitted}", model.predict(NUM_MICRO_BATCHES, size), row["step_s"], row["error"])
        hosts = stack.enter_context(open_two_hosts())
        for mbit in (None, 1000, 100):
            shape_link(hosts, mbit)
            size = measure_two_hosts(hosts, script, folder, args)
            name = "unshaped" if mbit is None else f"{mbit} Mbit/s"
            add(f"2 hosts, {name}", predict_hosts(model, size.facts["links"]), size.step_s, size.error)
    if args.json:
        print_json(rows=rows, model=found["model"])
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
