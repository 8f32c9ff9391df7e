"""A run on this rank: its options, its ranks and device, and its state apart from the script's objects.

The state is the run's position, its loops, its counts and the script's own dict.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from samestep.config import OPTIONS, RunConfig
from samestep.console import format_count, join_words, say
from samestep.data.lanes import LanePosition, Lanes
from samestep.engine.passes import MixedPrecision
from samestep.errors import InvalidType, InvalidValue, RunDirectoryError, UsageError
from samestep.pipeline.schedule import choose_ranks
from samestep.plan.loop_plan import LoopPlan
from samestep.plan.tree import Layout, build_layout, check_numbers, check_positive, default_micro_batch_size
from samestep.snapshot.location import Location
from samestep.snapshot.run_directory import RunDirectory
from samestep.snapshot.run_record import find_different
from samestep.train.loop_data import LoopData
from samestep.world.environment import Environment, advise
from samestep.world.group import Group

AFTER_LOOP = 2**31  # number of the first evaluation after a loop; evaluations inside it have other numbers and draws
# Of the process, because a script may create several runs.
_opened: set[str] = set()  # the directories of its runs so far
_replaced: dict[str, str] = {}  # a launcher's --run-dir -> the directory in the script that it replaced


class LoopKind(Enum):
    """How a loop of the script relates to the snapshot from which this start resumed."""

    PAST = auto()  # it had ended
    RESUMED = auto()  # it begins or continues there: the first loop of this start that has steps
    FURTHER = auto()  # it begins after the resumed loop, in this process


@dataclass(frozen=True)
class ScriptLoop:
    """A loop of the script in its run.

    Attributes:
        number: number of the loop, from 0, in the order of the script.
        last_step: number of completed steps when the loop ends, unless it ends early.
        kind: how it relates to the snapshot from which this start resumed.
    """

    number: int
    last_step: int
    kind: LoopKind

    @property
    def is_past(self) -> bool:
        """Whether the loop has no step left."""
        return self.kind is LoopKind.PAST


class MetricsTally:
    """Counts over all steps of a run, also before restarts, and averages over the steps of the current epoch.

    The same on all ranks. A snapshot stores it in the manifest, not in the state: a script may log times, and the
    digest of the state must not depend on them.

    Attributes:
        num_skipped: number of steps that made no update, see `StepResult.is_skipped`.
        epoch: the epoch of the averages; -1 before the first step.
    """

    def __init__(self) -> None:
        self.num_skipped = 0
        self.epoch = -1
        self._sums: dict[str, tuple[float | Tensor, float]] = {}  # of value times weight, and of weights

    def add(self, epoch: int, averages: Mapping[str, tuple[float | Tensor, float]]) -> None:
        """Add a step's values and their weights."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._sums = {}
        for name, (value, weight) in averages.items():
            if weight:
                total, total_weight = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (total + value * weight, total_weight + weight)

    def averages(self) -> dict[str, float]:
        """Return the averages over the epoch's steps so far."""
        return {name: float(total) / weight for name, (total, weight) in self._sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the tally as JSON, exact to the bit. Floats are hexadecimal, because JSON has no nan."""
        return {
            "num_skipped": self.num_skipped,
            "epoch": self.epoch,
            "sums": {name: [float(total).hex(), weight.hex()] for name, (total, weight) in self._sums.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. An empty state is from a snapshot without a tally."""
        self.num_skipped = state.get("num_skipped", 0)
        self.epoch = state.get("epoch", -1)
        self._sums = {
            name: (float.fromhex(total), float.fromhex(weight))
            for name, (total, weight) in state.get("sums", {}).items()
        }


class RunState:
    """The state of a run, some of which is in snapshots. Only its methods write it, and the script `script`.

    Attributes:
        steps_done: steps completed so far, over all restarts.
        newest_step: number of the step whose body has begun last; -1 before the first one.
        loop: the current loop, or the last one.
        is_in_loop: whether a loop has begun that has not ended.
        num_evaluations: evaluations since the current step or epoch began; each gets a different seed.
        stop_reason: why the script called run.stop() in this loop; "" if it did not.
        tally: counts and averages of the steps.
        script: `Run.state`, which the script fills.
        summary: `Run.summary`, which is in no snapshot.
    """

    def __init__(self) -> None:
        self.steps_done = 0
        self.newest_step = -1
        self.loop = ScriptLoop(0, last_step=0, kind=LoopKind.RESUMED)
        self.is_in_loop = False
        self.num_evaluations = 0
        self.stop_reason = ""
        self.tally = MetricsTally()
        self.script: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self._resumed: Mapping[str, Any] = {"step": 0}  # the position in the snapshot, see `build_position`
        # Per finished loop: its end, and the length of its epochs with a sampler, else 0.
        self._ends: list[list[int]] = []
        self._num_begun = 0
        self._num_past = 0

    # --- snapshots --------------------------------------------------------------------------------------------

    def build_position(self, epoch: int, data: LoopData, lanes: Sequence[LanePosition]) -> dict[str, Any]:
        """Return the position for a snapshot between two steps.

        Args:
            epoch: the epoch of the next step.
            lanes: the positions in a stream.
        """
        return {
            "step": self.steps_done,
            "epoch": epoch,
            "order": None if data.orders is None else data.orders.state_dict(),
            "lanes": [[*lane] for lane in lanes],
            **self.list_ends(),
        }

    def list_ends(self) -> dict[str, Any]:
        """Return what a position says of loops: their ends, and the beginnings of those that began in another run."""
        return {"loops": self._ends, "begins": self._resumed.get("begins", [])}

    def build_notes(self) -> dict[str, Any]:
        """Return the state that is in a snapshot's manifest, because times and logged values may differ by start."""
        return {"tally": self.tally.state_dict(), "stopped": self.stop_reason if self.is_stopped else ""}

    def load_state_dict(
        self, position: Mapping[str, Any], script: dict[str, Any], notes: Mapping[str, Any], *, is_latest: bool
    ) -> None:
        """Resume from a snapshot.

        Args:
            position, script, notes: of the snapshot.
            is_latest: whether the run continues where it ended. A loop that run.stop() has ended then stays ended; a
                snapshot that is named is meant to be trained further.
        """
        self._resumed = position
        self._ends = position.get("loops", [])
        self._num_past = len(self._ends)
        self.steps_done = position["step"]
        self.stop_reason = notes.get("stopped", "") if is_latest else ""
        self.tally.load_state_dict(notes.get("tally", {}))
        self.script = script

    def set_script(self, script: dict[str, Any]) -> None:
        """Set `Run.state`. Raises InvalidType if the script has given something else."""
        if not isinstance(script, dict):
            raise InvalidType(
                f"run.state must be a dict, not a {type(script).__name__}: use run.state[name] = value", code="SS102"
            )
        self.script = script

    def resume_lanes(self, lanes: Lanes, plan: LoopPlan) -> None:
        """Continue to read a stream where the snapshot was taken."""
        if self.loop.kind is LoopKind.RESUMED and self.steps_done != plan.first_step:
            lanes.move(LanePosition(*row) for row in self._resumed.get("lanes", []))

    # --- steps ------------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """The body of an epoch begins."""
        self.num_evaluations = 0

    def begin_step(self) -> None:
        """The body of the next step begins."""
        self.newest_step = self.steps_done
        self.num_evaluations = 0

    def count_evaluation(self) -> None:
        """An evaluation begins."""
        self.num_evaluations += 1

    def end_step(self, is_skipped: bool) -> None:
        """A step is done. `is_skipped`: see `StepResult`."""
        self.steps_done += 1
        if is_skipped:
            self.tally.num_skipped += 1

    def stop(self, reason: str) -> None:
        """The script has called run.stop()."""
        self.stop_reason = reason

    @property
    def is_stopped(self) -> bool:
        """Whether run.stop() ends the loop before its last step."""
        return bool(self.stop_reason) and self.steps_done < self.loop.last_step

    @property
    def is_before_loops(self) -> bool:
        """Whether the script has not begun a loop yet."""
        return self._num_begun == 0

    # --- loops ------------------------------------------------------------------------------------------------

    def find_epoch_length(self) -> int | None:
        """Return the number of samples that the sampler of the script's next loop gave for an epoch before a restart.

        The state on which a sampler may depend is restored only when the loop begins, so it is not called before.
        """
        if self._num_begun < self._num_past:
            return self._ends[self._num_begun][1] or None
        order = self._continued_order
        return None if order is None else len(order["indices"])

    def find_begin(self, begin: tuple[int, int]) -> tuple[tuple[int, int], int]:
        """Return the step and the epoch where the script's next loop begins, and the epochs or steps of it done before.

        They differ from `begin` and 0 only in a loop that began in another run, with another batch size.
        """
        for number, step, epoch, num_done in self._resumed.get("begins", []):
            if number == self._num_begun:
                return (step, epoch), num_done
        return begin, 0

    @property
    def _continued_order(self) -> Mapping[str, Any] | None:
        """The order in the snapshot, if the script's next loop is the one in which it was taken."""
        return self._resumed.get("order") if self._num_begun == self._num_past else None

    def begin_loop(self, data: LoopData, max_steps: int | None, location: Location) -> None:
        """Move to the script's next loop, and record it. On all ranks.

        Raises:
            RunDirectoryError: the run was resumed inside or after this loop, and the loop was a different one then.
        """
        number = self._num_begun
        if data.orders is not None and (order := self._continued_order) is not None:
            data.orders.restore(order["epoch"], order["indices"])
        self._num_begun += 1
        kind = LoopKind.RESUMED if number == self._num_past else LoopKind.FURTHER
        end = min(data.planned, max_steps or data.planned)
        if number < self._num_past:
            kind = LoopKind.PAST
            end, _ = self._ends[number]
        loop = ScriptLoop(number, end, kind)
        location.once(lambda: self._record(location.directory, loop, data))
        self.steps_done = end if loop.is_past else max(data.plan.first_step, self._resumed["step"])
        self.loop = loop
        self.is_in_loop = True

    def _record(self, directory: RunDirectory | None, loop: ScriptLoop, data: LoopData) -> None:
        """Compare a loop with the run's record of it, or record it.

        The record's numbers are those of the first loop; a list has those of the others. Entries of loops that began
        after the snapshot belong to steps that were never saved, and are replaced.
        """
        if directory is None:
            return
        recorded = directory.record.get("loops", [])
        loops = recorded if loop.kind is LoopKind.FURTHER else recorded[: self._num_past]
        if 0 < loop.number <= len(loops):
            if different := find_different(loops[loop.number - 1], data.numbers):
                raise RunDirectoryError(
                    f"loop {loop.number + 1} of the run in {directory.named} was a different one ({different}): "
                    f"restore its values, or resume from step {data.plan.first_step} or earlier",
                    code="SS413",
                )
        elif loop.number:
            loops = [*loops, data.numbers]
        if loops != recorded:
            directory.write_record({**directory.record, "loops": [*loops]})

    def leave_loop(self) -> None:
        """No further step of the loop begins."""
        self.is_in_loop = False

    def end_loop(self, plan: LoopPlan) -> None:
        """End the loop; the script's lines after it begin. A further loop is not stopped by its run.stop()."""
        self.is_in_loop = False
        self.num_evaluations = AFTER_LOOP
        if not self.loop.is_past:
            self.stop_reason = ""
            self._ends = [*self._ends, [self.steps_done, plan.epoch_length or 0]]


@dataclass(frozen=True)
class RunContext:
    """A run on this rank, without its models and its loop.

    Attributes:
        environment: the environment of this process.
        config: the run's options, checked.
        group: the ranks.
        device: device of this rank.
        precision: precision of the forward passes.
        say: prints a message, on rank 0.
        location: the location of the run.
        script_config: the `config` argument of `Run`, without secrets.
        state: the state of the run.
    """

    environment: Environment
    config: RunConfig
    group: Group
    device: torch.device
    precision: MixedPrecision
    say: Callable[[str], None]
    location: Location
    script_config: Mapping[str, Any]
    state: RunState

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size

    def build_layout(self, num_micro_batches: int) -> Layout:
        """Return how the ranks share the micro-batches of an evaluation."""
        return build_layout(num_micro_batches, self.group.num_replicas, self.config.shard == "fsdp2")

    def divide_step(self, num_micro_batches: int) -> Layout:
        """Return how the ranks share the micro-batches of a step."""
        workers = self.config.workers
        leaf_size = 1 if workers is None else num_micro_batches // workers
        return build_layout(num_micro_batches, self.group.num_replicas, self.config.shard == "fsdp2", leaf_size)


def refuse_beside(option: str, others: Mapping[str, bool], *, code: str) -> None:
    """Raise InvalidValue if one of `others` is in use, which an option does not support. `others`: whether it is."""
    for name, is_used in others.items():
        if is_used:
            raise InvalidValue(f"{name} is not available with {option}: leave one of them out", code=code)


def build_config(environment: Environment, *, is_trial: bool, **arguments: Any) -> RunConfig:
    """Return the options of a run: the script's arguments, replaced by the options that were set outside the script.

    Args:
        is_trial: see `Interceptor.is_trial`.

    Raises:
        Error: an option has an invalid value, the batch sizes do not fit the number of ranks, or one directory was set
            for several runs of a script.
    """
    overrides = environment.overrides
    if (said := overrides.get("run_dir")) is not None and not is_trial:  # a tool looks at the first run only
        given = str(arguments["run_dir"])
        before = _replaced.setdefault(said, given)
        if before != given:  # the folds of a cross-validation, of which the second one would resume the first one
            raise UsageError(
                f"this script creates a run in {before} and one in {given}, but --run-dir (or SAMESTEP_RUN_DIR) sets "
                f"{said} for both: leave it out, so that each run uses the directory in the script",
                code="SS222",
            )
    arguments |= overrides
    if not is_trial:
        arguments["run_dir"] = _choose_directory(environment, arguments["run_dir"])
    num_inner = _count_inner_steps(arguments, environment.world_size)
    if arguments["micro_batch_size"] is None:
        size = arguments["batch_size"]
        arguments["micro_batch_size"] = max(size // num_inner, 1) if num_inner else default_micro_batch_size(size)
    arguments["pipeline_ranks"] = ranks = _choose_pipeline_ranks(arguments, environment.world_size)
    check_numbers(arguments["batch_size"], arguments["micro_batch_size"], environment.world_size // ranks, advise)
    samples = num_inner * arguments["micro_batch_size"]
    if num_inner and arguments["batch_size"] % samples:
        raise InvalidValue(
            f"batch_size is {arguments['batch_size']}, the samples of a step of all workers, and {num_inner} inner "
            f"steps (workers x inner_steps) of whole micro-batches need a multiple of {samples}: give one",
            code="SS108",
        )
    config = RunConfig(**{name: OPTIONS[name].check(name, value) for name, value in arguments.items()})
    if config.shard_copies > 1 and config.shard == "fsdp2":
        raise InvalidValue(
            f'shard_copies={config.shard_copies} is not available with shard="fsdp2": use shard="optimizer", or start '
            f"with {advise(shard_copies=1)}",
            code="SS104",
        )
    return config


def _count_inner_steps(arguments: Mapping[str, Any], world_size: int) -> int:
    """Return the number of inner steps of all workers in a step; 0 without workers."""
    workers, inner_steps = (OPTIONS[name].check(name, arguments[name]) for name in ("workers", "inner_steps"))
    if (workers is None) != (inner_steps is None):
        raise InvalidValue(
            f"workers is {workers}, and inner_steps is {inner_steps}: give both, or leave both out", code="SS104"
        )
    if workers is None:
        return 0
    if world_size > workers:
        raise InvalidValue(
            f"{world_size} ranks cannot share {format_count(workers, 'worker')}: start at most {workers}, or begin a "
            f"run with {advise(workers=world_size)}",
            code="SS109",
        )
    check_positive("batch_size", arguments["batch_size"])
    return workers * inner_steps  # type: ignore[no-any-return]


def _choose_pipeline_ranks(arguments: Mapping[str, Any], world_size: int) -> int:
    """Return the number of ranks of a pipeline; 1 without one."""
    num_stages = OPTIONS["pipeline"].check("pipeline", arguments["pipeline"])
    wanted = OPTIONS["pipeline_ranks"].check("pipeline_ranks", arguments.get("pipeline_ranks"))
    if num_stages is None:
        if wanted is not None:
            raise InvalidValue(
                f"pipeline_ranks is {wanted}, and the run has no pipeline: leave it out, or cut the model into stages "
                "by samestep.Run(pipeline=...)",
                code="SS104",
            )
        return 1
    if wanted is None:
        return choose_ranks(world_size, num_stages)
    if wanted > num_stages or world_size % wanted:
        ranks = format_count(world_size, "rank")
        fitting = join_words([str(count) for count in range(1, num_stages + 1) if world_size % count == 0], "or")
        raise InvalidValue(
            f"pipeline_ranks is {wanted}, and the run has {ranks} and {num_stages} stages: give {fitting}", code="SS101"
        )
    return wanted  # type: ignore[no-any-return]


def _choose_directory(environment: Environment, given: Any) -> Any:
    """Return the directory of a run. After a restart, the run that had begun continues, whatever its name is now."""
    if given is None:
        return None
    begun = environment.begun
    named = str(OPTIONS["run_dir"].check("run_dir", given))
    if begun is not None and begun.number == environment.run_number and begun.run_dir not in {named, *_opened}:
        if environment.rank == 0:
            say(f"this restart continues the run in {begun.run_dir}, and not in {named}")
        given = named = begun.run_dir
    _opened.add(named)
    return given
