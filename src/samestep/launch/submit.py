"""`samestep submit`: the options, and what Slurm and Kubernetes have in common."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.config import OPTIONS, Option, name_flag
from samestep.console import say
from samestep.errors import Error
from samestep.launch.launcher import check_target
from samestep.launch.local_ranks import Target

HELP = """\
usage: samestep submit [options] SCRIPT [arguments of the script]
       samestep submit [options] -m MODULE [arguments of the module]
       samestep submit RECIPE [options, and those of the recipe, in any order]

Submits a run to Slurm and shows its output as it comes. Ctrl-C ends the showing, not the job: scancel does that.
Before the time limit Slurm signals the run, which saves and has its job queued again; so has a job that lost a node.
It goes on in the same directory, as often as it takes: training scripts need not know. Where three starts in a row
are stopped before they have saved anything new, it ends with exit code 2.
Exit code: the job's; with --detach, --dry-run and --test-only 0 when that was well.

With --k8s, a JobSet for Kubernetes, which starts again what was evicted.
"""

GRACE_S = 120
LEAST_S = 120  # Slurm's clock for signals is a minute coarse, and on a busy file system ranks start in tens of seconds

FLAGS: dict[str, Option] = {
    "nodes": Option(int, "N", "how many; default: 1"),
    "gpus_per_node": Option(int, "G", "each with a rank; default: none"),
    "nproc_per_node": Option(int, "N", "ranks of each node; default: one per GPU, else 1"),
    "cpus_per_rank": Option(int, "N", "for the rank and its data loader; default: 4 with a GPU, else 1"),
    "time": Option(str, "T", "limit of one start, such as 2:00:00, 90 (minutes) or 1-12; default: the partition's"),
    "partition": Option(str, "P", "where to run"),
    "account": Option(str, "A", "who pays"),
    "array": Option(str, "LIST", "a run for each, as in 0-3,7%2, in RUN_DIR/<number>; it reads SLURM_ARRAY_TASK_ID"),
    "sbatch": Option(list, "OPTION", "one more for sbatch, such as --sbatch=--mem=64G; may be given several times"),
    "job_name": Option(str, "NAME", "default: the script's"),
    "dry_run": Option(bool, "", "print what would be submitted, and submit nothing"),
    "test_only": Option(bool, "", "print when Slurm expects to start it, and submit nothing"),
    "detach": Option(bool, "", "do not show the output"),
    "k8s": Option(bool, "", "for Kubernetes, by kubectl, instead of Slurm"),
    "image": Option(str, "IMAGE", "Kubernetes: a container image with torch, samestep and the script"),
    "claim": Option(str, "C:PATH", "Kubernetes: the PersistentVolumeClaim for the runs, and where to mount it"),
    "namespace": Option(str, "NAME", "Kubernetes: default: kubectl's"),
    "show_ranks": Option(str, "R", "whose output to show: all, or ranks such as 0,2; default: 0"),
    "max_restarts": Option(int, "N", "start all ranks again, from the newest snapshot, when one has failed"),
    **OPTIONS,
    "grace_s": Option(
        int, "S", f"seconds from the signal to the limit; default: {GRACE_S}, at most a quarter of --time"
    ),
}  # fmt: skip
ONLY_SLURM = ("cpus_per_rank", "time", "partition", "account", "array", "sbatch", "test_only")
ONLY_KUBERNETES = ("image", "claim", "namespace")


@dataclass(frozen=True)
class Job:
    """What is to be submitted.

    Attributes:
        name: of the job.
        num_nodes, num_ranks, num_gpus, num_cpus: the latter three of each node.
        grace_s: from the signal to stop to the kill.
        launch: further options of `samestep launch`.
        run_dir: that of the run; of an array, where those of its runs are; "": the script's own.
        options: those that are Slurm's or Kubernetes' own, by name.
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
        """What starts the ranks of a node.

        Args:
            python: the interpreter.
            endpoint: where the nodes meet.
            run_dir: the run's; "": the script's own.
        """
        command, words = self.target.to_command()
        nodes = ["--nnodes", str(self.num_nodes), "--rdzv-endpoint", endpoint] if self.num_nodes > 1 else []
        return [
            python, "-m", "samestep", command, *nodes, "--nproc-per-node", str(self.num_ranks),
            *(["--run-dir", run_dir] if run_dir else []), "--grace-s", str(self.grace_s), *self.launch,
            *words,
        ]  # fmt: skip


