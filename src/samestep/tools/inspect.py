"""`samestep inspect`: what a run's directory holds, and whether it is sound. Never imports torch."""

import argparse
import json
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.console import escape as escape_text
from samestep.console import say
from samestep.errors import Error
from samestep.files import is_count, open_regular
from samestep.plan.ledger import RECORD, combine, fingerprint
from samestep.plan.order import GivenOrder, Order, build_order
from samestep.plan.schedule import EndlessSchedule, Schedule, Span
from samestep.snapshot.manifest import find_damage
from samestep.snapshot.store import Snapshot, Store
from samestep.tools.fetch import open_run, read_record
from samestep.watch.records import RESTARTS, STATUS, read_last_row, read_or_empty, read_rows

_NUM_SHOWN = 10
_NUM_READ = 1 << 16  # records at a time
_MOST_PROBLEMS = 1000  # after which an audit ends
_MOST_SEARCHED = 1_000_000  # steps, for one that used the samples of a record
_MOST_MICRO_BATCHES = 1 << 20
_RESTART = ("time", "reason", "rank", "from_step", "lost_steps", "world_size")

Indices = NDArray[np.int64]


def run_inspect(args: list[str]) -> int:
    """Runs the command with the arguments after its name. Returns the exit code: 1 if an audit or a check failed.

    Raises:
        Error: there is no run, or nothing of what was asked for in it.
    """
    options = _build_parser().parse_args(args)
    options.called = options.run
    with open_run(options.run, which=options.step if options.digest else None, is_whole=options.check) as options.run:
        record = read_record(options.run, options.called)
        if options.digest:
            return _show_digest(options)
        if options.samples:
            try:
                return _show_samples(options, record)
            except (MemoryError, OverflowError, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
                raise Error(f"{options.called}/run.json has numbers that no run has ({why}): repair it") from None
        return _show_run(options, record)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samestep inspect", description="Shows what a run's directory holds: numbers, snapshots, samples."
    )
    parser.add_argument("run", metavar="RUN", help="the run's directory, or its URL")
    parser.add_argument(
        "--snapshot", "--step", dest="step", metavar="STEP|NAME", default="latest", type=parse_which,
        help="of this snapshot only",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="read every byte of every snapshot, not only their sizes")
    parser.add_argument("--json", action="store_true", help="JSON for programs")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--digest", action="store_true", help="the sha256 of the state in the newest sound snapshot")
    what.add_argument(
        "--samples",
        action="store_true",
        help="the samples that each step used, and an audit of them (exit 1: it failed)",
    )
    return parser


def parse_which(text: str) -> int | str:
    """A snapshot as a person names it: a step, a name, or "latest"."""
    return int(text) if text.isdecimal() else text


# --- the digest ---------------------------------------------------------------------------------------------------


def _show_digest(options: argparse.Namespace) -> int:
    snapshot = Store(options.run).find(options.step, warn=say)
    if snapshot is None:
        raise Error(f"{options.called} has no snapshot yet")
    digest = snapshot.manifest["digest"]
    if options.json:
        print(json.dumps({"step": snapshot.step, "name": snapshot.name, "digest": digest}))
    else:
        print(digest)
    return 0


# --- the run ------------------------------------------------------------------------------------------------------


