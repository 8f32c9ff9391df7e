"""The exceptions of samestep."""

import copyreg
import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Error(Exception):
    """Invalid input or a mistake in the training loop.

    The message is one sentence: what is wrong, what was found and what to do. An uncaught `Error` ends the program with
    this sentence instead of a traceback, and with exit code 2. Wrong arguments, calls, run directories and packages
    raise a subclass. Commands raise `Error` itself, as do failures that no argument causes: ranks or hosts that differ,
    or a data set that fails.

    Args:
        message: the sentence.
        rank: the rank that prints the error. None if every rank raises the same error; then rank 0 prints it.
        code: the kind of mistake, such as "SS108", see docs/errors.md. It is printed after the sentence. "" in an error
            of a script.

    Example::

        >>> import samestep
        >>> try:
        ...     samestep.Run(None, batch_size=0)
        ... except samestep.Error as error:
        ...     print(error)
        batch_size must be a whole number above 0, found 0
    """

    exit_code = 2
    code = ""  # of a subclass with one meaning

    def __init__(self, message: str, *, rank: int | None = None, code: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.code = code or type(self).code

    def __reduce__(self) -> tuple[Any, ...]:  # a subclass may have other arguments
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class InvalidValue(Error, ValueError):
    """An option or argument has a value that is not allowed.

    Example::

        >>> import samestep
        >>> samestep.Run(None, batch_size=4, seed=-1)
        Traceback (most recent call last):
        samestep.errors.InvalidValue: seed must be a whole number of at least 0, not -1
    """


class InvalidType(Error, TypeError):
    """An argument has a type that is not allowed.

    Example::

        >>> import samestep
        >>> samestep.Run(None, batch_size=4, trackers=3)
        Traceback (most recent call last):
        samestep.errors.InvalidType: trackers must be a list such as [samestep.TensorBoard()], not 3
    """


class UsageError(Error, RuntimeError):
    """A method was called in the wrong place or order.

    Example::

        >>> import samestep
        >>> samestep.Run(None, batch_size=4).prepare("model")
        Traceback (most recent call last):
        samestep.errors.UsageError: run.prepare takes everything by name, run.prepare(model=model, ...), ...
    """


class MissingPackage(Error, ImportError):
    """A package that an optional feature needs is not installed, or cannot be imported.

    Example::

        >>> import samestep
        >>> issubclass(samestep.MissingPackage, ImportError)
        True
    """

    code = "SS106"


class RunDirectoryError(Error):
    """The run directory cannot be used: it contains another run, model or data set, another process uses it, it is
    damaged or cannot be written, or it has no such snapshot.

    Example::

        >>> import pathlib, samestep
        >>> _ = pathlib.Path("run.json").write_text("{}")
        >>> samestep.Run(".", batch_size=4)
        Traceback (most recent call last):
        samestep.errors.RunDirectoryError: .../run.json has format None, this samestep reads ...: update samestep
    """


class PeerFailed(RuntimeError):
    """Another rank failed while this rank waited for it. The launcher reports the error of that rank instead.

    Example::

        >>> import samestep
        >>> issubclass(samestep.PeerFailed, samestep.Error)  # not a mistake in this script: it is a RuntimeError
        False
    """


class NotHealed(PeerFailed):
    """The run cannot continue without a rank that has died (`--heal`). The message is a clause that says why."""


class LeftOver(PeerFailed):
    """The others continue without a rank that has died (`--heal`), and do not need this one. The message says why."""


class Stuck(RuntimeError):
    """The run made no progress for too long. The message names the rank that the others waited for.

    Example::

        >>> import samestep
        >>> issubclass(samestep.Stuck, samestep.Error)  # a restart may succeed: it is a RuntimeError
        False
    """


@contextmanager
def needing(sentence: str, packages: str) -> Iterator[None]:
    """Raise MissingPackage for an ImportError in the block, as "<sentence> (<why>): pip install <packages>"."""
    try:
        yield
    except ImportError as error:
        raise MissingPackage(f"{sentence} ({error}): pip install {packages}") from None


WORKER_ADVICE = "check for a lack of memory (use fewer num_workers) and for crashes of C code in the data set"


class WorkerDied(RuntimeError):
    """A DataLoader worker was killed.

    Example::

        >>> import samestep
        >>> issubclass(samestep.WorkerDied, samestep.Error)  # a restart may succeed: it is a RuntimeError
        False
    """


KINDS: dict[str, type[Error]] = {kind.__name__: kind for kind in Error.__subclasses__()} | {"Error": Error}


def add_code(sentence: str, code: str) -> str:
    """Return the sentence of an error that ends a program, with its code: "<sentence> [SS108]"."""
    return f"{sentence} [{code}]" if code else sentence


def name_kind(error: Error) -> str:
    """Return the name in `KINDS` of an error's class or base class, so that another process can raise the same kind."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind in KINDS.values())


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python or torch could not allocate memory."""
    if isinstance(error, MemoryError):
        return True
    is_of_gpu = type(error).__name__ == "OutOfMemoryError"  # of torch, which this module does not import
    return isinstance(error, RuntimeError) and (is_of_gpu or "DefaultCPUAllocator: can't allocate" in str(error))


def recognize(error: BaseException) -> Error | WorkerDied | None:
    """Return a clearer exception for one that Python or torch raised; None if there is none."""
    if type(error) is RuntimeError and str(error).startswith("DataLoader worker (pid"):  # raised by a signal handler
        process, _, cause = str(error).split(". ")[0].partition(" is killed by signal: ")  # "Killed", of SIGKILL
        names = {signal.strsignal(each): each.name for each in signal.Signals}
        end = f" was killed by {names.get(cause, cause)}" if cause else ""
        return WorkerDied(f"{process}{end} while the script ran: {WORKER_ADVICE}")
    if isinstance(error, AttributeError) and error.name == "no_sync":
        return UsageError(
            "no_sync() belongs to DDP: leave it out, since a step exchanges its gradients once", code="SS201"
        )
    return None


def explain(error: Error | OSError) -> Error | None:
    """Return an `Error` itself, or one that explains a system error; else None."""
    if isinstance(error, Error):
        return error
    full = (errno.ENOSPC, errno.EDQUOT)
    if error.filename is not None and error.errno in full:
        return Error(
            f"{error.filename} cannot be written ({error.strerror}): make room there, or name another directory (by "
            "TMPDIR, for temporary files)",
            code="SS113",
        )
    if error.filename is not None:
        return Error(f"{error.filename} cannot be used ({error.strerror}): name another", code="SS112")
    if error.errno in (*full, errno.EFBIG, errno.EIO):
        return Error(f"the output cannot be written ({error.strerror}): make room, or send it elsewhere", code="SS113")
    return None
