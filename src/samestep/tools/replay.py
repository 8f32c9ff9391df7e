"""`samestep replay`: computes a step of a run again, in a scratch directory, and compares its bits with the ledger."""

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click

from samestep.cli import JSON, print_json
from samestep.config import Option, whole
from samestep.console import escape, print_table, say, to_text
from samestep.data.source import ORDERS, list_orders
from samestep.errors import Error
from samestep.files import copy_file, open_regular, read_tail
from samestep.launch.target import FLAGS as LAUNCH_FLAGS
from samestep.launch.target import ScriptCommand, Target, Values, check_target
from samestep.plan.ledger import Entry, to_float
from samestep.snapshot.logs import count_records, read_records
from samestep.snapshot.manifest import MANIFEST, Snapshot, find_damage
from samestep.snapshot.run_record import describe_changes, open_run
from samestep.snapshot.store import SNAPSHOTS, Store
from samestep.tools.inspect import describe_difference
from samestep.tools.traced_script import SHOWN_LINES, find_errors, open_workdir, read_lines, run_traced
from samestep.watch.records import LEDGER, METRICS, RECORD, STATUS, read_or_empty

OF_RUN = ("device", "backend", "override")
FLAGS: dict[str, Option] = {
    "step": Option(int, "S", "the step, counted from 0; the last one is the step in which the run failed", whole(0)),
    "micro_batch": Option(int, "V", "compute only this micro-batch of step S, and describe it", whole(0)),
    "nproc_per_node": Option(int, "N", "number of ranks; default: 1", whole(1)),
    "json": JSON,
    **{name: LAUNCH_FLAGS[name] for name in OF_RUN},
}
INTERCEPTOR = "samestep.tools.interceptors:Replay"
NUM_SHOWN = 10


@click.command("replay", cls=ScriptCommand, flags=FLAGS, words="RUN")
def run_replay(run: str, target: Target, values: Values) -> int:
    """Computes step S of a run again (counted from 0, as step.number) on any number of ranks, starting from the newest
    undamaged snapshot at or before S, or from the beginning. Prints the step's loss, gradient and samples, and whether
    the bits of all replayed steps match the run's ledger. Only reads the run.
    Give the script the arguments that it had: run.json records them.
    Exit code: 0 if the bits match; 1 if they differ; 2 if the step cannot be replayed.
    """
    check_target(target)
    if "step" not in values:
        raise Error("replay needs the step: --step S, counted from 0", code="SS103")
    step = values["step"]
    micro_batch = values.get("micro_batch")
    with open_workdir("replay") as scratch, open_run(run) as (directory, record):
        _check(run, directory, record, step)
        snapshot = _choose(Store(directory), step, record.get("rewinds", []))
        first = 0 if snapshot is None else snapshot.step
        _copy_run(directory, scratch / "run", snapshot)
        lines = _compute(target, scratch, record, values, first)
        if (last := next((line for line in lines if "result" in line), None)) is None:
            raise _explain(target, run, scratch, values)
        begin = max(min(first, step - 1), 0)
        ledger = dict(enumerate(islice(read_records(directory / LEDGER, first=begin), step + 2 - begin), begin))
    result = last["result"]
    changes = {name: describe_changes(record.get(name) or now, now) for name, now in last["about"].items()}
    for name, change in changes.items():
        if change:
            say(f"not as in the run: {name} ({change})")
    found = [
        Entry(line["step"], 0, line["num_samples"], line["fingerprint"], line["loss"], line["gradient"])
        for line in lines
        if "loss" in line
    ]
    if micro_batch is not None:  # of its step, only the samples are known
        found.append(Entry(step, 0, result["num_samples"], result["fingerprint"]))
    sentence, is_same = compare_bits(found, ledger)
    around = {n: to_float(ledger[n].loss) for n in range(step - 1, step + 2) if n in ledger and ledger[n].has_bits}
    if values.get("json"):
        print_json(
            {
                "step": step,
                "micro_batch": micro_batch,
                "first_step": first,
                "changed": changes,
                "metrics_step": step + 1,
                "recorded_losses": around,
                "same": is_same,
                "compared": sentence,
                **result,
            }
        )
    else:
        _print_result(step, micro_batch, result, around)
        print(sentence)
    return 0 if is_same else 1


