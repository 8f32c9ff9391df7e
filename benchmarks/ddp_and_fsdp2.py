"""GPT-2 by DDP and by FSDP2 in a loop written by hand, each also with torch's deterministic algorithms.

`certificate.py` starts it by torchrun with the arguments of the recipe `gpt`, whose model, batch, micro-batches,
precision, optimizer and clipping it has. The last micro-batch of a step exchanges the gradients. Rank 0 writes the
seconds per step into the file that the first argument names.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Contestant, measure
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from samestep.recipes import gpt
from samestep.recipes.gpt import GPT2, PRESETS, GPT2Config, TransformerBlock

NUM_ROUNDS = 3


def read_arguments(words: Sequence[str]) -> tuple[SimpleNamespace, GPT2Config]:
    """Return the options of the recipe, and the sizes of its model."""
    options = gpt.main.make_context("gpt", [*words]).params
    sizes = {field: options[name] for name, field in gpt.SIZES.items() if options[name]}
    return SimpleNamespace(**options), replace(
        PRESETS[options["preset"]], vocabulary_size=options["vocabulary_size"], **sizes
    )


def train(
    args: SimpleNamespace, config: GPT2Config, model: nn.Module, set_sync: Callable[[bool], None], device: torch.device
) -> Iterator[None]:
    """Yield after each step.

    Args:
        set_sync: called with whether the next backward pass exchanges gradients.
    """
    tokens = torch.tensor(gpt.read_tokens(None), device=device)  # no copies in the steps: the fastest input
    offsets = torch.arange(config.context + 1, device=device)
    optimizer = gpt.build_optimizer(model, 1e-4, args.weight_decay, fused=False)  # type: ignore[arg-type]  # wrapped
    num_micro_batches = args.batch_size // args.micro_batch_size // dist.get_world_size()

    def load() -> Tensor:
        first = torch.randint(len(tokens) - config.context, (args.micro_batch_size, 1), device=device)
        return tokens[first + offsets].long()

    while True:
        for number in range(num_micro_batches):
            set_sync(number == num_micro_batches - 1)
            batch = load()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            (loss / num_micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def build_contestants(args: SimpleNamespace, config: GPT2Config, device: torch.device) -> Iterator[Contestant]:
    replica = DistributedDataParallel(GPT2(config).to(device))
    sharded = GPT2(config).to(device)
    for module in sharded.modules():
        if isinstance(module, TransformerBlock):
            fully_shard(module)
    unit = fully_shard(sharded)

    def set_sync(is_on: bool) -> None:
        replica.require_backward_grad_sync = is_on

    loops = {
        "DDP": train(args, config, replica, set_sync, device),
        "FSDP2": train(args, config, sharded, unit.set_requires_gradient_sync, device),
    }
    for name, steps in loops.items():

        def run_steps(num_steps: int, steps: Iterator[None] = steps) -> None:
            for _ in range(num_steps):
                next(steps)
            if device.type == "cuda":
                torch.cuda.synchronize()

        yield Contestant(name, run_steps)
        yield Contestant(f"{name}, deterministic", run_steps, deterministic=True)


def main() -> None:
    path, device_type, *words = sys.argv[1:]
    args, config = read_arguments(words)
    device = torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # as many as a rank of samestep has
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    contestants = [*build_contestants(args, config, device)]
    times = measure(contestants, num_rounds=NUM_ROUNDS, steps_per_block=max(1, args.steps // 20))
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps({name: statistics.median(values) for name, values in times.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
