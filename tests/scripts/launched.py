"""A script for any launcher: `python launched.py [HOW]`. Each rank prints its place."""

import os
import sys

import torch
from support.tiny import Tiny

import samestep


def train(run_dir: str = "run") -> None:
    run = Tiny(run_dir).train().run
    print(f"rank {run.rank} of {run.world_size}, local {run.local_rank}", flush=True)


def train_in_group(rank: int, how: str) -> None:
    """Train as one of 2 ranks, in a process group that the script creates itself."""
    dist = torch.distributed
    if how == "env":
        dist.init_process_group("gloo", rank=rank, world_size=2)
    elif how == "file":
        dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
    elif how == "gpu":  # as nccl: for tensors on GPUs only
        create = dist.ProcessGroupGloo  # type: ignore[attr-defined]
        dist.Backend.register_backend("gpu", lambda *place: create(*place), devices=["cuda"])
        dist.init_process_group("gpu", rank=rank, world_size=2)
    elif how == "late":
        run = samestep.Run(None, batch_size=8)
        dist.init_process_group("gloo", rank=rank, world_size=2)
        run.prepare(model=torch.nn.Linear(1, 1))
    elif how == "other":
        os.environ |= {"RANK": str(1 - rank), "WORLD_SIZE": "2"}
        dist.init_process_group("gloo", rank=rank, world_size=2)
    samestep.Run(None, batch_size=8, micro_batch_size=4)  # the group serves several runs
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:]:
        torch.multiprocessing.start_processes(train_in_group, sys.argv[1:], nprocs=2, start_method="fork")  # type: ignore[attr-defined]
    else:
        train()
