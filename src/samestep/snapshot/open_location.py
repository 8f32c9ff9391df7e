"""Chooses and opens the location of a run. What the chosen one does not need is not imported."""

from collections.abc import Callable
from pathlib import Path

from samestep.config import RunConfig
from samestep.snapshot.location import LocalLocation, RunLocation
from samestep.snapshot.writers import choose_fresh, find_writers
from samestep.world.group import Group


def open_location(config: RunConfig, group: Group, say: Callable[[str], None], *, keeps: bool = False) -> RunLocation:
    """Open the place that the configuration names. All ranks call it.

    Args:
        config: `run_dir`, `local_dir`, `fresh`, `keep_last` and the run's identity.
        say: prints a message, on rank 0.
        keeps: as for `LocalLocation`.

    Raises:
        Error: the place cannot be used, or holds another run. It is closed then.
    """
    url = config.run_dir
    if url is None:
        return RunLocation(group, say)
    if not isinstance(url, str):
        return _open_directory(group, url, config, say, fresh=config.fresh, keeps=keeps)
    from samestep.snapshot.remote_location import RemoteLocation, RemoteRun

    remote: RemoteRun | None = None

    def open_remote() -> tuple[str, str]:
        nonlocal remote
        remote = RemoteRun(url, fresh=config.fresh, local_dir=config.local_dir, warn=say)
        say(f"the working copy of {remote.url} is {remote.path}")
        return str(remote.path), remote.url

    path, url_in_use = group.once(open_remote)
    copies = _open_directory(group, Path(path), config, say, fresh=False, keeps=keeps)
    return RemoteLocation(group, copies, config, say, url_in_use, remote)


def _open_directory(
    group: Group, named: Path, config: RunConfig, say: Callable[[str], None], *, fresh: bool, keeps: bool = False
) -> LocalLocation:
    """Open rank 0's directory on all nodes. `fresh`: the first of x, x-2, x-3 ... that is empty."""
    named, writers = find_writers(group, named)
    ranks = sorted({*writers.values()})
    if fresh:
        named = choose_fresh(group, named, ranks)
    if len(ranks) == 1:
        return LocalLocation(group, named, config, say, keeps=keeps)
    from samestep.snapshot.node_replication import ReplicatedLocation

    return ReplicatedLocation(group, named, config, say, ranks)
