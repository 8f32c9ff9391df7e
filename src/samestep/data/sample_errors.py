"""Errors of the data set or collate_fn, in a rank or in a worker: one sentence that names the sample."""

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch.utils.data import get_worker_info

from samestep.errors import KINDS, Error, name_kind
from samestep.files import open_regular


class WorkerFailure(NamedTuple):
    """A DataLoader worker sends this instead of a micro-batch. torch's own wrapper would lose the cause."""

    kind: str
    message: str
    code: str
    worker_traceback: str


def pack(error: Error) -> WorkerFailure:
    """Convert an Error in a worker for sending."""
    text = "".join(traceback.format_exception(error.__cause__ or error))
    return WorkerFailure(name_kind(error), str(error), error.code, text)


def unpack(failure: WorkerFailure) -> Error:
    """Restore the Error. Its cause holds the worker's traceback."""
    error = KINDS[failure.kind](failure.message, code=failure.code)
    error.__cause__ = RuntimeError(f"in a DataLoader worker:\n{failure.worker_traceback}")
    return error


def locate_error(error: Error, logs: Path | None, rank: int, place: str) -> Error:
    """Return an Error of the data set or collate_fn with the rank, the place in the run and the path of its traceback.

    Raise it from `error.__cause__`.
    """
    where = write_traceback(error, logs, rank)
    kind = KINDS[name_kind(error)]  # a script's own subclass may take other arguments
    return kind(f"{str(error).rstrip('.')}, on rank {rank} in {place}{where}", rank=rank, code=error.code)


def write_traceback(error: Error, logs: Path | None, rank: int) -> str:
    """Write the exception of the data set or collate_fn to the rank's log.

    Returns:
        A suffix for the message, with the path of the log; "" without logs.
    """
    if logs is None or error.__cause__ is None:
        return ""
    log = logs / f"{rank}.log"
    text = "".join(traceback.format_exception(error.__cause__))
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", opener=open_regular) as file:
            file.write(f"{error}\n{text}")
    except OSError:
        return ""
    return f" (traceback: {log})"


def explain(error: Exception, indices: Sequence[int], num_read: int | None) -> str:
    """Describe a failure in one sentence.

    Args:
        indices: the samples of the micro-batch.
        num_read: number of the samples that the data set has read one by one before it failed. None: it reads them at
            once.
    """
    what = "collate_fn" if num_read == len(indices) else "the data set"
    at = 0 if len(indices) == 1 else num_read
    where = f"one of the samples {abbreviate(indices)}" if at in (None, len(indices)) else f"sample {indices[at]}"
    info = get_worker_info()
    worker = f", in DataLoader worker {info.id}" if info is not None else ""
    return f"{what} failed at {where} ({describe_error(error)}{worker})"


def abbreviate(indices: Sequence[int]) -> str:
    if len(indices) <= 8:
        return ", ".join(map(str, indices))
    return f"{', '.join(map(str, indices[:6]))}, ... {indices[-1]}"


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