def _check(run: str, directory: Path, record: Mapping[str, Any], step: int) -> None:
    """Raise Error if the run has not made this step."""
    num_steps = count_records(directory / LEDGER)
    is_done = read_or_empty(directory / STATUS).get("status") == "done"  # else one more step may have failed
    if step > num_steps - is_done:
        which = f"steps 0 to {num_steps - 1}" if num_steps else "no steps"
        raise Error(f"the ledger of {run} has {which}: there is no step {step} to replay", code="SS709")
    continues = record.get("continues") or {"step": 0}
    if step < continues["step"]:
        raise Error(f"step {step} of {run} was made in {continues['run']}: replay it there", code="SS709")


def _copy_run(directory: Path, run_dir: Path, snapshot: Snapshot | None) -> None:
    """Copy the files that a resume needs. Snapshot files are linked if the file system allows that."""
    (run_dir / ORDERS).mkdir(parents=True)
    for name in (RECORD, *list_orders(directory)):
        copy_file(directory / name, run_dir / name)
    if snapshot is None:
        return
    target = run_dir / SNAPSHOTS / snapshot.path.name
    target.mkdir(parents=True)
    for name in (*snapshot.manifest["files"], MANIFEST):
        copy_file(snapshot.path / name, target / name, may_link=True)
    if (directory / LEDGER).exists():
        copy_file(directory / LEDGER, run_dir / LEDGER)
    with open(run_dir / METRICS, "wb", opener=open_regular) as file:
        file.truncate(snapshot.manifest["meta"].get("metrics_bytes", 0))  # rows are not read


def _compute(
    target: Target, scratch: Path, record: Mapping[str, Any], values: Values, first: int
) -> list[dict[str, Any]]:
    """Run the script in the scratch directory, from step `first` on. Returns the lines of its traces."""
    numbers = record.get("numbers", {})
    names = ("batch_size", "micro_batch_size", "seed", "num_threads", "precision", "exchange_dtype")
    options = {name: numbers[name] for name in names if numbers.get(name) is not None}
    options |= {name: values[name] for name in OF_RUN if name in values}
    options |= {
        "shard": "none",  # every rank sees whole tensors, and the bits do not depend on it
        "run_dir": scratch / "run",
        "resume": first or "latest",
        "fresh": False,
        "snapshot_every": "never",
        "compare_every": "never",
        "log_every": 10**9,
        "stuck_after_s": 0,
    }
    command = target.to_full_command(values.get("nproc_per_node", 1))
    step, micro_batch = values["step"], values.get("micro_batch")
    run_traced(command, scratch, INTERCEPTOR, options, step=step, micro_batch=micro_batch)
    # The steps are written by rank 0, and the result by any rank.
    return [line for path in sorted(scratch.glob("rank-*.jsonl")) for line in read_lines(path)]


def _explain(target: Target, run: str, scratch: Path, values: Values) -> Error:
    """Return the error of a replay that did not reach the step."""
    text = read_tail(scratch / "output").replace(str(scratch / "run"), run)
    if errors := find_errors(text):
        found = re.search(r"in micro-batch (\d+)", errors[-1])
        hint = f"; --micro-batch {found[1]} describes it" if found and "micro_batch" not in values else ""
        return Error(f"step {values['step']} cannot be replayed: {errors[-1]}{hint}", code="SS710")
    print("\n".join(text.rstrip().splitlines()[-SHOWN_LINES:]), file=sys.stderr)
    return Error(f"{target.said} ended before step {values['step']} was replayed: see its output above", code="SS710")


