"""What torch.compile costs on 1 and 2 ranks of a host, with an empty cache and with a full one.

Of each command: seconds until it ends, CPU seconds of all its processes, and how many libraries g++ has linked.
Inductor's file locks let each be linked once per host. The ranks repeat tracing and lowering, in Python, and the
preprocessing of a header. A script in front of g++ counts its runs.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import build_parser, print_json, print_machine, print_table
from torch import nn

import samestep

TWO_LAYERS = ["launch", __file__, "--train"]
GPT = ["train", "gpt", "--compile", "--steps", "2", "--batch-size", "8", "--validate-samples", "8"]
MODELS = {"two layers": TWO_LAYERS, "gpt tiny": GPT}


def train() -> None:
    run = samestep.Run(None, batch_size=8, micro_batch_size=4)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiled = torch.compile(model)
    run.prepare(model=compiled, optimizer=optimizer)
    for step in run.steps(torch.ones(64, 16), 2):
        for x in step:
            step.backward(compiled(x).square().mean())
        optimizer.step()


def read_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_command(command: list[str], num_ranks: int, root: Path) -> dict[str, float]:
    """Run a command of samestep whose compilers keep all they write in `root`."""
    env = os.environ | {
        "PATH": f"{root}:{os.environ['PATH']}", "CXX": "g++", "COMPILED": str(root / "log"), "TMPDIR": str(root),
        "TORCHINDUCTOR_CACHE_DIR": str(root / "cache"), "TRITON_CACHE_DIR": str(root / "triton"),
    }  # fmt: skip
    (root / "log").write_text("")
    name, *arguments = command
    words = [name, "--nproc-per-node", str(num_ranks), *arguments]
    words = [*words, "--run-dir", str(root / str(time.monotonic_ns()))] if name == "train" else words
    cpu_s, began = read_cpu_s(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "samestep", *words], env=env, cwd=root, check=True, stdout=subprocess.DEVNULL)
    seconds = {"s": time.perf_counter() - began, "cpu_s": read_cpu_s() - cpu_s}
    return seconds | {"linked": (root / "log").read_text().count(" -shared ")}


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--train", action="store_true", help="be a rank of the first model")
    args = parser.parse_args()
    if args.train:
        train()
        return
    compiler = shutil.which("g++")
    if compiler is None:
        sys.exit("there is no g++")
    rows: dict[str, dict[str, float]] = {}
    for model, command in list(MODELS.items())[: 1 if args.quick else None]:
        for num_ranks in (1, 2):
            with tempfile.TemporaryDirectory() as directory:
                root = Path(directory)
                (root / "g++").write_text(f'#!/bin/sh\necho "$@" >> "$COMPILED"\nexec {compiler} "$@"\n')
                (root / "g++").chmod(0o755)
                for cache in ("empty", "full"):
                    rows[f"{model}, {num_ranks} ranks, {cache} cache"] = measure_command(command, num_ranks, root)
    if args.json:
        print_json(commands=rows)
        return
    print_machine()
    cells = [[name, f"{row['s']:.0f}", f"{row['cpu_s']:.0f}", f"{row['linked']}"] for name, row in rows.items()]
    print_table(["", "s", "CPU s", "libraries linked"], cells)


if __name__ == "__main__":
    main()
