"""What `samestep inspect` shows of a run's directory, and the problems that its audit finds."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.runs import ask, refuse
from support.snapshots import flip, write_snapshot

from samestep.hashing import hash_short
from samestep.plan.ledger import RECORD, Entry, combine, to_bits
from samestep.plan.order import build_order
from samestep.snapshot.logs import read_records
from samestep.snapshot.serialization import digest
from samestep.snapshot.store import Store
from samestep.world.environment import read_host

NUMBERS = {
    "seed": 3, "batch_size": 8, "micro_batch_size": 2, "num_threads": 1, "models": {"net": "1 parameter"},
    "data_length": 21, "mode": "epochs", "shuffle": True, "drop_last": False, "sampler": "default",
}  # fmt: skip
STATE = {"objects": {"net": {"w": torch.arange(10.0)}}, "position": {"step": 3, "epoch": 1}, "state": {}}

Steps = list[tuple[int, list[int]]]  # epoch, samples


def write_run(run: Path, **numbers: Any) -> None:
    record = {"format": 1, "samestep": "0.1.0", "numbers": NUMBERS | numbers, "config": {"lr": 0.1, "name": "x"}}
    (run / "run.json").write_text(json.dumps(record))


def write_ledger(run: Path, steps: Steps, micro_batch_size: int = 2) -> None:
    """Write the ledger of a run that uses these samples."""
    with open(run / "ledger.bin", "wb") as file:
        for step, (epoch, samples) in enumerate(steps):
            cuts = [samples[at : at + micro_batch_size] for at in range(0, len(samples), micro_batch_size)]
            mark = combine([hash_short(np.array(cut, dtype=np.int64).data) for cut in cuts])
            file.write(RECORD.pack(*Entry(step, epoch, len(samples), mark)))


def plan_steps(num_steps: int, orders: Callable[[int], NDArray[np.int64]]) -> Steps:
    """Return the steps of complete epochs of 21 samples, with 8 samples per step."""
    steps: Steps = []
    for epoch in range(num_steps):
        order = orders(epoch).tolist()
        steps += [(epoch, order[at : at + 8]) for at in range(0, len(order), 8)]
    return steps[:num_steps]


def shuffled(epoch: int) -> NDArray[np.int64]:
    return build_order(21, seed=3, epoch=epoch)[0:21]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path)
    return tmp_path


def assert_lines(out: str, *lines: str) -> None:
    """Check that each pattern is a line of a table."""
    assert [line for line in lines if not re.search(rf"^  {line}$", out, re.M)] == [], out


def inspect(run: Path, *words: str, code: int = 0) -> str:
    return ask("inspect", run, *words, code=code)


# --- the run ------------------------------------------------------------------------------------------------------


# Lines that are torn, or not of this kind, are left out. The last value of a metric may be in an earlier row.
FILES = {
    "status.json": '{"status": "failed", "reason": "no more memory", "measured": {"time_share": {"data": 0.25}}}',
    "metrics.jsonl": '{"step": 2, "loss": 1.5}\n{"step": 3, "accuracy": 0.5}\n{"step": 4, "loss": 0.75}\n{"step"',
    "restarts.jsonl": '{"time": "2026-01-02", "reason": "rank 1 died", "rank": 1, "from_step": 40, "lost_steps": 3}'
    '\ntorn {\n7\n{"reason": "SIGTERM", "rank": null, "from_step": 90, "lost_steps": 0, "world_size": 4}\n{"time": "20',
    "heals.jsonl": '{"step": 40, "lost": [1, 3], "world_size": 2, "seconds": 0.125}\n{"step": "x"}\n',
}
SHOWN = """
status
  name    value
  status  failed
  reason  no more memory
numbers
  name              value
  seed              3
  batch_size        8
  micro_batch_size  2
  num_threads       1
  models.net        1 parameter
  data_length       21
  mode              epochs
  shuffle           true
  drop_last         false
  sampler           default
config
  name  value
  lr    0.1
  name  x
snapshots, by their sizes (--check reads them)
  step  name  size   age  state
  3           295 B  0 s  whole
  6           296 B  0 s  whole
restarts
  time        reason       rank  from_step  lost_steps  world_size
  2026-01-02  rank 1 died  1     40         3
              SIGTERM            90         0           4
heals
  time  step  lost    world_size  seconds
        40    [1, 3]  2           0.125
run.state, in the newest snapshot
  name       value
  best.loss  0.25
last metrics
  name      value  step
  loss      0.75   4
  accuracy  0.5    3
measured, from the last start on
  name             value
  time_share.data  0.25
