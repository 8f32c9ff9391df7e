"""`samestep.spawn`: calls a function on several ranks of this machine."""

import io
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from types import CodeType
from typing import Any, ClassVar, TypeVar

import cloudpickle

from samestep.errors import Error, InvalidValue
from samestep.launch.forkserver import ForkServer
from samestep.launch.launcher import Agent, Launch, Supervision
from samestep.launch.link import Finish
from samestep.launch.rank_process import build_code
from samestep.launch.rank_reports import RankFailure
from samestep.launch.target import Target

T = TypeVar("T")

_idle_servers: list[ForkServer] = []  # without ranks, for the next call in this process

_REDUCERS: Any = cloudpickle.Pickler.dispatch_table  # a ChainMap


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    return build_code, (code.co_filename, *_REDUCERS[CodeType](code))


class _CallPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Keeps the file name of each function, which cloudpickle replaces by "<dynamic-code>" from version 3.1.3 on.

    Tracebacks of a rank need it, and messages that quote a line of the script.
    """

    dispatch_table: ClassVar[Any] = _REDUCERS.new_child({CodeType: _reduce_code})


def spawn(
    fn: Callable[..., T],
    nprocs: int = 1,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    env: Mapping[str, str] | None = None,
    show_all: bool = False,
) -> T:
    """Call `fn(*args, **kwargs)` on each of `nprocs` ranks and return the result of rank 0.

    The function can be a lambda, a closure, or defined in a notebook or in `__main__`; scripts need no
    `if __name__ == "__main__"`. cloudpickle transfers it, its arguments and the result, tensors by value.
    The first call takes as long as importing torch, later ones about 0.1 s.

    Args:
        fn: the function.
        nprocs: number of ranks.
        args, kwargs: arguments of `fn`, the same on every rank.
        device: "cpu" or "cuda"; default: CUDA if available.
        env: more environment variables for the ranks. Variables that torch reads on import have no effect.
        show_all: show the output of all ranks, not only of rank 0.

    Raises:
        InvalidValue: `nprocs` is not a positive number.
        Exception: the exception of the rank that failed first, with that rank's traceback as a note.
        RuntimeError: a rank died, exited with a code, or raised an exception that cannot be pickled.
        KeyboardInterrupt: after the ranks have stopped; a second Ctrl-C kills them.

    Example::

        >>> import samestep
        >>> samestep.spawn(lambda: samestep.Run(None, batch_size=4, micro_batch_size=2).world_size, nprocs=2)
        2
    """
    if not isinstance(nprocs, int) or nprocs < 1:
        raise InvalidValue(f"spawn needs nprocs of at least 1, not {nprocs!r}", code="SS101")
    with io.BytesIO() as file:
        _CallPickler(file).dump((fn, tuple(args), dict(kwargs or {})))
        call = file.getvalue()
    received: list[int] = []
    launch = Launch(
        Target("call", "", [str(entry) for entry in sys.path], call),
        nprocs,
        {"device": device},
        received,
        variables=env or {},
        shows_all=show_all,
        prints=False,
    )
    server = _take_server()
    with closing(Agent(server, launch)) as agent:
        try:
            end = _run(Supervision(agent), received)
        except BaseException:
            server.close()
            raise
        _idle_servers.append(server)
        if end.message:
            raise Error(end.message, code=end.error_code)
        if end.failure is not None:
            raise _rebuild_exception(end.failure, agent.reports.results)
        value = agent.reports.results.get(0)  # none if rank 0 called sys.exit()
        return None if value is None else cloudpickle.loads(value)  # type: ignore[return-value]


def _take_server() -> ForkServer:
    """Return an idle server, which has already imported everything, or a new one."""
    while _idle_servers:
        server = _idle_servers.pop()
        if server.is_alive():
            return server
        server.close()
    return ForkServer()


def _run(supervision: Supervision, received: list[int]) -> Finish:
    """Run the ranks to their end. Ctrl-C stops them, and a second one ends the waiting for them."""
    try:
        return supervision.run()
    except KeyboardInterrupt:
        received.append(signal.SIGTERM)
        supervision.run()
        raise


def _rebuild_exception(failure: RankFailure, results: Mapping[int, bytes]) -> BaseException:
    try:
        error: BaseException = cloudpickle.loads(results[failure.rank])
    except Exception:
        error = RuntimeError(str(failure))
    if failure.traceback:
        error.add_note(f"rank {failure.rank} raised this:\n{failure.traceback}")
    elif failure.log:
        error.add_note(f"rank {failure.rank} printed at the end:\n{failure.log}")
    return error
