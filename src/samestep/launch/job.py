"""A Slurm job: its resources and the command that each node runs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.config import OPTIONS, name_flag, to_flags
from samestep.console import say
from samestep.errors import Error
from samestep.launch.launcher import check_target
from samestep.launch.target import Target

GRACE_S = 120
LEAST_S = 120  # Slurm can signal a minute early, and on a busy file system ranks start in tens of seconds


@dataclass(frozen=True)
class Job:
    """A job to submit. The numbers of ranks, GPUs and CPUs are per node.

    Attributes:
        grace_s: seconds from the signal to stop to the kill.
        launch: more options of `samestep launch`.
        run_dir: the run's directory; of an array, the parent of its runs' directories; "": chosen by the script.
        options: the options of `samestep submit`, by name.
    """

    target: Target
    name: str
    num_nodes: int
    num_ranks: int
    num_gpus: int
    num_cpus: int
    grace_s: int
    launch: list[str]
    run_dir: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def build_command(self, python: str, endpoint: str, run_dir: str) -> list[str]:
        """Build the command that starts the ranks of a node. With `run_dir` "" the script chooses the directory."""
        command, words = self.target.to_command()
        nodes = ["--nnodes", str(self.num_nodes), "--rdzv-endpoint", endpoint] if self.num_nodes > 1 else []
        return [
            python,
            "-P",
            "-m",
            "samestep",
            command,
            *nodes,
            "--nproc-per-node",
            str(self.num_ranks),
            *(["--run-dir", run_dir] if run_dir else []),
            "--grace-s",
            str(self.grace_s),
            *self.launch,
            *words,
        ]


def build_job(target: Target, values: Mapping[str, Any]) -> Job:
    """Build a job from the options of `samestep submit`. Raises Error if an option is invalid."""
    check_target(target)
    for name in ("fresh", "resume"):
        if name in values:
            raise Error(
                f"--{name} would apply to each start of the job, which would lose the work of the previous one: name "
                "another --run-dir instead",
                code="SS104",
            )
    for name in ("job_name", "partition", "account", "sbatch"):
        given = values.get(name, ())
        for text in [given] if isinstance(given, str) else given:
            if not text.isprintable():
                raise Error(f"{name_flag(name)} takes one line of text, not {text!r}", code="SS101")
    if not re.fullmatch(r"(\d+(-\d+(:[1-9]\d*)?)?,?)+(%[1-9]\d*)?", values.get("array", "0")):
        raise Error(f"--array takes numbers and ranges, such as 0-3,7%2, not {values['array']!r}", code="SS101")
    if "array" in values and "run_dir" not in values:
        raise Error("--array needs --run-dir DIR: each of its runs gets a directory there", code="SS104")
    num_gpus = values.get("gpus_per_node", 0)
    num_ranks = values.get("nproc_per_node", num_gpus or 1)
    limit_s = parse_time(values["time"]) if "time" in values else None
    grace_s = values.get("grace_s", GRACE_S if limit_s is None else min(GRACE_S, max(limit_s // 4, 1)))
    if limit_s is not None and grace_s >= limit_s:
        raise Error(
            f"--grace-s {grace_s} is as long as --time {values['time']}: the run would stop as it starts", code="SS104"
        )
    if limit_s is not None and limit_s - grace_s < LEAST_S:
        say(
            f"--time {values['time']} leaves {limit_s - grace_s} s before the signal to stop, which Slurm can send up "
            f"to 60 s early: give {LEAST_S} s and the time of some steps and a snapshot, or it may save nothing new"
        )
    passed_on = {"show_ranks", "max_restarts", "heal", "tf_config", *OPTIONS} - {"run_dir", "grace_s"}
    default_names = {"module": target.name, "recipe": target.name.rpartition(".")[2]}
    name = values.get("job_name") or default_names.get(target.kind, Path(target.name).stem)
    return Job(
        target=target,
        name=name,
        num_nodes=values.get("nodes", 1),
        num_ranks=num_ranks,
        num_gpus=num_gpus,
        num_cpus=num_ranks * values.get("cpus_per_rank", 4 if num_gpus else 1),
        grace_s=grace_s,
        launch=to_flags({name: value for name, value in values.items() if name in passed_on}),
        run_dir=values.get("run_dir", ""),
        options=values,
    )


def parse_time(text: str) -> int | None:
    """Parse Slurm's time limit (minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s) into seconds; None: no limit."""
    if text.lower() in ("unlimited", "infinite", "-1"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise Error(
            f"--time takes minutes, h:m:s or days-h:m:s, such as 90, 2:00:00 or 1-12, not {text!r}", code="SS101"
        )
    days, *parts = match.groups()
    first, *rest = [int(part) for part in parts if part is not None]
    if days is None and len(rest) < 2:
        total_s = first * 60 + sum(rest)
    else:
        total_s = int(days or 0) * 86400 + sum(n * unit for n, unit in zip((first, *rest), (3600, 60, 1), strict=False))
    if not total_s:
        raise Error(f"--time {text} leaves no time to train", code="SS101")
    return total_s
