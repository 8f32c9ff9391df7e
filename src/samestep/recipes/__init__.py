"""Example scripts, to run and to copy."""

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def run_main(main: Callable[[], None]) -> None:
    """Run the main function of `python -m samestep.recipes.NAME`.

    An Error raised before the run exists also ends the program with its message and exit code 2.
    """
    from samestep.train.ending.shutdown import report_errors
    from samestep.world.environment import read_rank

    report_errors(read_rank())
    main()


def check_numbers(
    parser: argparse.ArgumentParser, args: argparse.Namespace, names: str, least: float, most: float = math.inf
) -> None:
    """End the program with a message if one of the options `names` is set, and not from `least` to `most`."""
    for name in names.split():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            span = f"{least:g} or more" if most == math.inf else f"a number from {least:g} to {most:g}"
            parser.error(f"--{name.replace('_', '-')} is {value}: give {span}")


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
