"""What an error at the end of a process tells the launcher."""

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from samestep.errors import Error
from samestep.train.ending.shutdown import _say_once


def test_torchrun_prints_the_sentence_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of a traceback, which the rank does not have."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    _say_once(Error("too many ranks: start fewer", code="SS109"), rank=0)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    lines = str(ChildFailedError("train.py", {0: failure})).splitlines()
    assert lines[-2] == "  traceback : samestep: error: too many ranks: start fewer [SS109]"