def run_submit(target: Target, values: Mapping[str, Any]) -> int:
    """Submits `target` with the options of FLAGS, and returns the exit code. Raises Error where they make no job."""
    is_kubernetes = bool(values.get("k8s"))
    for name in ONLY_SLURM if is_kubernetes else ONLY_KUBERNETES:
        if name in values:
            raise Error(f"{name_flag(name)} is for {'Slurm' if is_kubernetes else 'Kubernetes'} alone: " + (
                "leave it or --k8s out" if is_kubernetes else "leave it out, or add --k8s"
            ))  # fmt: skip
    job = build_job(target, values)
    if is_kubernetes:
        from samestep.launch.kubernetes import submit_to_kubernetes

        return submit_to_kubernetes(job)
    from samestep.launch.sbatch import submit_to_slurm

    return submit_to_slurm(job)


def build_job(target: Target, values: Mapping[str, Any]) -> Job:
    """The job of some options. Raises Error where they make none."""
    if not values.get("k8s"):  # there, the script is in the image
        check_target(target)
    for name in ("fresh", "resume"):
        if name in values:
            raise Error(
                f"--{name} would hold for each start of the job, so that what one has done is lost to the next: "
                "name another --run-dir instead"
            )
    for name in ("nodes", "nproc_per_node", "cpus_per_rank", "gpus_per_node", "grace_s"):
        if values.get(name, 1) < 1:
            raise Error(f"{name_flag(name)} must be at least 1, not {values[name]}")
    for name in ("job_name", "partition", "account", "sbatch"):
        given = values.get(name, ())
        for text in [given] if isinstance(given, str) else given:
            if not text.isprintable():
                raise Error(f"{name_flag(name)} takes one line of text, not {text!r}")
    if not re.fullmatch(r"(\d+(-\d+(:[1-9]\d*)?)?,?)+(%[1-9]\d*)?", values.get("array", "0")):
        raise Error(f"--array takes numbers and ranges, such as 0-3,7%2, not {values['array']!r}")
    if "array" in values and "run_dir" not in values:
        raise Error("--array needs --run-dir DIR: each of its runs gets a directory there")
    num_gpus = values.get("gpus_per_node", 0)
    num_ranks = values.get("nproc_per_node", num_gpus or 1)
    limit_s = parse_time(values["time"]) if "time" in values else None
    grace_s = values.get("grace_s", GRACE_S if limit_s is None else min(GRACE_S, max(limit_s // 4, 1)))
    if limit_s is not None and grace_s >= limit_s:
        raise Error(f"--grace-s {grace_s} is as long as --time {values['time']}: the run would stop as it starts")
    if limit_s is not None and limit_s - grace_s < LEAST_S:
        say(
            f"--time {values['time']} leaves {limit_s - grace_s} s before the signal to stop, which Slurm may send up "
            f"to 60 s early: give {LEAST_S} s and the time of some steps and a snapshot, or it may save nothing new"
        )
    launch = []
    for name, value in values.items():
        if name in ("show_ranks", "max_restarts", *OPTIONS) and name not in ("run_dir", "grace_s"):
            launch += [name_flag(name)] if value is True else [name_flag(name), str(value)]
    known_as = {"module": target.name, "recipe": target.name.rpartition(".")[2]}
    name = values.get("job_name") or known_as.get(target.kind, Path(target.name).stem)
    return Job(
        target=target,
        name=name,
        num_nodes=values.get("nodes", 1),
        num_ranks=num_ranks,
        num_gpus=num_gpus,
        num_cpus=num_ranks * values.get("cpus_per_rank", 4 if num_gpus else 1),
        grace_s=grace_s,
        launch=launch,
        run_dir=values.get("run_dir", ""),
        options=values,
    )


def parse_time(text: str) -> int | None:
    """Slurm's time limits in seconds: minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s; None: there is no limit."""
    if text.lower() in ("unlimited", "infinite", "-1"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise Error(f"--time takes minutes, h:m:s or days-h:m:s, such as 90, 2:00:00 or 1-12, not {text!r}")
    days, *parts = match.groups()
    first, *rest = [int(part) for part in parts if part is not None]
    if days is None and len(rest) < 2:
        total_s = first * 60 + sum(rest)
    else:
        total_s = int(days or 0) * 86400 + sum(n * unit for n, unit in zip((first, *rest), (3600, 60, 1), strict=False))
    if not total_s:
        raise Error(f"--time {text} leaves no time to train")
    return total_s
