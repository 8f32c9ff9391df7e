"""Codes of errors: how they travel."""

import copy
import pickle
from pathlib import Path

import cloudpickle
import pytest

from samestep.data.sample_errors import locate_error, pack, unpack
from samestep.errors import Error, InvalidValue, MissingPackage, describe, explain
from samestep.launch.failure import MAX_REASON, read_failure, write_failure
from samestep.snapshot.store import Unreachable


class Mine(Error):
    """Of a script: other arguments, and no code."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} is not {b}")


def test_the_code_is_no_part_of_the_sentence() -> None:
    error = InvalidValue("a is 1: give 2", code="SS101")
    assert (str(error), describe(error)) == ("a is 1: give 2", "a is 1: give 2 [SS101]")
    assert describe(Mine(1, 2)) == "1 is not 2"


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
@pytest.mark.parametrize(
    "error", [InvalidValue("a", rank=3, code="SS101"), Unreachable("s3://x", "no"), MissingPackage("b"), Mine(1, 2)]
)
def test_pickling(error: Error, pickler: type[pickle]) -> None:  # type: ignore[valid-type]
    for other in (pickler.loads(pickler.dumps(error)), copy.copy(error)):  # type: ignore[attr-defined]
        assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))


def test_from_a_loader_worker_to_the_rank() -> None:
    error = unpack(pickle.loads(pickle.dumps(pack(Unreachable("s3://x", "no")))))
    assert (error.code, locate_error(error, None, 1, "step 2").code) == ("SS416", "SS416")


def test_from_a_rank_to_its_launcher(tmp_path: Path) -> None:
    error = Error("x" * 2 * MAX_REASON, code="SS301")
    write_failure(1, str(tmp_path), error, 2)
    failure = read_failure(1, tmp_path)
    assert failure is not None
    assert str(failure).endswith("x [SS301]")
    assert failure.reason == f"{str(failure)[:MAX_REASON]} [SS301]", "it is cut off, the code is not"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PermissionError(13, "Permission denied", "x"), "SS112"),
        (OSError(28, "No space left on device"), "SS113"),
        (ModuleNotFoundError("no", name="samestep.tools.nothing"), "SS106"),
    ],
)
def test_errors_of_the_system(error: OSError | ModuleNotFoundError, code: str) -> None:
    known = explain(error)
    assert known is not None
    assert known.code == code
