"""What ranks leave for their launcher at the end of a loop."""

import os
import threading
from dataclasses import replace
from pathlib import Path

from samestep.train.context import notify_launcher
from samestep.world.environment import OUTCOME, Outcome, read_environment


def test_a_note_that_all_ranks_leave_at_the_same_time_is_there(tmp_path: Path) -> None:
    """Otherwise the launcher would take a run that a signal has stopped for a complete one."""
    directory = tmp_path / "notes"
    environment = replace(read_environment(), error_dir=str(directory))
    for number in range(200):
        note = environment, OUTCOME, Outcome.FINISHED.value
        threads = [threading.Thread(target=notify_launcher, args=note) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert os.listdir(directory) == [OUTCOME], number
        (directory / OUTCOME).unlink()
