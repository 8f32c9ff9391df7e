"""What is raised when a person's input is wrong, or another rank is gone."""

import errno


class Error(Exception):
    """Bad input, or a mistake in the training loop: one sentence of what is wrong, what was found and what to do.

    Uncaught, it ends the program with that sentence and exit code 2 instead of a traceback.

    Args:
        message: the sentence.
        rank: the rank it concerns; None when every rank raises the same, so that rank 0 alone prints it.
    """

    exit_code = 2

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerFailed(RuntimeError):
    """This rank is well, but another one failed: that one's error is what a person needs to see."""


WORKER_ADVICE = "look for a lack of memory (take fewer num_workers) and for crashes of C code in the data set"


class Stuck(RuntimeError):
    """Nothing in the run has moved for too long: the whole sentence of who keeps it from moving."""


class WorkerDied(RuntimeError):
    """A DataLoader worker was killed: one sentence says all of it. No Error, since another start may go well."""


def recognize(error: BaseException) -> Error | WorkerDied | None:
    """The exception that says more than one of Python's or torch's own; None for any other exception."""
    if type(error) is RuntimeError and str(error).startswith("DataLoader worker (pid"):  # from a signal, anywhere
        return WorkerDied(f"{str(error).split('. ')[0]} while the script ran: {WORKER_ADVICE}")
    if isinstance(error, AttributeError) and error.name == "no_sync":
        return Error("no_sync() belongs to DDP: leave it out, since a step exchanges its gradients once")
    return None


def explain(error: Error | OSError) -> str | None:
    """The sentence of an Error, and of what a system refuses to everybody; None where a traceback says more."""
    if isinstance(error, Error):
        return str(error)
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    refused = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
    if error.filename is not None and error.errno in (*refused, *full):
        return f"{error.filename} cannot be used ({error.strerror}): name another"
    if error.filename is None and error.errno in (*full, errno.EIO):
        return f"the output cannot be written ({error.strerror}): make room, or send it elsewhere"
    return None