"""


def test_what_is_shown(run: Path) -> None:
    for name, text in FILES.items():
        (run / name).write_text(text)
    for step, loss in ((3, 0.5), (6, 0.25)):
        write_snapshot(Store(run), {**STATE, "state": {"best": {"loss": loss}}}, step=step)
    assert re.sub(r"\d s  whole", "0 s  whole", inspect(run)) == f"run {run}, samestep 0.1.0{SHOWN}"
    shown = json.loads(inspect(run, "--json"))
    assert shown["metrics"] == {"loss": {"value": 0.75, "step": 4}, "accuracy": {"value": 0.5, "step": 3}}
    assert [row["reason"] for row in shown["restarts"]] == ["rank 1 died", "SIGTERM"]
    assert (shown["state"], [row["lost"] for row in shown["heals"]]) == ({"best": {"loss": 0.25}}, [[1, 3]])


def test_damage_is_shown(run: Path) -> None:
    store = Store(run)
    for step, name in ((3, None), (6, None), (6, "best")):
        write_snapshot(store, STATE, step=step, name=name)
    os.truncate(store.path / "step-00000006" / "state.json", 3)
    flip(store.path / "step-00000003" / "tensors-00000.safetensors", -1)
    out = inspect(run, "--check", code=1)
    damage = r"tensors-00000.safetensors is damaged \(somewhere in bytes \d+ to \d+\)"
    state = r"6 .* state.json has 3 bytes, not \d+"
    assert_lines(out, f"3 .* {damage}", r"6 +best +\d+ B +\d s +sound", state)
    assert re.search(rf"\nthe check failed: 2 of 3 snapshots damaged \(.*{damage}\)\n$", out)
    checked = json.loads(inspect(run, "--json", "--check", code=1))
    sound = {(each["step"], each["name"]): each["problem"] is None for each in checked["snapshots"]}
    assert sound == {(3, None): False, (6, None): False, (6, "best"): True}
    assert_lines(inspect(run), r"3 +\d+ B +\d s +whole", state)  # compares the sizes only
    out = inspect(run, "--snapshot", "best", "--check")
    assert "state.json has" not in out
    assert out.endswith("\nthe check passed: 1 snapshot read, and sound\n")


def write_runs(directory: Path) -> tuple[Path, Path]:
    """Write two runs: b has another seed and learning rate, and its second step has other samples."""
    for name, seed, second in (("a", 3, [2, 3]), ("b", 4, [3, 2])):
        run = directory / name
        run.mkdir(parents=True)
        write_run(run, seed=seed)
        write_ledger(run, [(0, [0, 1]), (0, second)])
        write_snapshot(Store(run), {**STATE, "state": {"seed": seed}}, step=2)
        rows = [{"step": 1, "loss": 1.5}, {"step": 2, "loss": seed / 8}]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (run / "status.json").write_text(json.dumps({"status": "done", "time": "2026-01-02T03:04:05Z"}))
    return directory / "a", directory / "b"


def test_a_directory_of_runs_is_listed(tmp_path: Path) -> None:
    a, _ = write_runs(tmp_path / "runs")
    (tmp_path / "runs/no run").mkdir()
    write_snapshot(Store(a), {**STATE, "state": {}}, step=1, name="best", meta={})
    short = Store(a).find(2).manifest["digest"][:12]
    assert_lines(ask("runs", tmp_path / "runs"), rf"a +done +2 +{short} +1 +\d+ \w+ +loss 0.375", "b +done +2 .*")
    assert "there are no runs in nothing" in refuse("runs", "nothing")


def test_runs_that_were_killed_or_damaged(tmp_path: Path, capsys: Any) -> None:
    a, b = write_runs(tmp_path / "runs")
    (a / "status.json").write_text(json.dumps({"status": "running", "host": read_host(), "process": 1 << 30}))
    shutil.rmtree(b / "snapshots")
    (b / "snapshots").touch()
    listed = json.loads(ask("runs", tmp_path / "runs", "--json"))["runs"]
    assert [(each["name"], each["status"]) for each in listed] == [("a", "killed"), ("b", "damaged")]
    assert f"{b / 'snapshots'} cannot be used (Not a directory)" in capsys.readouterr().err
    (a / "status.json").write_text(json.dumps({"status": "running", "host": read_host(), "process": os.getpid()}))
    assert json.loads(inspect(a, "--json"))["status"]["status"] == "running"


def test_two_runs_are_compared(tmp_path: Path) -> None:
    a, b = write_runs(tmp_path)
    out = ask("diff", a, b, code=1)
    assert_lines(out, "numbers.seed +3 +4")
    assert "numbers.batch_size" not in out
    assert out.endswith("\nstep 1 is the first that differs: other samples\n")
    assert ask("diff", a, a) == "identical in all 2 common steps, and in 1 common snapshot\n"
    shown = json.loads(ask("diff", a, b, "--json", code=1))
    assert (shown["same"], shown["first_differing_step"], shown["differs_in"]) == (False, 1, ["other samples"])
    assert "there is no directory" in refuse("diff", a, tmp_path / "c")


def test_runs_with_other_losses_and_lengths_are_compared(tmp_path: Path) -> None:
    a, b = write_runs(tmp_path)
    first, last = (entry._replace(loss=to_bits(0.5), gradient=7) for entry in read_records(a / "ledger.bin"))
    for run, entry in ((a, last), (b, last._replace(loss=to_bits(0.25)))):
        (run / "ledger.bin").write_bytes(RECORD.pack(*first) + RECORD.pack(*entry))
    said = f"\nstep 1 is the first that differs: the loss is 0.5 in {a} and 0.25 in {b}\n"
    assert said in ask("diff", a, b, code=1)
    (b / "ledger.bin").write_bytes(RECORD.pack(*first))
    ask("diff", a, b, code=1)  # the snapshots differ
    shutil.rmtree(b / "snapshots")
    assert ask("diff", a, b).endswith("identical in all 1 common steps; there is no common snapshot\n")
    (b / "ledger.bin").write_bytes(b"")
    assert "b has no step yet: there is nothing to compare" in refuse("diff", a, b)


def test_a_run_that_has_not_begun(run: Path) -> None:
    (run / "run.json").write_text(json.dumps({"format": 1, "samestep": "0.1.0", "numbers": {"seed": 1}, "config": {}}))
    (run / "metrics.jsonl").write_text("")
    assert_lines(inspect(run), "seed +1", "none")
    assert "run.json lacks 'data_length': the run has not started" in refuse("inspect", run, "--samples")


# --- the digest ---------------------------------------------------------------------------------------------------


def test_the_digest_is_of_the_newest_sound_snapshot(run: Path, capsys: Any) -> None:
    store = Store(run)
    states = {step: STATE | {"position": {"step": step, "epoch": 0}} for step in (3, 6)}
    for step, state in states.items():
        write_snapshot(store, state, step=step)
    write_snapshot(store, states[3], step=3, name="best")
    assert inspect(run, "--digest") == digest(states[6]) + "\n"
    assert inspect(run, "--digest", "--snapshot", "best") == digest(states[3]) + "\n"
    shown = json.loads(inspect(run, "--digest", "--json", "--snapshot", "3"))
    assert shown == {"step": 3, "name": None, "digest": digest(states[3])}
    (store.path / "step-00000006" / "state.json").unlink()
    assert inspect(run, "--digest") == digest(states[3]) + "\n"
    assert "step-00000006: state.json is missing" in capsys.readouterr().err


def test_what_is_not_there(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert f"there is no directory {tmp_path}/nowhere" in refuse("inspect", tmp_path / "nowhere")
    assert "it has no run.json" in refuse("inspect", tmp_path / "empty", "--digest")
    assert "has no snapshot yet" in refuse("inspect", run, "--digest")
    write_snapshot(Store(run), STATE, step=3)
    said = refuse("inspect", run, "--digest", "--snapshot", "4")
    assert re.search("no snapshot of step 4 in .*: there is step 3", said)
    assert "has no snapshot 4" in refuse("inspect", run, "--snapshot", "4")
    assert "--samples shows steps, not snapshots" in refuse("inspect", run, "--samples", "--snapshot", "4")
    (run / "snapshots" / "step-00000003" / "manifest.json").write_text("")
    said = refuse("inspect", run, "--digest")
    assert re.search(r"no snapshot in .* can be used \(.*manifest.json is damaged", said)
    for text in ("{", "[]"):
        (run / "run.json").write_text(text)
        assert "cannot be read as JSON" in refuse("inspect", run)


def test_what_cannot_be_read(run: Path) -> None:
    (run / "snapshots").write_text("")
    (run / "ledger.bin").mkdir()
    for words in ([], ["--digest"], ["--samples"]):
        assert re.search(r" cannot be read \((Not|Is) a directory\): fix that", refuse("inspect", run, *words))


@pytest.mark.parametrize("args", [["--digest"], ["--samples"]])
def test_it_never_imports_torch(args: list[str], run: Path) -> None:
    write_snapshot(Store(run), STATE, step=3)
    write_ledger(run, plan_steps(5, shuffled))
    script = (
        "import sys; from samestep.tools.inspect import run_inspect\n"
        f"code = run_inspect({[str(run), *args]!r}); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


# --- the samples --------------------------------------------------------------------------------------------------


def keep_order(run: Path, epoch: int, indices: NDArray[np.int64]) -> None:
    (run / "orders").mkdir(exist_ok=True)
    np.save(run / "orders" / f"epoch-{epoch:08d}.npy", indices)


def test_the_verdict_in_words(run: Path) -> None:
    verdicts = []
    for num_steps in (0, 2, 3, 7):
        write_ledger(run, plan_steps(num_steps, shuffled))
        verdicts.append(inspect(run, "--samples").splitlines()[-1])
    assert verdicts == [
        "audit passed: there are no steps yet",
        "audit passed: epoch 0 is incomplete, no sample twice",
        "audit passed: in 1 complete epoch each of 21 samples was used once",
        "audit passed: in 2 complete epochs each of 21 samples was used once; epoch 2 is incomplete, no sample twice",
    ]


PLANNED = plan_steps(9, shuffled)
OTHERS = f"step 4: it should have used sample {PLANNED[4][1][0]} and so on, but used others"
FAULTS: dict[str, tuple[dict[int, tuple[int, list[int]]], str]] = {  # name -> other steps, and what the audit says
    "a step used again": ({4: PLANNED[3]}, OTHERS),
    "samples of an old epoch": ({4: PLANNED[0]}, OTHERS),
    "one other sample": ({4: (1, [*PLANNED[4][1][:-1], PLANNED[3][1][0]])}, OTHERS),
    "another order in a micro-batch": ({4: (1, [*PLANNED[4][1][1::-1], *PLANNED[4][1][2:]])}, OTHERS),
    "another order of micro-batches": ({4: (1, [*PLANNED[4][1][2:], *PLANNED[4][1][:2]])}, OTHERS),
    "another epoch": ({4: (2, PLANNED[4][1])}, "step 4: the ledger records 8 samples of epoch 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_audit_catches(fault: str, run: Path) -> None:
    changed, sentence = FAULTS[fault]
    write_ledger(run, [changed.get(step, planned) for step, planned in enumerate(PLANNED)])
    out = inspect(run, "--samples", code=1)
    assert out.splitlines()[4] == "4: not the planned samples"
    assert out.endswith(f"audit failed:\n  {sentence}\n")
    shown = json.loads(inspect(run, "--samples", "--json", code=1))
    assert shown["audit"] == {"passed": False, "problems": [sentence]}
    assert [step["samples"] is None for step in shown["steps"]] == [step == 4 for step in range(9)]


def test_records_that_a_ledger_lacks(run: Path) -> None:
    """In the middle, and at its end."""
    write_ledger(run, plan_steps(4, shuffled))
    with open(run / "ledger.bin", "r+b") as file:
        file.seek(2 * RECORD.size)
        file.write(bytes(RECORD.size))
    problem = "step 2: the ledger has no record of it, ledger.bin was truncated"
    out = inspect(run, "--samples", code=1)
    assert out.endswith(f"audit failed:\n  {problem}\n"), "and its samples are not reported"
    os.truncate(run / "ledger.bin", 2 * RECORD.size + 5)
    assert inspect(run, "--samples").endswith("\naudit passed: epoch 0 is incomplete, no sample twice\n")
    (run / "status.json").write_text(json.dumps({"status": "done", "steps": 4}))
    out = inspect(run, "--samples", code=1)
    assert out.endswith("audit failed:\n  steps 2 to 3: the ledger has no record of them, ledger.bin was truncated\n")


def test_many_problems_are_cut_short(run: Path) -> None:
    write_ledger(run, plan_steps(20, lambda epoch: np.arange(21)))
    assert inspect(run, "--samples", code=1).endswith("\n  and 10 more\n")


def test_a_missing_order(run: Path, capsys: Any) -> None:
    write_run(run, sampler="given", epoch_length=3)
    write_ledger(run, plan_steps(2, shuffled))
    said = refuse("inspect", run, "--samples")
    assert re.search("epoch 0 cannot be read from .*epoch-00000000.npy ", said)
    keep_order(run, 0, np.array([object()], dtype=object))
    assert "cannot be read" in refuse("inspect", run, "--samples")
    keep_order(run, 0, np.arange(3))
    inspect(run, "--samples", code=2)
    assert "order of epoch 1 cannot be read" in capsys.readouterr().err
