"""A run directory or bucket with hostile content is refused in one sentence, and nothing in it is changed."""

import functools
import itertools
import json
import operator
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from states import assert_same, decode
from support.selection import one_in
from support.snapshots import read_snapshot, write_snapshot
from support.tiny import tiny_run

import samestep
from samestep.errors import Error, RunDirectoryError
from samestep.hashing import hash_bytes
from samestep.plan.ledger import RECORD, Entry
from samestep.snapshot.logs import Heal
from samestep.snapshot.manifest import parse_manifest, seal
from samestep.snapshot.mirror import Mirror, Unreachable
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.run_record import ResumePoint, StartOptions
from samestep.snapshot.store import SavedRun, Store
from samestep.tools.inspect import run_inspect, run_watch
from samestep.tools.report import run_report

SNAPSHOT = "snapshots/step-00000003/"
POSITION: dict[str, Any] = {"step": 3, "epoch": 1, "precision": {}}
STATE = {"objects": {"net": {"w": torch.arange(10.0)}}, "position": POSITION, "state": {}}
SAVED: dict[str, Any] = {**STATE, "objects": {}}
META = {"epoch": 1, "metrics_bytes": 0, "world_size": 1, "numbers": {}, "rewinds": 0}
NUMBERS = {
    "seed": 3, "batch_size": 8, "micro_batch_size": 2, "data_length": 21, "mode": "epochs", "shuffle": True,
    "drop_last": False, "sampler": "default",
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a run in `run`, and with `outside`, which must not change."""
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").write_text("as it was")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"format": 1, "numbers": NUMBERS}))
    write_snapshot(Store(tmp_path / "run"), STATE, step=3, meta=META)
    return tmp_path


def look(place: Path) -> dict[str, str]:
    """Return the files that are not in the run's directory."""
    beside = [path for path in place.rglob("*") if path.relative_to(place).parts[0] not in ("run", "copy")]
    return {str(path): path.read_text() for path in beside if path.is_file()}


# --- manifests --------------------------------------------------------------------------------------------------------

JUNK: list[Any] = [
    None, True, -1, 0, 1, 1 << 70, 1.5, 1e300, "", "x", "..", "../../outside", "/tmp/outside", "a\0b", "state.json",
    "manifest.json", [], {}, [[]], ["x", 1, "x"], {"size": None}, "\x1b[2J", "\ud800", "2026-01-01T00:00:00",
]  # fmt: skip


def list_places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths of all parts of a JSON value."""
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from list_places(inner, (*path, key))


def mutate(draw: Callable[[st.SearchStrategy[Any]], Any], manifest: Any) -> None:
    """Change a manifest in one place: another value, no value, or another name."""
    *path, last = draw(st.sampled_from([*list_places(manifest)]))
    holder = manifest
    for key in path:
        holder = holder[key]
    how = draw(st.sampled_from(["replace", "remove", "rename"]))
    if how == "replace":
        holder[last] = deepcopy(draw(st.sampled_from(JUNK)))  # the next mutation may change it
    elif how == "remove" or isinstance(last, int):
        del holder[last]
    else:
        holder[str(draw(st.sampled_from(JUNK)))] = holder.pop(last)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_changed_manifest_is_sound_or_refused(place: Path, data: st.DataObject) -> None:
    """The checksum is correct: an attacker who changes a manifest can compute it."""
    shutil.rmtree(place / "copy", ignore_errors=True)
    path = place / "run" / SNAPSHOT / "manifest.json"
    kept, before = path.read_bytes(), look(place)
    manifest = json.loads(kept)
    del manifest["sha256"]
    for _ in range(data.draw(st.integers(1, 2))):
        mutate(data.draw, manifest)
    try:
        with suppress(ValueError):  # JSON cannot represent it
            path.write_text(json.dumps(seal(manifest)))
        for read in (read_here, read_from_bucket):
            with suppress(Error):
                assert_same(read(place), STATE)
    finally:
        path.write_bytes(kept)
    assert look(place) == before


@pytest.mark.parametrize(
    "notes",
    [
        {"settings": 1},
        {"tally": 1},
        {"tally": {"epoch": "x"}},
        {"tally": {"sums": {"loss": 1}}},
        {"tally": {"sums": {"loss": ["0x1.0p+0"]}}},
    ],
)
def test_notes_that_no_run_writes(place: Path, notes: dict[str, Any]) -> None:
    path = write_snapshot(Store(place / "run"), STATE, step=4, meta={**META, **notes}) / "manifest.json"
    assert parse_manifest(path.read_bytes()) == ({}, "manifest.json is damaged")


def read_here(place: Path) -> Any:
    store = Store(place / "run")
    return read_snapshot(store, store.find("latest", warn=lambda sentence: None), SavedRun)


def read_from_bucket(place: Path) -> Any:
    store = Store(place / "copy")
    store.path.parent.mkdir(exist_ok=True)
    Mirror(f"file://{place / 'run'}", warn=lambda sentence: None).pull(store, "latest")
    found = store.find("latest", warn=pytest.fail)
    return STATE if found is None else read_snapshot(store, found, SavedRun)


@pytest.mark.parametrize(
    "run", ["/../../..", "../../../elsewhere", "a" * 31, "A" * 32, "a" * 32 + "/..", "a" * 31 + "\0"]
)
def test_a_lock_names_no_other_directory(place: Path, run: str) -> None:
    """The run's id in it is part of the name of the working copy."""

    def name_copy(run: str) -> str:
        (place / "run" / "lock").write_text(f"process 1 on here since then\n{'0' * 32}\n{run}\n")
        copy = Mirror(f"file://{place / 'run'}").join(str(place / "copies"))
        assert copy.parent == place / "copies"
        return copy.name

    assert re.fullmatch(r".*-[0-9a-f]{12}", name_copy(run))
    assert name_copy("0a" * 16).endswith("0a" * 6)


def test_a_bucket_names_no_other_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Object stores allow any text as a name."""
    remote, names = Mirror(f"file://{place / 'run'}"), ("..", "a b", "\x1b[2J", "step-1")
    found = {f"{place}/run/snapshots/{name}/manifest.json": {"size": 2} for name in names}
    found |= {f"{place}/run/orders/{name}": {"size": 2} for name in ("..", "epoch-00000001.npy", "x.npy")}
    monkeypatch.setattr(remote, "_find", lambda name: {path: i for path, i in found.items() if f"/{name}/" in path})
    assert remote.snapshots() == []
    assert remote._list_orders() == ["orders/epoch-00000001.npy"]


# --- tensors and structures -------------------------------------------------------------------------------------------


def replace_in(place: Path, file: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file of the snapshot, and its manifest accordingly."""
    directory = place / "run" / SNAPSHOT
    content = change((directory / file).read_bytes())
    (directory / file).write_bytes(content)
    manifest = {k: v for k, v in json.loads((directory / "manifest.json").read_bytes()).items() if k != "sha256"}
    manifest["files"][file] = [["__metadata__", len(content), hash_bytes(content)]]
    (directory / "manifest.json").write_text(json.dumps(seal(manifest)))


BYTES = {"$": "tensor", "name": "objects/net/w", "dtype": "float32", "shape": [10]}
EMPTY = {"$": "tensor", "name": "empty", "dtype": "uint8", "shape": [0]}


@pytest.mark.parametrize(
    "value",
    [
        {"$": "array", "dtype": "|O", "shape": [5], "bytes": BYTES},
        {"$": "scalar", "dtype": "|O", "shape": [], "bytes": BYTES},
        {"$": "tensor", "name": "objects/net/w", "dtype": "load", "shape": [10]},
        {"$": "tensor", "name": "other", "dtype": "float32", "shape": []},
        {"$": "tensor", "name": "objects/net/w", "dtype": "float32", "shape": [1 << 50], "strides": [1]},
        {"$": []},
        {"$": "system"},
        {"objects": {}},
        {"objects": {}, "position": {"step": "x", "epoch": 0}},
        {**SAVED, "state": []},
        *(
            {**SAVED, "position": {**POSITION, **entry}}
            for entry in (
                {"precision": {"scale": "x"}},
                {"order": {"a": 1}},
                {"order": {"epoch": 1, "indices": None}},
                {"order": {"epoch": 1, "indices": {"$": "scalar", "dtype": "<i8", "shape": [], "bytes": BYTES}}},
                {"lanes": [[0, 1, "", 0]]},
                {"loops": [[]]},
                {"loops": [["", 1]]},
                {"frozen": [1]},
            )
        ),
    ],
)
def test_a_structure_holds_only_what_samestep_writes(place: Path, value: Any) -> None:
    replace_in(place, "state.json", lambda _: json.dumps(value).encode())
    with pytest.raises(RunDirectoryError, match="holds no state that can be read"):
        read_here(place)


@pytest.mark.parametrize(
    "value",
    [
        {"$": "tensor", "name": "w", "dtype": "float32", "shape": [2, 5], "strides": [1 << 20, 1]},
        [{"$": "tensor", "name": "w", "dtype": "float32", "shape": [size]} for size in (1 << 50, 10)],
        {"$": "array", "dtype": "|u1", "shape": [1 << 20], "bytes": EMPTY},
    ],
)
def test_a_structure_takes_no_more_than_its_tensors(value: Any, tmp_path: Path) -> None:
    """Strides with gaps, a tensor with two shapes, and an array without bytes."""
    with pytest.raises(ValueError, match="samestep does not write"):
        decode(value, {"w": torch.arange(10.0), "empty": torch.empty(0, dtype=torch.uint8)}, tmp_path)


@pytest.mark.parametrize(("path", "value"), [((), None), (("state",), None), (("param_groups",), 3)])
def test_a_state_that_does_not_fit(tmp_path: Path, path: tuple[str, ...], value: Any) -> None:
    samestep.spawn(tiny_run, 1, (tmp_path,), {"num_steps": 3})
    store = Store(tmp_path)
    snapshot = store.find("latest")
    state = read_snapshot(store, snapshot, SavedRun)
    *holders, last = ("objects", "optimizer", *path)
    functools.reduce(operator.getitem, holders, state)[last] = value
    write_snapshot(store, state, step=snapshot.step, meta=snapshot.manifest["meta"])
    with pytest.raises(RunDirectoryError, match="optimizer does not take its state"):
        samestep.spawn(tiny_run, 1, (tmp_path,), {"num_steps": 4})


# --- files beside the snapshots ---------------------------------------------------------------------------------------

TEXTS: dict[str, bytes] = {
    "no JSON": b"{",
    "nothing": b"",
    "a list": b"[]",
    "an empty object": b"{}",
    "nan": b'{"format": 1, "loss": NaN, "steps": NaN, "time_s": NaN}',
    "an infinity": b'{"format": 1, "time_s": 1e999}',
    "deep": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "rather deep": b'{"a":' * 150 + b"1" + b"}" * 150,
    "a huge number": b'{"format": 1, "steps": ' + b"9" * 5000 + b"}",
    "a large number": b'{"format": 1, "steps": ' + b"9" * 400 + b', "time_s": ' + b"9" * 400 + b"}",
    "no UTF-8": b'{"a": "\xff\xfe"}',
    "other types": b'{"format": "1", "numbers": 3, "rewinds": "x", "changes": {}, "steps": "x", "status": [],'
    b' "time_s": {}, '
    b'"reason": 3, "from_step": null, "ranks": 3, "lost": {}}',
    "other numbers": b'{"format": 1, "numbers": {"data_length": -1, "batch_size": 1e9, "micro_batch_size": "x",'
    b' "seed": [],'
    b' "mode": 1, "shuffle": "x", "drop_last": {}, "sampler": 0}}',
    "large numbers": b'{"format": 1, "numbers": {"data_length": 4611686018427387904, "batch_size": 4611686018427387904,'
    b' "micro_batch_size": 1, "seed": 0, "mode": "steps", "shuffle": true, "drop_last": false, "sampler": "x"}}',
    "a surrogate": b'{"format": 1, "status": "\\ud800", "reason": "\\ud800"}',
    "escapes": b'{"format": 1, "config": {"a\\u001b[2J": "\\u001b[2J\\u202e"}, "status": "\\u009b2J",'
    b' "lost": "\\u001b]0;x",'
    b' "reason": "\\u001b[2J", "from_step": 0, "\\u001b[2J": "\\u001b[2J"}',
    "other measurements": b'{"format": 1, "status": "done", "measured": {"samples_per_s": "x", "time_share": 3}}',
    "ranks of another kind": b'{"time_s": 1, "micro_batch_size": 1, "ranks": [{}, 3]}',
}
PLANTED: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a link": lambda path: path.symlink_to("/etc/passwd"),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a circle": lambda path: path.symlink_to(path.name),
    "240 GB": lambda path: (path.touch(), os.truncate(path, 240 << 30)),
}
NAMES = [
    "run.json", "status.json", "metrics.jsonl", "restarts.jsonl", "heals.jsonl", "ranks.json", "ledger.bin",
    "logs/0/0.log", f"{SNAPSHOT}manifest.json", f"{SNAPSHOT}state.json",
]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "what"), one_in(2, itertools.product(NAMES, [*TEXTS, *PLANTED])))
def test_tools_pass_over_what_they_cannot_read(place: Path, name: str, what: str, capsys: Any) -> None:
    (place / "run" / "ledger.bin").write_bytes(RECORD.pack(*Entry(0, 0, 8, 1)))
    path = place / "run" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if what in TEXTS:
        path.write_bytes(TEXTS[what])
    else:
        PLANTED[what](path)
    run = str(place / "run")
    if what != "240 GB" or name != SNAPSHOT + "state.json":  # its size is wrong, and it is not read
        for arguments in ([], ["--json"], ["--check"], ["--samples"], ["--samples", "--json"], ["--digest"]):
            with suppress(Error):
                assert run_inspect([run, *arguments]) in (0, 1)
    with suppress(Error):
        run_watch([run])
    with suppress(Error):
        run_report([run, "-o", str(place / "report.html")])
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert not set("\x1b\x9b\u202e") & {*shown.out, *shown.err}  # no escape sequence moves the cursor


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["step-00000004", ".tmp-step-00000004", ".tmp-doomed-step-00000003"])
@pytest.mark.parametrize("what", ["a FIFO", "a circle", "a link"])
def test_what_is_in_the_place_of_a_snapshot(place: Path, name: str, what: str) -> None:
    """It blocks neither a writer nor a reader, and the other snapshots stay usable."""
    store = Store(place / "run")
    PLANTED[what](store.path / name)
    assert [each.step for each in store.snapshots()] == [3]
    write_snapshot(store, STATE, step=4, meta=META)
    store.prune(1)
    store.clean()
    assert [path.name for path in store.path.iterdir()] == ["step-00000004"]
    assert_same(read_here(place), STATE)


