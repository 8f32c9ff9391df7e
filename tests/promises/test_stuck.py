"""A rank without progress is named with the cause, and the run ends so that it can be started again. A slow run
continues. (Other causes, and when a run ends, are in tests/watch/.)
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.tiny import Tiny, update
from torch import Tensor

import samestep
from samestep.train.watchdog import kill_sibling

STUCK_AFTER_S = 3  # no rank is named before a third of it
LIMIT = {"SAMESTEP_STUCK_AFTER_S": str(STUCK_AFTER_S)}
DATA = torch.ones(48, 4)


def stop_itself(tiny: Tiny) -> None:
    if tiny.run.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def skip_a_collective(tiny: Tiny) -> None:
    if tiny.run.rank == 0:
        dist.all_reduce(torch.ones(1))


def leave_the_loop(tiny: Tiny) -> None:
    if tiny.run.rank == 1:
        raise ValueError


# The fault, and the expected message.
STUCK = {
    leave_the_loop: r"rank 1 \(host \S+\) has been outside the loop for \d+ s at step 6, test_stuck\.py:\d+ in train; "
    "rank 0 waits for it in the reduction",
    stop_itself: r"nothing was heard of rank 1 .*SIGSTOP\); rank 0 waits for it in the reduction",
    skip_a_collective: r"the ranks have waited for each other for \d+ s: .*rank 0 \(host \S+\) in all_reduce "
    r"\(test_stuck\.py:\d+ in skip_a_collective\) at step 6",
}


@pytest.mark.parametrize("fault", STUCK, ids=lambda fault: fault.__name__)
def test_a_stuck_rank_is_named(tmp_path: Path, fault: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def then(tiny: Tiny) -> None:
        if tiny.step.number == 6:
            fault(tiny)
        update(tiny)

    def train() -> None:
        tiny = Tiny(tmp_path)
        with suppress(ValueError):
            tiny.train(data=DATA, num_steps=12, then=then)
        time.sleep(60)  # as a server of the trained model would; the test fails before

    with pytest.raises(RuntimeError, match=STUCK[fault]):
        samestep.spawn(train, 2, env=LIMIT)
    said = capfd.readouterr().err
    named = [line for line in said.splitlines() if re.search(STUCK[fault], line)]
    assert len(named) == 1, f"one line on the terminal, whichever ranks' output is hidden: {said}"
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["status"] == "failed"
    assert re.match(STUCK[fault], status["reason"])


def train_slowly(run_dir: Path) -> None:
    """Train with a first step, validations and snapshots that take longer than the time until a rank is named. A
    snapshot takes longer than the time until the run would end, and its file grows.
    """
    tiny = Tiny(run_dir)
    location = tiny.run._context.location
    prepare: Any = location.prepare

    def prepare_slowly(*arguments: Any) -> Any:
        with open(run_dir / "slow.tmp" if tiny.run.rank == 0 else os.devnull, "wb", 0) as file:
            for _ in range(10 * (STUCK_AFTER_S + 2)):
                time.sleep(0.1)
                file.write(bytes(1 << 18))
        return prepare(*arguments)

    def score(x: Tensor) -> dict[str, Any]:
        time.sleep(0.4)
        return {"loss": tiny.model(x).mean()}

    location.prepare = prepare_slowly
    tiny.train(
        1, data=DATA, before=lambda t: t.step.number or time.sleep(1.2),
        after_epoch=lambda t: t.run.evaluate(score, DATA[:16]),
    )  # fmt: skip


def test_a_slow_run_continues(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    samestep.spawn(train_slowly, 2, (tmp_path,), env=LIMIT)
    said = capfd.readouterr()
    assert said.err == ""
    assert re.search(r"time +.*%", said.out), "the shares of the time, in the table at the end"
    assert not (tmp_path / "ranks.json").exists()


# --- what processes that are not ranks can make ranks do to others ----------------------------------------------------


def fork(run: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        run()
        os._exit(0)
    return pid


@pytest.mark.parametrize("is_of_another_user", [False, True])
def test_a_rank_kills_no_other_process(is_of_another_user: bool) -> None:
    if is_of_another_user and os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    if is_of_another_user:
        told, tells = os.pipe()
        child = fork(lambda: (os.setuid(65534), os.write(tells, b"!"), signal.pause()))
        os.read(told, 1)
        os.close(told)
        os.close(tells)
        os.waitpid(fork(lambda: kill_sibling(child)), 0)
    else:
        child = fork(signal.pause)
        kill_sibling(child)
        kill_sibling(os.getppid())
        kill_sibling(2**22 + 1)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
