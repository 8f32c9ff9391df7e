"""What processes that are not ranks can make ranks do to others."""

import os
import signal
from collections.abc import Callable

import pytest

import samestep
from samestep.train.watchdog import kill_sibling


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


def test_ranks_sign_their_messages_with_their_own_key() -> None:
    def join() -> list[str]:
        import torch

        from samestep.world.environment import read_environment
        from samestep.world.group import open_group

        group = open_group(read_environment(), torch.device("cpu"))
        return [str(each) for each in group.gather(group._key.hex())]

    first, second = samestep.spawn(join, 2)
    assert first == second
    assert len(first) == 64
    assert first not in samestep.spawn(join, 2)