def _choose(store: Store, step: int, rewinds: Sequence[int]) -> Snapshot | None:
    """Return the newest snapshot up to a step whose bytes are all undamaged, and name it. None: begin at step 0."""
    snapshots = store.snapshots()
    found = [each for each in snapshots if 0 < each.step <= step and not each.was_left(rewinds)]
    for snapshot in reversed(found):
        problem = snapshot.problem or find_damage(snapshot.path, snapshot.manifest)
        if not problem:
            say(f"replaying steps {snapshot.step} to {step} from the snapshot of step {snapshot.step}")
            return snapshot
        say(f"skipping the snapshot {snapshot.path.name}, which is damaged: {problem}")
    older = min((each.step for each in snapshots if each.problem is None), default=None)
    why = "" if older is None else f", because the oldest undamaged snapshot is that of step {older}"
    say(f"replaying steps 0 to {step} from the beginning{why}")
    return None


def compare_bits(found: Sequence[Entry], ledger: Mapping[int, Entry]) -> tuple[str, bool]:
    """Compare replayed steps with the run's records. Returns a message, and whether all are equal.

    Args:
        found: consecutive steps. The last one may have only samples, without bits.
        ledger: step -> the run's record.
    """
    pairs = [(one, ledger[one.step]) for one in found if one.step in ledger and ledger[one.step].num_samples]
    for one, other in pairs:
        if differences := describe_difference(one, other, ("in the replay", "in the run")):
            return f"the bits DIFFER from step {one.step} on: {'; '.join(differences)}", False
    if not pairs:
        return "no bits were compared: the run's ledger has none of these steps", True
    whole = [one.step for one, _ in pairs if one.has_bits]
    others = [one.step for one, _ in pairs if not one.has_bits]
    if not whole:
        return f"the samples of {_name_steps(others)} agree with the run's ledger", True
    rest = f"; of {_name_steps(others)}, the samples" if others else ""
    return f"the bits of {_name_steps(whole)} agree with the run's ledger: samples, loss and gradient{rest}", True


def _name_steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _print_result(step: int, micro_batch: int | None, result: Mapping[str, Any], recorded: Mapping[int, float]) -> None:
    """Print the result. `recorded`: the losses of this step and its neighbours in the run."""
    sizes = result["sizes"]
    print(f'step {step}, counted from 0, is "step": {step + 1} in {METRICS} and trackers, which count from 1')
    if recorded:
        print(f"losses in the run: {', '.join(f'step {number} {loss:.6g}' for number, loss in recorded.items())}")
    what = f"step {step}, epoch {result['epoch']}"
    if micro_batch is None:
        print(f"{what}: {sum(sizes)} samples in {len(sizes)} micro-batches")
        print(f"loss {result.get('loss')}")
        for v, losses in enumerate(result["losses"]):
            print(f"loss of micro-batch {v}: {' '.join(map(str, losses)) or 'none'}")
    else:
        print(f"{what}, micro-batch {micro_batch} of {len(sizes)}: {sizes[micro_batch]} samples")
        for loss, weight in zip(result["losses"], result["weights"], strict=True):
            print(f"loss {loss}, weight {weight:g}")
    print(f"gradient norm {result['norm']}")
    for v, samples in enumerate(result["samples"], start=micro_batch or 0):
        print(f"samples of micro-batch {v}: {' '.join(map(str, samples))}")
    for name, value in result.get("logged", {}).items():
        print(escape(f"logged {name}: {' '.join(map(str, value)) if isinstance(value, list) else value}"))
    for sentence in result.get("not_finite", ()):
        print(escape(sentence))
    rows = [(name, to_text(norm)) for name, norm in [*result["norms"].items()][:NUM_SHOWN]]
    more = f", {NUM_SHOWN} of {len(result['norms'])}" if len(result["norms"]) > NUM_SHOWN else ""
    print_table(f"largest gradient norms{more}", ("parameter", "norm"), rows)
