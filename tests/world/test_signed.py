"""What ranks exchange is unpickled only if a rank of the same launch has sent it."""

import pickle
from typing import Any

import pytest

from samestep.errors import Error
from samestep.world.signed import seal, unseal


class Runs:
    """Executes code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("import builtins; builtins.ran_by_pickle = True",)


@pytest.mark.parametrize("data", [seal(Runs(), b""), seal(Runs(), b"another key"), pickle.dumps(Runs()), b"x" * 40])
def test_a_pickle_without_the_key_is_not_read(data: bytes) -> None:
    with pytest.raises(Error, match="does not have the key of this launch") as caught:
        unseal(memoryview(data), b"key")
    assert caught.value.code == "SS513"
    assert not hasattr(__import__("builtins"), "ran_by_pickle")
    assert unseal(memoryview(seal((1, 0.1), b"key")), b"key") == (1, 0.1)
