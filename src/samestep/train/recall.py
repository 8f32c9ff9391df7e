"""Loads the models of a snapshot into a script's models, outside of a loop."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from samestep.errors import Error, InvalidValue, UsageError
from samestep.snapshot.snapshotter import Snapshotter
from samestep.snapshot.store import Store
from samestep.train.loop import Loop
from samestep.train.restoring import load
from samestep.world.group import Group


def recall(
    snapshotter: Snapshotter, known: Mapping[str, nn.Module], names: Sequence[str], which: int | str, group: Group,
    loop: Loop | None, *, may_lack: bool = False,
) -> bool:  # fmt: skip
    """Load the parameters and buffers of a snapshot into models, in place. On all ranks.

    Rank 0 alone reads it, and sends what it has read: other nodes may not have this snapshot.

    Args:
        known: the run's models.
        names: of those that are meant; all where it is empty.
        which: as for `Store.find`.
        loop: the run's, where it has begun one.
        may_lack: do nothing if there is no such snapshot: a run of a few steps (`samestep verify`) may not reach it.

    Returns:
        Whether no loop has begun: one that begins now would train other weights than the run's.

    Raises:
        Error: there is no such snapshot or model, a model does not take its state, or the loop is not over.
    """
    if loop is not None and not loop.is_ended:
        raise UsageError("run.restore in the loop would change what is trained: call it after the loop")
    if snapshotter.path is None:
        raise UsageError("run.restore needs snapshots, and this run has no directory: name one in samestep.Run(...)")
    for name in names:
        if name not in known:
            raise InvalidValue(
                f"run.restore got {name!r}, but the models of run.prepare are {', '.join(known)}: name those"
            )
    modules = {name: known[name] for name in names or known}
    snapshotter.settle()
    store = Store(snapshotter.path, snapshotter.named)

    def read_and_load() -> dict[str, dict[str, Any]] | None:
        if may_lack and not store.select(which):
            return None
        snapshotter.download(which)
        found = store.find(which)
        if found is None:
            raise Error(f"there is no snapshot in {snapshotter.shown} yet")
        saved = store.read(found)["objects"]
        load(modules, saved)
        return {name: {k: v for k, v in saved[name].items() if not isinstance(v, Tensor)} for name in modules}

    others = group.once(read_and_load)  # such as extra_state; few modules have any
    if others is None:
        return False
    for name, module in modules.items():
        if group.rank != 0 and others[name]:
            module.load_state_dict({**module.state_dict(), **others[name]})
    tensors = [each for module in modules.values() for each in module.state_dict().values()]
    group.broadcast_tensors([each for each in tensors if isinstance(each, Tensor)])
    return loop is None