# --- links ------------------------------------------------------------------------------------------------------------

WRITTEN = [
    "lock", "run.json", "metrics.jsonl", "ledger.bin", "restarts.jsonl", "heals.jsonl", "status.json",
    ".run.json.partial", ".status.json.partial", "snapshots", "abandoned", "logs", "orders",
    "snapshots/.tmp-step-00000004", "snapshots/.tmp-inbox",
]  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("target", ["outside", "nothing", "elsewhere"])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str, target: str) -> None:
    (tmp_path / "outside").write_text("as it was")
    (tmp_path / "elsewhere").mkdir()
    run = tmp_path / "really"
    run.mkdir()
    (tmp_path / "run").symlink_to(run)  # the run directory itself may be a link
    (run / "snapshots").mkdir()
    if name == "snapshots":
        (run / name).rmdir()
    (run / name).symlink_to(tmp_path / target)
    with suppress(Error, OSError):
        use(tmp_path / "run")
    assert (tmp_path / "outside").read_text() == "as it was"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert not (tmp_path / "nothing").exists()


def use(run: Path) -> None:
    """Write everything that a run writes in its directory."""
    directory = RunDirectory(run, warn=lambda sentence: None)
    try:
        directory.look("latest")
        directory.begin(ResumePoint(), StartOptions({}))
        directory.write_start(None, from_step=0, world_size=1)
        directory.write_heal(Heal(0, [1], 1, 0.1))
        directory.write_row({"loss": 1.0})
        directory.enter(lambda: Entry(0, 0, 8, 1))
        directory.store.make_inbox()
        meta = directory.mark(epoch=0, world_size=1, notes={})
        draft = directory.store.begin(4, None)
        own = directory.store.prepare(draft, {})
        directory.sync()
        directory.store.commit(draft, own, {}, step=4, name=None, meta=meta)
        directory.write_status("done", "", {"steps": 1})
    finally:
        directory.close()


def test_the_same_without_links_writes_it_all(tmp_path: Path) -> None:
    use(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"run.json", "ledger.bin", "status.json", "lock"}
    with pytest.raises(Unreachable):
        Mirror(f"file://{tmp_path / 'run'}").read("snapshots")


def test_a_report_is_not_written_through_a_link(place: Path) -> None:
    """Anyone who can write a run's directory can plant a link where the user writes a report."""
    for name, target in (("report.html", place / "outside"), ("more.html", place / "nothing")):
        link = place / "run" / name
        link.symlink_to(target)
        with pytest.raises(Error, match=f"{name} is a link: name another file with -o"):
            run_report([str(place / "run"), "-o", str(link)])
        assert link.is_symlink()
    (place / "run" / ".other.html.partial").symlink_to(place / "outside")
    run_report([str(place / "run"), "-o", str(place / "run" / "other.html")])
    assert (place / "outside").read_text() == "as it was"
    assert not (place / "nothing").exists()
