"""What Run's default arguments cost on one device: a script by the plain PyTorch loop that it was ported from.

The toy of the README's ladder, the `digits` recipe's model and a small transformer, each at several batch sizes, on one
rank of one thread: without a run directory, and with one. The first row also has README's script as printed, in 4
micro-batches and with a directory, by a plain loop that accumulates 4 micro-batches. Beside each is its floor: a loop
by hand that does only what the same bits, the ledger's record and a checked snapshot after each epoch need on one rank.
`--micro-batches` adds runs of the same batch in that many micro-batches, from which the default of `micro_batch_size`
was chosen (docs/dev/micro_batches.md).
"""

from __future__ import annotations  # cloudpickle does not see the names in a local class's annotations

import hashlib
import io
import itertools
import os
import statistics
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.nn.functional as F
from common import (
    Times,
    build_contestant,
    build_parser,
    compute_ratio,
    measure,
    print_json,
    print_machine,
    print_table,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import samestep
from samestep.data.loader import seed_all
from samestep.recipes.digits import CNN, load_data

PLAIN, ACCUMULATING = "plain PyTorch loop", "plain loop, in 4"
DEFAULT, DIRECTORY, README = "samestep, default", "with a directory", "README's script"
FLOORS = {DEFAULT: "its floor", DIRECTORY: "floor with one", README: "README's floor"}
BY_ACCUMULATING, FLOOR_BY_ACCUMULATING = "README's by in 4", "its floor by in 4"
README_WORKLOAD, README_MICRO_BATCHES = ("toy", 32), 4
TARGET = 0.9  # of the plain loop's samples per second
VOCABULARY, LENGTH, WIDTH = 256, 64, 64


class Transformer(nn.Module):
    """Tokens (N, LENGTH) -> scores of the next ones (N, LENGTH, VOCABULARY): 2 layers, 0.13 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        scores: Tensor = self.head(self.layers(self.tokens(tokens) + self.positions, mask=mask, is_causal=True))
        return scores


def score_tokens(scores: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class Workload:
    """What both loops train, at these batch sizes."""

    batch_sizes: tuple[int, ...]
    steps_per_block: int
    build_data: Callable[[], Dataset[Any]]
    build_model: Callable[[], nn.Module]
    compute_loss: Callable[[Tensor, Tensor], Tensor]


def build_toy_data() -> Dataset[Any]:
    return TensorDataset(torch.rand(2048, 20), torch.rand(2048, 1))


def build_toy() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))


def build_sentences() -> Dataset[Any]:
    tokens = torch.randint(VOCABULARY, (512, LENGTH + 1))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


@dataclass(frozen=True)
class RunArgs:
    """How long to measure, by which clock, and where runs with a directory are."""

    num_rounds: int
    num_steps: int | None
    cpu: bool
    directory: str


WORKLOADS = {
    "toy": Workload((32, 128), 64, build_toy_data, build_toy, F.mse_loss),
    "digits": Workload((32, 96), 4, lambda: load_data()[0], CNN, F.cross_entropy),
    "transformer": Workload((8, 32), 2, build_sentences, Transformer, score_tokens),
}


def run_plain(workload: Workload, batch_size: int, num_micro_batches: int = 1) -> Iterator[None]:
    loader = DataLoader(workload.build_data(), batch_size=batch_size // num_micro_batches, shuffle=True)
    model = workload.build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    while True:
        for number, (inputs, targets) in enumerate(loader, start=1):
            loss = workload.compute_loss(model(inputs), targets)
            (loss if num_micro_batches == 1 else loss / num_micro_batches).backward()
            if number % num_micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad()
                yield


def run_by_hand(
    workload: Workload, batch_size: int, directory: Path | None = None, num_micro_batches: int = 1
) -> Iterator[None]:
    """A loop on one rank whose random numbers and order of additions would be the same on several ranks.

    With a directory, it writes a row per step, with the checksum of a row of the gradient, and a snapshot per epoch.
    """
    loader = DataLoader(workload.build_data(), batch_size=batch_size // num_micro_batches, shuffle=True)
    model = workload.build_model()
    params = list(model.parameters())
    optimizer = torch.optim.Adam(params, lr=1e-3)
    rows = None if directory is None else (directory / "rows").open("wb")
    for epoch in itertools.count():
        pending: list[tuple[int, list[Tensor]]] = []  # of the tree: number of micro-batches, and their sum
        for number, (inputs, targets) in enumerate(loader, start=1):
            if (number - 1) % num_micro_batches == 0:
                seed_all(number)  # of the step's body, which may draw numbers before its micro-batches
            seed_all(number)
            workload.compute_loss(model(inputs), targets).backward()
            if num_micro_batches > 1:
                size, grads = 1, [cast(Tensor, param.grad) for param in params]
                optimizer.zero_grad()
                while pending and pending[-1][0] == size:
                    left = pending.pop()[1]
                    torch._foreach_add_(left, grads)
                    size, grads = 2 * size, left
                pending.append((size, grads))
                if size < num_micro_batches:
                    continue
                pending.clear()
                torch._foreach_div_(grads, num_micro_batches)
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad
            seed_all(number)  # of the lines after the micro-batches
            if rows is not None:
                checksum = zlib.crc32(cast(Any, params[number % len(params)].grad)[0].numpy())
                rows.write(struct.pack("<QQ", number, checksum))
            optimizer.step()
            optimizer.zero_grad()
            yield
        if directory is not None and rows is not None:
            save(directory, epoch, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, rows)


def save(directory: Path, epoch: int, state: dict[str, Any], rows: IO[bytes]) -> None:
    """Writes a snapshot with its hash, such that a crash of the machine leaves the last one or this one whole."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    snapshot = directory / f"{epoch}.new"
    with open(snapshot, "wb") as file:
        file.write(hashlib.sha256(buffer.getbuffer()).digest())
        file.write(buffer.getbuffer())
        sync(file)
    sync(rows)
    snapshot.rename(directory / f"{epoch}.pt")
    (directory / f"{epoch - 1}.pt").unlink(missing_ok=True)
    folder = os.open(directory, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def run_samestep(
    workload: Workload, batch_size: int, micro_batch_size: int | None, run_dir: Path | None = None
) -> Iterator[None]:
    run = samestep.Run(run_dir, batch_size=batch_size, micro_batch_size=micro_batch_size, device="cpu")
    model = workload.build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run.prepare(model=model, optimizer=optimizer)
    for epoch in run.epochs(workload.build_data(), 10**6):
        for step in epoch:
            for inputs, targets in step:
                step.backward(workload.compute_loss(model(inputs), targets))
            optimizer.step()
            try:
                yield
            except GeneratorExit:  # all is measured: the run ends as a script's does
                run.stop()


def create(directory: Path) -> Path:
    directory.mkdir()
    return directory


def run_rank(name: str, batch_size: int, micro_batches: list[int], args: RunArgs) -> Times:
    torch.set_num_threads(1)
    sys.stdout = io.StringIO()  # samestep's own lines, up to the end of the process
    workload = WORKLOADS[name]
    directory = Path(tempfile.mkdtemp(dir=args.directory))
    loops = {
        PLAIN: run_plain(workload, batch_size),
        DEFAULT: run_samestep(workload, batch_size, None),
        FLOORS[DEFAULT]: run_by_hand(workload, batch_size),
        DIRECTORY: run_samestep(workload, batch_size, None, directory / "default"),
        FLOORS[DIRECTORY]: run_by_hand(workload, batch_size, create(directory / "by_hand")),
    }
    if (name, batch_size) == README_WORKLOAD:
        num = README_MICRO_BATCHES
        loops[ACCUMULATING] = run_plain(workload, batch_size, num)
        loops[README] = run_samestep(workload, batch_size, batch_size // num, directory / "readme")
        loops[FLOORS[README]] = run_by_hand(workload, batch_size, create(directory / "readme_by_hand"), num)
    for num in micro_batches:
        if batch_size % num == 0:
            loops[f"in {num}"] = run_samestep(workload, batch_size, batch_size // num)
    return measure(
        [build_contestant(title, loop, deterministic="plain" not in title) for title, loop in loops.items()],
        num_rounds=args.num_rounds, steps_per_block=args.num_steps or workload.steps_per_block,
        read_clock=time.process_time if args.cpu else time.perf_counter,
    )  # fmt: skip


def main() -> None:
    parser = build_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="what to train")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[], help="further runs in so many of them")
    parser.add_argument("--rounds", type=int, default=31, help="blocks of each contestant, after one to warm up")
    parser.add_argument("--cpu", action="store_true", help="samples per CPU second of all threads, not per second")
    args = parser.parse_args()
    if not args.json:
        print_machine()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        run_args = RunArgs(1 if args.quick else args.rounds, 2 if args.quick else None, args.cpu, directory)
        for name in args.workloads:
            for batch_size in WORKLOADS[name].batch_sizes[: 1 if args.quick else None]:
                times = samestep.spawn(
                    run_rank, nprocs=1, args=(name, batch_size, args.micro_batches, run_args), device="cpu"
                )
                rate = {PLAIN: batch_size / statistics.median(times[PLAIN])}
                shares = {other: compute_ratio(times, PLAIN, other) for other in times if other != PLAIN}
                if README in times:
                    shares[BY_ACCUMULATING] = compute_ratio(times, ACCUMULATING, README)
                    shares[FLOOR_BY_ACCUMULATING] = compute_ratio(times, ACCUMULATING, FLOORS[README])
                results[f"{name}, batches of {batch_size}"] = rate | shares
    if args.json:
        print_json(results=results, target=TARGET)
        return
    columns = [DEFAULT, FLOORS[DEFAULT], DIRECTORY, FLOORS[DIRECTORY], ACCUMULATING, README]
    columns += [BY_ACCUMULATING, FLOOR_BY_ACCUMULATING, *(f"in {num}" for num in args.micro_batches)]
    rows = []
    for title, row in results.items():
        mark = "met" if row[DEFAULT] >= TARGET else "MISSED"
        cells = [f"{row[column]:.2f}" if column in row else "" for column in columns]
        rows.append([title, f"{row[PLAIN]:,.0f}", *cells, f">= {TARGET:g} {mark}"])
    unit = "CPU s" if args.cpu else "s"
    print_table([f"samples/{unit}, by the plain loop's", f"{PLAIN}, samples/{unit}", *columns, "default"], rows)


if __name__ == "__main__":
    main()
