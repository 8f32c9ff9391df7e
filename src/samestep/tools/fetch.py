"""The run that a tool looks at: in its directory, or at a URL."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samestep.config import is_url
from samestep.console import say
from samestep.errors import Error, explain
from samestep.files import read_bytes
from samestep.snapshot.object_store import FILES, Remote, Unreachable
from samestep.snapshot.store import Store
from samestep.watch.records import RECORD, parse_record
from samestep.world.workdir import WorkDir


@contextmanager
def open_run(run: str, *, which: int | str | None = None, is_whole: bool = False) -> Iterator[Path]:
    """The directory of a run; of one at a URL, a copy for as long as the block lasts.

    Args:
        which: of a copy, the snapshot that `Store.find` will be asked for. None: all of them, but with empty files of
            the same sizes in place of tensors and states.
        is_whole: with those files as they are.

    Raises:
        Error: there is no such directory, or the URL cannot be read; no sound snapshot of what was asked for.
    """
    if not is_url(run):
        try:
            yield Path(run)
        except BrokenPipeError:  # nobody reads what is printed
            raise
        except OSError as error:
            if error.filename is None and explain(error) is not None:  # of the output
                raise
            where = f"{error.filename or run} cannot be read ({error.strerror})"
            raise Error(f"{where}: mend that, or name another one") from None
        return
    remote = Remote(run)
    with WorkDir() as home:
        with reaching(run):
            _copy(remote, home.path, which, is_whole)
        yield home.path


@contextmanager
def reaching(run: str) -> Iterator[None]:
    """Raises Error where the URL cannot be read."""
    try:
        yield
    except Unreachable as error:
        raise Error(f"the run directory {run} cannot be read ({error}): mend that, or name another one") from None


def _copy(remote: Remote, directory: Path, which: int | str | None, is_whole: bool) -> None:
    for name in (*FILES, *remote.list_orders()):
        content = remote.read(name)
        if content is not None:
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)
    store = Store(directory)
    if which is not None:
        remote.pull(store, which, rewinds=read_record(directory, remote.url).get("rewinds", []), warn=say)
        return
    for place, snapshot in sorted(remote.snapshots().items()):
        remote.copy(place, store.path / snapshot.path.name, is_whole=is_whole)


def read_record(run: Path, called: str) -> dict[str, Any]:
    """What `run.json` says. Raises Error where there is none. `called`: what a person calls the run."""
    if not run.is_dir():
        raise Error(f"there is no directory {called}: name a run's directory")
    try:
        return parse_record(RECORD, read_bytes(run / RECORD))
    except FileNotFoundError:
        raise Error(
            f"{called} is no run's directory, it has no run.json: name the directory that holds snapshots/"
        ) from None
    except OSError as error:
        raise Error(f"{called}/run.json cannot be read ({error.strerror}): repair it") from None
    except ValueError as error:
        raise Error(f"{called}/run.json cannot be read as JSON ({error}): repair it") from None
