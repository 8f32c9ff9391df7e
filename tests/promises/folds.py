"""A script with two runs, one after the other: `folds.py D`. Rank 1 dies in the first one of the first start."""

import os
import signal
import sys

from support.tiny import Tiny, tiny_run
from torch import Tensor


def learn_or_die(tiny: Tiny, x: Tensor, y: Tensor) -> None:
    is_first = (os.environ["TORCHELASTIC_RESTART_COUNT"], fold) == ("0", 0)
    if is_first and (os.environ["RANK"], tiny.step.number) == ("1", 3):
        os.kill(os.getpid(), signal.SIGKILL)
    tiny.step.backward((tiny.model(x) - y).square().mean())


for fold in range(2):
    tiny_run(f"{sys.argv[1]}/{fold}", num_steps=6, log_every=1, body=learn_or_die)
