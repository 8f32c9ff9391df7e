"""Begins a run with the state and the position of another run, of which it may change the numbers.

A run directory belongs to one batch size, one micro-batch size and so on. To train on with other ones, a new directory
takes the newest snapshot of the run there (or another one), and its rows and records up to it. `run.json` says so in
`continues`. It is written first: a start that finds no snapshot in such a directory copies again.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from samestep.config import is_url
from samestep.data.source import ORDERS, list_orders
from samestep.decoding import Json
from samestep.errors import InvalidValue, RunDirectoryError
from samestep.files import copy_file, open_regular, replace_file
from samestep.plan.ledger import RECORD as LEDGER_RECORD
from samestep.plan.loop_plan import LoopPlan
from samestep.snapshot.manifest import Snapshot
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.run_record import describe_changes, find_snapshot, list_loops, open_run
from samestep.snapshot.serialization import SavedState, encode
from samestep.snapshot.store import SavedRun, Store
from samestep.watch.records import LEDGER, METRICS

_PLANNED_BY = {"batch_size", "seed"}  # the numbers that decide which samples a step uses


def continue_run(directory: RunDirectory, source: str | None, identity: Json, say: Callable[[str], None]) -> None:
    """Begin a run with the state of another one, or complete such a beginning. On a rank that writes.

    Args:
        directory: the new run's.
        source: the other run's directory; "RUN@STEP" or "RUN@NAME" for a snapshot that is not its newest. None:
            there is no other run, unless `run.json` names one.
        identity: the new run's numbers.
        say: prints a message.

    Raises:
        Error: `directory` holds a run that does not continue `source`, there is no such snapshot, or the run cannot be
            continued there with these numbers.
        OSError: the directory cannot be written.
    """
    continues = directory.record.get("continues") or {}
    if source is None and not continues:
        return
    run, which = (continues["run"], "latest") if source is None else split_source(source)
    if directory.record and run != continues.get("run"):
        raise RunDirectoryError(
            f"{directory.named} holds a run that does not continue {source}: name a new directory by --run-dir, or "
            "leave out --continue-from",
            code="SS405",
        )
    if directory.store.snapshots():  # an earlier start has copied the state
        return
    with open_run(run) as (path, before):
        store = Store(path)
        snapshot = find_snapshot(store, run, continues.get("snapshot", which))
        saved = store.open(snapshot, SavedRun)
        if not continues:
            directory.write_record(_build_record(store, snapshot, saved.contents["position"], before, identity, run))
            changed = describe_changes(before["numbers"], before["numbers"] | identity)
            say(f"continues {run} from step {snapshot.step}" + (f" with {changed}" if changed else ""))
        _copy(path, snapshot, saved, directory)


def _copy(path: Path, snapshot: Snapshot, saved: SavedState, directory: RunDirectory) -> None:
    """Copy the rows, the records and the state that a run continues. The snapshot is last: then all is there."""
    meta = snapshot.manifest["meta"]
    (directory.path / ORDERS).mkdir(exist_ok=True)
    for name in list_orders(path):
        (directory.path / name).unlink(missing_ok=True)
        copy_file(path / name, directory.path / name)
    for name, size in ((METRICS, meta["metrics_bytes"]), (LEDGER, snapshot.step * LEDGER_RECORD.size)):
        with open(path / name, "rb", opener=open_regular) as file:
            replace_file(directory.path / name, file.read(size), sync=True)
    contents = saved.fill(saved.contents)
    if begins := directory.record["continues"]["begins"]:
        contents["position"]["begins"] = begins
    structure, tensors = encode(contents)
    store = directory.store
    draft = store.begin(snapshot.step, None)
    store.commit(
        draft,
        store.prepare(draft, tensors),
        structure,
        step=snapshot.step,
        name=None,
        meta={**meta, "numbers": directory.record["numbers"], "rewinds": 0},
    )


def split_source(source: str) -> tuple[str, int | str]:
    """Split "RUN@SNAPSHOT" into the run, with an absolute path, and the snapshot's step or name.

    Example::

        >>> split_source("/runs/a@400"), split_source("/runs/a@best"), split_source("/runs/a")
        (('/runs/a', 400), ('/runs/a', 'best'), ('/runs/a', 'latest'))
    """
    run, at, which = source.rpartition("@")
    if not at or "/" in which:
        run, which = source, "latest"
    if not is_url(run):
        run = str(Path(run).expanduser().absolute())
    return run, int(which) if which.isdecimal() else which


def _build_record(
    store: Store,
    snapshot: Snapshot,
    position: Json,
    before: Json,
    identity: Json,
    called: str,
) -> dict[str, Any]:
    """Return `run.json` of the new run.

    Args:
        store, snapshot, position, before, called: of the run that it continues: its store, the snapshot and the
            position in it, its `run.json`, and its name for messages.
    """
    numbers = before["numbers"]
    changed = {name for name, value in identity.items() if numbers.get(name) != value}
    if position.get("lanes") and changed & {*_PLANNED_BY, "micro_batch_size"}:
        raise InvalidValue(
            f"{called} reads a stream, whose position belongs to its numbers: keep its batch_size, micro_batch_size "
            "and seed",
            code="SS104",
        )
    if "precision" in changed and identity["precision"] == "fp16":
        raise InvalidValue(
            f"{called} was trained with precision {numbers['precision']}, and has no loss scale to continue with fp16: "
            "use another precision",
            code="SS104",
        )
    if "workers" in changed:
        was, now = numbers.get("workers"), identity["workers"]
        raise InvalidValue(
            f"{called} was trained with workers={was}, and this run has workers={now}, for which it has no optimizer "
            "states: keep its workers, or begin with its weights alone (samestep export)",
            code="SS104",
        )
    begins = position.get("begins", [])
    loops = before.get("loops", [])
    if changed & _PLANNED_BY:
        number = len(position.get("loops", []))
        begins = [row for row in begins if row[0] < number] + [_find_begin(store, position, before, number, called)]
        loops = loops[: max(number - 1, 0)]
    begin = next(({"first_step": row[1], "first_epoch": row[2]} for row in begins if row[0] == 0), {})
    row = {"after_step": snapshot.step, "changed": describe_changes(numbers, {**numbers, **identity})}
    return {
        **before,
        "numbers": {**numbers, **identity, **begin},
        "loops": loops,
        "rewinds": [],
        "changes": [*before.get("changes", []), *([row] if changed else [])],
        "continues": {
            "run": called,
            "snapshot": snapshot.step if snapshot.name is None else snapshot.name,
            "step": snapshot.step,
            "begins": begins,
        },
    }


def _find_begin(store: Store, position: Json, before: Json, number: int, called: str) -> Sequence[int]:
    """Return the row of `RunState.find_begin` for the loop in which a snapshot was taken.

    Args:
        number: of the loop.
    """
    step = position["step"]
    loops = list_loops(before)
    if number >= len(loops):  # the loop had not begun
        return number, step, LoopPlan.from_numbers(loops[-1]).next_epoch(step), 0
    plan = LoopPlan.from_numbers(loops[number])
    done = sum(row[3] for row in position.get("begins", []) if row[0] == number)
    if plan.is_endless:
        return number, step, plan.next_epoch(step), done + step - plan.first_step
    epoch = plan.epochs_done(step)
    if epoch is None:
        steps = [
            each.step
            for each in store.snapshots()
            if each.problem is None and each.step >= plan.first_step and plan.epochs_done(each.step) is not None
        ]
        instead = f"--continue-from {called}@{max(steps)}" if steps else "the run's own numbers until its epoch ends"
        raise InvalidValue(
            f"step {step} of {called} is inside an epoch, where its samples cannot be divided anew into batches: use "
            f"{instead}",
            code="SS419",
        )
    return number, step, epoch, done + epoch - plan.first_epoch
