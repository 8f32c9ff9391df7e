"""CPU seconds of the recipe `gpt`, by those of nanoGPT's own script for the same run.

Shakespeare's characters, with the sizes of nanoGPT's README for a CPU. Each round runs both at the same time, on a core
each, and then with the cores exchanged. `NANOGPT` is a clone of github.com/karpathy/nanoGPT, in which
`data/shakespeare_char/prepare.py` has run.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import build_parser, print_json, print_machine, print_table

TARGET = 1.0
SIZES = (
    "--device=cpu --compile=False --eval_iters=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 "
    "--dropout=0.0 --always_save_checkpoint=False"
)
RECIPE = (
    "--vocabulary-size 65 --context 64 --batch-size 12 --micro-batch-size 12 --lr 1e-3 --warm-up 100 --beta2 0.99 "
    "--held-out 0.1 --validate-samples 12"
)


def start(arguments: list[str], core: int, directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )


def compute_cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Wait for a process. Returns its CPU seconds and those of its children."""
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{process.args!r} has failed")
    return used.ru_utime + used.ru_stime


def run_both(nanogpt: Path, num_steps: int, cores: tuple[int, int]) -> tuple[float, float]:
    """Return the CPU seconds of nanoGPT's script and of the recipe."""
    text = (nanogpt / "data/shakespeare_char/input.txt").read_text()
    characters = sorted(set(text))
    with tempfile.TemporaryDirectory() as name:
        data = Path(name, "input.npy")
        np.save(data, np.array([characters.index(each) for each in text], np.uint16))
        steps = [f"--max_iters={num_steps}", f"--lr_decay_iters={num_steps}", f"--eval_interval={num_steps}"]
        theirs = ["train.py", "config/train_shakespeare_char.py", *SIZES.split(), f"--out_dir={name}/out", *steps]
        ours = ["-m", "samestep", "train", "gpt", "--data", str(data), *RECIPE.split(), "--run-dir", f"{name}/run"]
        ours += ["--steps", str(num_steps), "--validate-every", str(num_steps)]
        processes = [start(theirs, cores[0], nanogpt), start(ours, cores[1], Path(name))]
        first, second = map(compute_cpu_s, processes)
        return first, second


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("nanogpt", type=Path, metavar="NANOGPT", help="clone of nanoGPT")
    parser.add_argument("--rounds", type=int, default=1, help="how often to run both in both ways")
    parser.add_argument("--steps", type=int, default=2000, help="steps of a run")
    args = parser.parse_args()
    num_steps = 50 if args.quick else args.steps
    one, other = sorted(os.sched_getaffinity(0))[:2]
    measured = [run_both(args.nanogpt, num_steps, cores) for cores in [(one, other), (other, one)] * args.rounds]
    ratio = statistics.geometric_mean(ours / theirs for theirs, ours in measured)
    if args.json:
        print_json(cpu_s=measured, ratio=ratio)
        return
    print_machine()
    rows = [[f"{theirs:.0f}", f"{ours:.0f}", f"{ours / theirs:.3f}"] for theirs, ours in measured]
    print_table(["nanoGPT, CPU s", "recipe gpt", "by nanoGPT's"], rows)
    print(f"mean: {ratio:.3f} (<= {TARGET:g} {'met' if ratio <= TARGET else 'MISSED'})")


if __name__ == "__main__":
    main()
