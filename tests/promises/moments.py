"""A script in which a rank dies at a moment that faulty.py does not have: `moments.py D MOMENT`.

"evaluate", "step" and "names" (the exchange of new names of logged values): one of the others knows that this exchange
is complete on all ranks, and another one does not. "moved": rank 0 dies after the script has changed the directory.
"stop": after `run.stop()`.
"start": rank 0 dies before its first step.
"stuck": rank 2 dies, and rank 0 stops in the new group, before its first heartbeat there. Any other MOMENT: none dies.
"""

import os
import signal
import sys
import threading
from typing import Any

import psutil
import torch

import samestep
from samestep.train.guards.watchdog import Watchdog
from samestep.waiting import wait_until
from samestep.world.group import Group

DIES_AT = 2
NUM_STEPS = 6
DEADLINE_S = 60.0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    directory, moment = sys.argv[1:]
    if moment == "moved":
        directory = os.path.relpath(directory)
    run = samestep.Run(directory, batch_size=6, micro_batch_size=1, device="cpu", snapshot_every=2)
    number = run.rank
    pids = run._context.group.gather(os.getpid())
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model=model, optimizer=optimizer)
    confirm, gather = Group.confirm, Group.gather
    is_armed = False
    num_ranks = run.world_size

    def confirm_late(group: Group, **options: Any) -> None:
        """Rank 2 sends what the others wait for, and dies; rank 1 sends it later, when only rank 0 can get it."""
        nonlocal is_armed
        if is_armed and number == 2:
            threading.Timer(0.5, die).start()  # when it waits for rank 1
        elif is_armed and number == 1:
            wait_until(lambda: not psutil.pid_exists(pids[2]), DEADLINE_S)
        is_armed = False
        confirm(group, **options)

    def gather_and_fail(group: Group, value: Any) -> Any:
        nonlocal is_armed
        values = gather(group, value)
        if is_armed and group._is_in_part:
            is_armed = False
            if number == 2:
                die()
            wait_until(lambda: not psutil.pid_exists(pids[2]), DEADLINE_S)
            if number == 1:
                raise RuntimeError("rank 2 is gone")
        return values

    if moment in ("evaluate", "step"):
        Group.confirm = confirm_late  # type: ignore[method-assign]
    if moment == "names":
        Group.gather = gather_and_fail  # type: ignore[method-assign]
    if moment == "stuck" and number == 0:
        Watchdog.change_group = lambda watchdog: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign]
    data = torch.arange(24.0).view(12, 2) / 12
    steps = run.steps(data, 2 * NUM_STEPS if moment == "stop" else NUM_STEPS)
    if moment == "start" and number == 0 and not os.path.exists(f"{directory}-started"):
        with open(f"{directory}-started", "w"):
            die()
    if moment == "moved":
        os.makedirs(f"{directory}-other", exist_ok=True)
        os.chdir(f"{directory}-other")
    for step in steps:
        for x in step:
            step.backward(model(x).square().mean())
            if step.number >= DIES_AT:
                step.log(loss2=2.0 * x.sum())
                is_armed = step.number == DIES_AT and moment in ("step", "names") and run.world_size == num_ranks
            if (moment, number, step.number) in (("moved", 0, DIES_AT), ("stuck", 2, DIES_AT)):
                die()
        optimizer.step()
        if step.number == DIES_AT and moment == "evaluate":
            is_armed = True
        run.log(run.evaluate(lambda batch: {"score": model(batch).mean(), "sum": batch.sum()}, data))
        if moment == "stop" and step.number == NUM_STEPS - 1:
            run.stop("enough")
            if number == 1:
                die()


if __name__ == "__main__":
    main()
