"""The secret of the nodes."""

import pytest

from samestep.errors import Error
from samestep.launch.launcher import read_secret

SECRET = "a secret of this run's nodes"


def test_a_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_RDZV_SECRET", f" {SECRET}\n")
    assert read_secret() == SECRET
    assert read_secret() == "", "it is taken once"
    monkeypatch.setenv("SAMESTEP_RDZV_SECRET", "abc")
    with pytest.raises(Error, match="SAMESTEP_RDZV_SECRET has 3 characters"):
        read_secret()
