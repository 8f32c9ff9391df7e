"""A script that changes something in a pass over the micro-batches of a step: `collects.py D KIND WHEN`.

KIND is what it collects for a further pass: "embeddings", for the contrastive loss of docs/techniques.md, or "noise",
which each rank uses again by position; or "values", which it gathers by `step.gather`. Or the script changes batches
in place: "scaled" in its only pass, "scaled twice" in both.
Rank 1 dies WHEN step 3 of the first start is in a pass or between the two.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import samestep

DOOMED = 3


def main() -> None:
    directory, kind, fatal = sys.argv[1:]
    run = samestep.Run(directory, batch_size=12, micro_batch_size=2, log_every=1, snapshot_every=2)
    data = torch.randn(48, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    run.prepare(model=model, optimizer=optimizer)

    def reach(when: str, number: int) -> None:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if (when, number) == (fatal, DOOMED) and os.environ["RANK"] == "1" and is_first:
            os.kill(os.getpid(), signal.SIGKILL)

    for step in run.steps(data, 6):
        own: list[Tensor] = []
        values = {}
        for x in step:
            if kind == "noise":
                own.append(torch.randn(4))
                step.backward((model(x) + own[-1]).square().mean())
            elif kind == "values":
                loss = model(x).square().mean()
                values[step.micro_batch] = loss.item()
                step.backward(loss)
            elif kind.startswith("scaled"):
                step.backward(model(x.mul_(0.5)).square().mean())
            else:
                with torch.no_grad():
                    own.append(F.normalize(model(x), dim=1))
            reach("first", step.number)
        reach("between", step.number)
        if kind == "noise":
            for k, x in enumerate(step):
                step.backward((model(x) * own[k]).mean())
                reach("second", step.number)
        elif kind == "values":
            run.log(sum=sum(step.gather(values)))
        elif kind == "scaled twice":
            for x in step:
                step.backward(model(x.mul_(0.5)).square().mean())
                reach("second", step.number)
        elif kind != "scaled":
            of_ranks = [own]
            if run.world_size > 1:
                of_ranks = [own] * run.world_size
                dist.all_gather_object(of_ranks, own)
            parts = [part for of_rank in of_ranks for part in of_rank]
            embeddings = torch.cat(parts).requires_grad_()
            loss = F.cross_entropy(embeddings @ embeddings.T / 0.1, torch.arange(len(embeddings)))
            gradients = torch.autograd.grad(loss, embeddings)[0].split([len(part) for part in parts])
            for x in step:
                step.backward((F.normalize(model(x), dim=1) * gradients[step.micro_batch]).sum(), weight=1)
                reach("second", step.number)
        optimizer.step()


if __name__ == "__main__":
    main()
