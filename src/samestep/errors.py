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


class Stuck(RuntimeError):
    """Nothing in the run has moved for too long: the whole sentence of who keeps it from moving."""


def recognize(error: BaseException) -> Error | None:
    """The Error that says more than an exception of Python's own; None for any other exception."""
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
