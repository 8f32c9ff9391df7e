"""Notes for samestep's launcher: an exit code can only express success and failure."""

import os
from contextlib import suppress
from pathlib import Path

from samestep.files import replace_file
from samestep.train.context import RunContext
from samestep.world.environment import BEGUN, BegunRun, Environment
from samestep.world.workdir import make_private


def note_begun(context: RunContext, *, is_done: bool = False) -> None:
    """Leave a note for samestep's launcher, which run a restart continues."""
    environment = context.environment
    if environment.local_rank == 0 and context.location.path is not None:
        run = BegunRun(context.location.shown, environment.run_number, is_done)
        notify_launcher(environment, BEGUN, run.to_text())


def drop_note(environment: Environment, event: str) -> None:
    """Remove a note."""
    if environment.error_dir is not None:
        Path(environment.error_dir, event).unlink(missing_ok=True)


def notify_launcher(environment: Environment, event: str, text: str) -> None:
    """Leave a note for samestep's launcher."""
    if environment.error_dir is not None:
        path = Path(environment.error_dir, event)
        with suppress(OSError):  # the disk is full: the launcher then assumes the default
            make_private(path.parent)
            replace_file(path, os.fsencode(text), by_many=True)
