"""A run on this rank: its options, its ranks and device, its state, and the notes that it leaves for its launcher."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from samestep.config import OPTIONS, RunConfig
from samestep.console import say
from samestep.engine.precision import MixedPrecision
from samestep.errors import UsageError
from samestep.plan.sizes import check_numbers, default_micro_batch_size
from samestep.plan.tree import Layout, build_layout
from samestep.snapshot.location import Location
from samestep.train.run_state import RunState
from samestep.world.environment import Environment, advise
from samestep.world.group import Group

# Of the script, which runs once in a process: it may create several runs.
_opened: set[str] = set()  # the directories of its runs so far
_replaced: dict[str, str] = {}  # a launcher's --run-dir -> the directory in the script that it replaced


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
        """Return how the ranks share the micro-batches of a step or an evaluation."""
        return build_layout(num_micro_batches, self.group.world_size, self.config.shard == "fsdp2")


def build_config(environment: Environment, *, is_trial: bool, **arguments: Any) -> RunConfig:
    """Return the options of a run: the script's arguments, replaced by the options that were set outside the script.

    Args:
        is_trial: see `Interceptor.is_trial`.

    Raises:
        Error: an option has an invalid value, the batch sizes do not fit the number of ranks, or one directory was set
            for several runs of a script.
    """
    overrides = environment.overrides
    if overrides.get("run_dir") is not None and not is_trial:  # a tool looks at the first run only
        _check_one_directory(overrides["run_dir"], arguments["run_dir"])
    arguments |= overrides
    if not is_trial:
        arguments["run_dir"] = _choose_directory(environment, arguments["run_dir"])
    if arguments["micro_batch_size"] is None:
        arguments["micro_batch_size"] = default_micro_batch_size(arguments["batch_size"])
    check_numbers(arguments["batch_size"], arguments["micro_batch_size"], environment.world_size, advise)
    return RunConfig(**{name: OPTIONS[name].check(name, value) for name, value in arguments.items()})


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


def _check_one_directory(said: str, given: Any) -> None:
    """Refuse a second run in one directory (the folds of a cross-validation): it would resume the first one."""
    before = _replaced.setdefault(said, str(given))
    if before != str(given):
        raise UsageError(
            f"this script creates a run in {before} and one in {given}, but --run-dir (or SAMESTEP_RUN_DIR) sets "
            f"{said} for both: leave it out, so that each run uses the directory in the script",
            code="SS222",
        )
