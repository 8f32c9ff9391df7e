"""Errors of the data set or collate_fn, in a rank or in a worker: one sentence that names the sample."""

import sysconfig
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch.utils.data import get_worker_info

from samestep.errors import KINDS, Error, name_kind
from samestep.files import open_regular


class WorkerFailure(NamedTuple):
    """A DataLoader worker sends this instead of a micro-batch. torch's own wrapper would lose the cause."""

    error: Error
    worker_traceback: str


def pack(error: Error) -> WorkerFailure:
    """Convert an Error in a worker for sending."""
    text = "".join(traceback.format_exception(error.__cause__ or error))
    kind = KINDS[name_kind(error)]  # a script's own subclass may not be one that can be sent
    return WorkerFailure(kind(str(error), code=error.code), text)


def locate_error(error: Error, logs: Path | None, rank: int, place: str) -> Error:
    """Return an Error of the data set or collate_fn with the rank and the place in the run. Raise it from
    `error.__cause__`.

    Args:
        logs: where the rank's log gets the traceback of the cause, whose path is then in the message.
    """
    where = ""
    if logs is not None and error.__cause__ is not None:
        log = logs / f"{rank}.log"
        text = "".join(traceback.format_exception(error.__cause__))
        with suppress(OSError):
            logs.mkdir(parents=True, exist_ok=True)
            with open(log, "a", opener=open_regular) as file:
                file.write(f"{error}\n{text}")
            where = f" (traceback: {log})"
    kind = KINDS[name_kind(error)]  # a script's own subclass may take other arguments
    return kind(f"{str(error).rstrip('.')}, on rank {rank} in {place}{where}", rank=rank, code=error.code)


def explain(error: Exception, indices: Sequence[int], num_read: int | None) -> str:
    """Describe a failure in one sentence.

    Args:
        indices: the samples of the micro-batch.
        num_read: number of the samples that the data set has read one by one before it failed. None: it reads them at
            once.
    """
    what = "collate_fn" if num_read == len(indices) else "the data set"
    at = 0 if len(indices) == 1 else num_read
    shown = [*map(str, indices)] if len(indices) <= 8 else [*map(str, indices[:6]), f"... {indices[-1]}"]
    where = f"one of the samples {', '.join(shown)}" if at in (None, len(indices)) else f"sample {indices[at]}"
    info = get_worker_info()
    worker = f", in DataLoader worker {info.id}" if info is not None else ""
    return f"{what} failed at {where} ({describe_error(error)}{worker})"


def describe_error(error: Exception) -> str:
    """Format an error and its innermost frame outside libraries on one line: `KeyError: 'x' at data.py:31`."""
    text = " ".join(str(error).split())
    text = f": {text[:300]}" if text else ""
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    ours = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    own = [frame for frame in frames if not frame.filename.startswith((*libraries, "<"))] or frames
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}{text}{place}"
