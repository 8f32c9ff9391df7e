"""Example scripts, to run and to copy. Here is what they share: their options, the learning rate, the best snapshot."""

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from samestep.cli import Command, run

if TYPE_CHECKING:
    import torch

    from samestep import Run

COUNT = click.IntRange(min=1)
AMOUNT = click.FloatRange(min=0)
SHARE = click.FloatRange(0, 1)


class Recipe(Command):
    """The main function of a recipe, with its options. Call it with arguments; by default, those of the program."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.context_settings["show_default"] = True

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """Run the recipe. An uncaught Error ends the program with its message and exit code 2."""
        from samestep.train.stopping import report_errors
        from samestep.world.environment import read_rank

        report_errors(read_rank())
        return run(self, f"samestep train {self.name}", sys.argv[1:] if arguments is None else arguments)


def quarter(batch_size: int) -> int:
    """Return the size of the micro-batches if a batch has up to 4, so that up to 4 ranks can share it."""
    return batch_size // math.gcd(batch_size, 4)


def group_by_decay(model: "torch.nn.Module", weight_decay: float) -> list[dict[str, Any]]:
    """Return groups for an optimizer: weight decay for matrices, none for biases and normalizations."""
    params = [*model.parameters()]
    return [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": weight_decay},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


def build_schedule(
    optimizer: "torch.optim.Optimizer", num_steps: int, num_warm_up: int, end: float = 0.0
) -> "torch.optim.lr_scheduler.SequentialLR":
    """Return a schedule of the learning rate: it rises linearly, then falls along half a cosine to `end` of itself."""
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

    num_warm_up = min(num_warm_up, num_steps - 1)
    last_lr = end * optimizer.param_groups[0]["lr"]
    rise = LinearLR(optimizer, 1 / (num_warm_up + 1), total_iters=num_warm_up)
    fall = CosineAnnealingLR(optimizer, num_steps - num_warm_up, eta_min=last_lr)
    return SequentialLR(optimizer, [rise, fall], milestones=[num_warm_up])


def keep_best(run: "Run", score: float, patience: int | None, *, is_loss: bool = False) -> None:
    """Take the snapshot "best" if a validation has the best score so far. End the run after `patience` others in a row.

    Args:
        patience: None: the run does not end early.
        is_loss: whether the lowest score is the best.
    """
    sign = -1 if is_loss else 1
    if "best" not in run.state or sign * score > sign * run.state["best"]:
        run.state |= {"best": score, "num_worse": 0}
        run.snapshot("best")
        return
    run.state["num_worse"] += 1
    if run.state["num_worse"] == patience:
        run.stop(f"{patience} validations in a row were not better than the best one")