def _show_run(options: argparse.Namespace, record: Mapping[str, Any]) -> int:
    wanted = [
        snapshot for snapshot in Store(options.run).snapshots()
        if options.step == "latest" or options.step in (snapshot.name, snapshot.step)
    ]  # fmt: skip
    if options.step != "latest" and not wanted:
        raise Error(f"{options.called} has no snapshot {options.step}: leave out --snapshot to see what it has")
    snapshots = [_describe(snapshot, options.called, check=options.check) for snapshot in wanted]
    code = 1 if options.check and any(snapshot["problem"] for snapshot in snapshots) else 0
    metrics, restarts = read_last_row(options.run / "metrics.jsonl"), read_rows(options.run / RESTARTS)
    lost = read_or_empty(options.run / STATUS).get("lost")
    if options.json:
        shown = {"run": record, "snapshots": snapshots, "restarts": restarts, "metrics": metrics, "lost": lost}
        print(json.dumps(shown | {"checked": options.check}, indent=1))
        return code
    print(escape_text(f"run {options.called}, samestep {record.get('samestep')}"))
    for section in ("numbers", "machine", "config"):
        if record.get(section):
            _print_table(section, ("name", "value"), _list_values(record[section]))
    for number, loop in enumerate(record.get("loops", []), start=2):
        _print_table(f"loop {number}", ("name", "value"), _list_values(loop))
    if settings := record.get("settings"):
        asked = record.get("asked", {})
        values = [(name, _to_text(value), _to_text(asked.get(name, value))) for name, value in settings.items()]
        title = "settings of optimizers and schedules, before any schedule changed them"
        _print_table(title, ("name", "in force", "in the script"), values)
    if changes := record.get("changes"):
        changed = [(str(change["after_step"]), change["changed"]) for change in changes]
        _print_table("changes of machine, config and settings", ("after step", "changed"), changed)
    rows = [
        (str(s["step"]) if s["step"] >= 0 else "?", s["name"] or "", _size(s["size_bytes"]), _age(s["time"]),
         s["problem"] or ("sound" if options.check else "whole"))
        for s in snapshots
    ]  # fmt: skip
    title = "snapshots" if options.check else "snapshots, by their sizes (--check reads them)"
    _print_table(title, ("step", "name", "size", "age", "state"), rows or [("none", "", "", "", "")])
    if restarts:
        _print_table("restarts", _RESTART, [[_format_cell(row.get(key)) for key in _RESTART] for row in restarts])
    if metrics is not None:
        _print_table("last metrics", ("name", "value"), _list_values(metrics))
    if lost:
        print(escape_text(f"when the run ended, {lost}"))
    return code


def _describe(snapshot: Snapshot, run: str, *, check: bool) -> dict[str, Any]:
    """A snapshot as JSON. `check`: after reading every byte of it."""
    problem = snapshot.problem
    if problem is None and check:
        problem = find_damage(snapshot.path, snapshot.manifest)
    return {
        "step": snapshot.step,
        "name": snapshot.name,
        "path": f"{run.rstrip('/')}/snapshots/{snapshot.path.name}",
        "size_bytes": snapshot.size_bytes,
        "time": snapshot.manifest.get("time"),
        "digest": snapshot.manifest.get("digest"),
        "versions": snapshot.manifest.get("versions"),
        "meta": snapshot.manifest.get("meta"),
        "problem": problem,
    }


def _format_cell(value: Any) -> str:
    return "" if value is None else str(value)


