"""What happens at the end of this process, and in a process that it forks.

What outlives a call and concerns the whole process is `Held`. When a run ends, its `Services` close what it holds. At
the end of the process, `close` ends what is still open: what was opened last first. In a forked child, `forget`
releases what belongs to the parent.

| held | `close` | `forget` |
|---|---|---|
| `Services` of a run | completes snapshots and files, restores signals, notes the run's error | restores signals |
| `Group` of a run, `LossWatch` | ends threads, closes connections | closes the child's copies of connections |
| `Watchdog` of a run | ends the heartbeat's threads | |
| `Workers` of a loop or an evaluation | kills them | leaves them to the parent |
| `Lock` of a run directory | (`Services` release it) | closes the child's copy |
| `Shared` by all runs | ends the process with the first error, closes the process group | drops the errors |
| `ForkServer` of a launch | ends it and its ranks | closes the child's copy of its connection |

These are the package's only hooks, except for those that delay a fork (`world/forking.py`).
"""

import atexit
import os
from contextlib import ExitStack
from weakref import WeakValueDictionary


class Held:
    """Something that a process holds open."""

    def close(self) -> None:
        """At the end of the process, or before: end it. A second call does nothing."""

    def forget(self) -> None:
        """In a forked child: release it, and leave what belongs to the parent as it is."""


_held: WeakValueDictionary[int, Held] = WeakValueDictionary()  # id -> object, in the order in which they were opened


def hold(thing: Held, *, alone: bool = False) -> None:
    """Close a thing at the end of this process, and let a forked child forget it, if something else still refers to it.

    Args:
        alone: whether a process has one thing of its class. An earlier one, of another run, is closed.
    """
    earlier = [each for each in _held.values() if alone and type(each) is type(thing) and each is not thing]
    for each in earlier:
        each.close()
    _held.setdefault(id(thing), thing)
    # Before the hooks of libraries that are there by now: torch's would wait for workers that ignore SIGTERM.
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # noqa: TID251 the one place


def _close_all() -> None:
    with ExitStack() as stack:  # also after an error in one of them
        for each in [*_held.values()]:
            stack.callback(each.close)


def _forget_all() -> None:
    with ExitStack() as stack:
        for each in [*_held.values()]:
            stack.callback(each.forget)
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)  # noqa: TID251 the one place