def _print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    rows = [[escape_text(cell).replace("\n", "\\n") for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(*header, title=escape(title), title_justify="left")
        for row in rows:
            table.add_row(*map(escape, row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(title)
    for row in (header, *rows):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _list_values(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += _list_values(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, _to_text(value)))
    return rows


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _size(size_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.4g} TB"


def _age(time: str | None) -> str:
    if time is None:
        return "?"
    age_s = max((datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds(), 0.0)
    for unit, seconds in (("days", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"


# --- the samples --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Planned:
    """A step as the plan has it: per epoch that it touches, the epoch and the samples."""

    pieces: tuple[tuple[int, Indices], ...]
    fingerprint: int

    @property
    def samples(self) -> Indices:
        return np.concatenate([samples for _, samples in self.pieces])


class _Plan:
    """The samples of one of the run's loops once more, from its numbers alone. Steps and epochs are the run's."""

    def __init__(self, run: Path, numbers: Mapping[str, Any]) -> None:
        self.first_step: int = numbers.get("first_step", 0)
        self._first_epoch: int = numbers.get("first_epoch", 0)
        try:
            sizes = numbers["data_length"], numbers["batch_size"], numbers["micro_batch_size"]
            self.is_endless, self.is_given = numbers["mode"] == "steps", numbers["sampler"] == "given"
            self._seed, self._shuffle, self.drop_last = numbers["seed"], numbers["shuffle"], numbers["drop_last"]
        except KeyError as error:
            raise Error(f"{run / 'run.json'} lacks {error}: the run has not begun its first step yet") from None
        if not all(map(is_count, (*sizes, self._seed))) or sizes[1] // max(sizes[2], 1) > _MOST_MICRO_BATCHES:
            raise Error(f"{run / 'run.json'} has sizes or a seed that no run has ({sizes}, {self._seed}): repair it")
        self.drop_last = self.drop_last and not self.is_endless
        self.length: int = sizes[0]
        self.batch_size: int = sizes[1]
        self._run = run
        self._schedule = EndlessSchedule(*sizes) if self.is_endless else Schedule(*sizes, self.drop_last)
        self.order = lru_cache(maxsize=2)(self._read_order if self.is_given else self._build_order)

    def step(self, step: int) -> _Planned:
        step -= self.first_step
        if isinstance(self._schedule, EndlessSchedule):
            epoch, spans = 0, self._schedule.micro_batches(step)
        else:
            epoch, step = divmod(step, self._schedule.num_steps)
            spans = self._schedule.micro_batches(step)
        taken = [list(self._take(self._first_epoch + epoch, span)) for span in spans]
        prints = [fingerprint(np.concatenate([samples for _, samples in pieces])) for pieces in taken]
        return _Planned(tuple(piece for pieces in taken for piece in pieces), combine(prints))

    def num_steps_until(self, epoch: int) -> int:
        """Steps until all samples of an epoch, and of those before it, are used."""
        num_epochs = epoch - self._first_epoch + 1
        if isinstance(self._schedule, Schedule):
            return self.first_step + num_epochs * self._schedule.num_steps
        return self.first_step - (-num_epochs * self.length // self.batch_size)

    def expect_uses(self, epoch: int) -> NDArray[np.int64]:
        """How often each sample is to be used in an epoch."""
        if self.is_given:
            return np.bincount(self.order(epoch).take(0, self.length))
        return np.ones(self.length, dtype=np.int64)

    def _take(self, epoch: int, span: Span) -> Iterator[tuple[int, Indices]]:
        start, stop = span
        while start < stop:
            later, offset = divmod(start, self.length)
            end = min(self.length, offset + stop - start)
            yield epoch + later, self.order(epoch + later).take(offset, end)
            start += end - offset

    def _build_order(self, epoch: int) -> Order:
        return build_order(self.length, seed=self._seed, epoch=epoch, shuffle=self._shuffle)

    def _read_order(self, epoch: int) -> Order:
        path = self._run / "orders" / f"epoch-{epoch:08d}.npy"
        try:
            with open(path, "rb", opener=open_regular) as file:
                indices = np.load(file, allow_pickle=False)
            if len(indices) < self.length:
                raise ValueError(f"{len(indices)} indices, not {self.length}")
            return GivenOrder(indices, int(indices.max()) + 1)
        except (OSError, ValueError, EOFError) as error:
            raise Error(f"the sampler's order of epoch {epoch} cannot be read from {path}: {error}") from None


class _Audit:
    """Whether each step of a loop used the samples that it was to use, and each epoch its samples once. Fed step by
    step.

    Args:
        num_steps: of the run, up to the last one of this loop.
    """

    def __init__(self, plan: _Plan, num_steps: int) -> None:
        self.problems: list[str] = []
        self._closed: set[int] = set()
        self._plan, self._num_steps = plan, num_steps
        self._left: dict[int, Indices] = {}  # by open epoch: how many uses each sample has left

    def add(self, step: int, record: tuple[int, int, int, int]) -> _Planned:
        """Takes the ledger's record of step `step`, and returns the samples that it used."""
        found_step, epoch, num_samples, found = record
        planned = used = self._plan.step(step)
        if not num_samples:  # a run that goes on fills a file up that was cut short
            self.problems.append(f"step {step}: the ledger has no record of it, ledger.bin was cut short")
        elif found_step != step:
            self.problems.append(f"step {step}: the ledger has a record of step {found_step} in its place")
        if num_samples and found != planned.fingerprint:
            other = self._steps_by_fingerprint.get(found)
            used = planned if other is None else self._plan.step(other)
            what = "samples that are not those of any step" if other is None else f"those of step {other}"
            self.problems.append(f"step {step}: it was to use sample {planned.samples[0]} and so on, and used {what}")
        elif num_samples and (epoch, num_samples) != (planned.pieces[0][0], len(planned.samples)):
            self.problems.append(f"step {step}: the ledger says {num_samples} samples of epoch {epoch}")
        for piece_epoch, samples in used.pieces:
            self._use(step, piece_epoch, samples)
        for open_epoch in sorted(self._left):
            if self._plan.num_steps_until(open_epoch) <= step + 1:
                self._close(open_epoch)
        return used

    def describe(self) -> list[str]:
        """What was found to be right, in words."""
        parts = []
        if num_closed := len(self._closed):
            how_often = "as often as its sampler says" if self._plan.is_given else "once"
            left_out = " but for the dropped tail" if self._plan.drop_last else ""
            epochs = "1 complete epoch" if num_closed == 1 else f"{num_closed} complete epochs"
            parts.append(f"in {epochs} each of {self._plan.length} samples was used {how_often}{left_out}")
        if self._left:
            parts.append(f"epoch {max(self._left)} is open and used none twice")
        return parts

    @cached_property
    def _steps_by_fingerprint(self) -> dict[int, int]:
        steps = range(self._plan.first_step, min(self._num_steps, self._plan.first_step + _MOST_SEARCHED))
        return {self._plan.step(step).fingerprint: step for step in reversed(steps)}

    def _use(self, step: int, epoch: int, samples: Indices) -> None:
        if epoch in self._closed:
            self.problems.append(f"step {step}: sample {samples[0]} and so on were used in epoch {epoch} before")
            return
        if epoch not in self._left:
            self._left[epoch] = self._plan.expect_uses(epoch)
        left = self._left[epoch]
        np.subtract.at(left, samples, 1)
        for sample in samples[left[samples] < 0]:
            self.problems.append(f"step {step}: sample {sample} was used in epoch {epoch} before")
            left[sample] = 0

    def _close(self, epoch: int) -> None:
        left = self._left.pop(epoch)
        self._closed.add(epoch)
        dropped = self._plan.length % self._plan.batch_size if self._plan.drop_last else 0
        if left.sum() != dropped:
            unused = np.flatnonzero(left)
            named = ", ".join(map(str, unused[:_NUM_SHOWN])) + (" ..." if len(unused) > _NUM_SHOWN else "")
            self.problems.append(f"epoch {epoch}: samples never used: {named}")


def _summarize(problems: Sequence[str], parts: Sequence[str]) -> str:
    """The result of a run's audit in a sentence."""
    if problems:
        shown = "".join(f"\n  {problem}" for problem in problems[:_NUM_SHOWN])
        more = len(problems) - _NUM_SHOWN
        return f"audit failed:{shown}" + (f"\n  and {more} more" if more > 0 else "")
    return f"audit passed: {'; '.join(parts) or 'there are no steps yet'}"


def _show_samples(options: argparse.Namespace, record: Mapping[str, Any]) -> int:
    numbers = record.get("numbers", {})
    plans = [_Plan(options.run, numbers | loop) for loop in ({}, *record.get("loops", []))]
    path, status = options.run / "ledger.bin", read_or_empty(options.run / STATUS)
    num_steps = (path.stat().st_size if path.exists() else 0) // RECORD.size  # the last record may be half written
    ends = [*(plan.first_step for plan in plans[1:]), num_steps]
    audits = [_Audit(plan, min(end, num_steps)) for plan, end in zip(plans, ends, strict=True)]
    steps = []
    for step, entry in enumerate(_read_ledger(path) if num_steps else ()):
        audit = audits[bisect_right(ends[:-1], step)]
        if len(audit.problems) > _MOST_PROBLEMS:
            audit.problems.append(f"steps {step} to {num_steps - 1}: they were not looked at")
            break
        used = audit.add(step, entry)
        if options.step not in ("latest", step):
            continue
        if options.json:
            epoch, samples = used.pieces[0][0], used.samples.tolist()
            steps.append({"step": step, "epoch": epoch, "num_samples": len(samples), "samples": samples})
        else:
            print(_format_step(step, used, _NUM_SHOWN if sys.stdout.isatty() else len(used.samples)))
    if num_steps < (num_done := status.get("steps", 0)):
        why = status.get("lost", "ledger.bin was cut short")
        audits[-1].problems.append(f"steps {num_steps} to {num_done - 1}: the ledger has no record of them, {why}")
    problems = [problem for audit in audits for problem in audit.problems]
    if options.json:
        print(json.dumps({"steps": steps, "audit": {"passed": not problems, "problems": problems}}))
    else:
        print(escape_text(_summarize(problems, [part for audit in audits for part in audit.describe()])))
    return 1 if problems else 0


def _read_ledger(path: Path) -> Iterator[tuple[int, int, int, int]]:
    """The records of a ledger, of which little is in memory at a time: a file can claim any size. Raises OSError."""
    with open(path, "rb", opener=open_regular) as file:
        while len(data := file.read(_NUM_READ * RECORD.size)) >= RECORD.size:
            yield from RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size])


def _format_step(step: int, used: _Planned, num_shown: int) -> str:
    samples = used.samples
    listed = " ".join(map(str, samples[:num_shown])) + (" ..." if len(samples) > num_shown else "")
    return f"{step} epoch {used.pieces[0][0]} {len(samples)}: {listed}"
