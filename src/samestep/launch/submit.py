"""`samestep submit`: its options."""

from collections.abc import Mapping
from typing import Any

import click

from samestep.config import OPTIONS, Option, whole
from samestep.launch import flags as launch
from samestep.launch.job import GRACE_S, build_job
from samestep.launch.script_command import ScriptCommand
from samestep.launch.target import Target

FLAGS: dict[str, Option] = {
    "nodes": Option(int, "N", "number of nodes; default: 1", whole(1)),
    "gpus_per_node": Option(int, "G", "GPUs per node, each with a rank; default: none", whole(1)),
    "nproc_per_node": Option(int, "N", "ranks per node; default: one per GPU, else 1", whole(1)),
    "cpus_per_rank": Option(
        int, "N", "CPUs per rank, including its data loader; default: 4 with a GPU, else 1", whole(1)
    ),
    "time": Option(str, "T", "time limit of a start: 2:00:00, 90 (minutes), 1-12 (days-hours)"),
    "partition": Option(str, "P", "Slurm partition"),
    "account": Option(str, "A", "Slurm account"),
    "array": Option(str, "LIST", "one run per number, such as 0-3,7%2, in RUN_DIR/<number>; see SLURM_ARRAY_TASK_ID"),
    "sbatch": Option(list, "OPTION", "another option of sbatch, such as --sbatch=--mem=64G; can be repeated"),
    "job_name": Option(str, "NAME", "name of the job; default: the script's"),
    "dry_run": Option(bool, "", "print the batch script, and submit nothing"),
    "test_only": Option(bool, "", "print when Slurm expects the job to start, and submit nothing"),
    "detach": Option(bool, "", "do not show the output"),
    **{name: launch.FLAGS[name] for name in ("show_ranks", "tf_config", "max_restarts", "heal")},
    **OPTIONS,
    "grace_s": Option(
        int, "S", f"seconds from the signal to the limit; default: {GRACE_S}, at most a quarter of --time", whole(1)
    ),
}


@click.command("submit", cls=ScriptCommand, flags=FLAGS)
def run_submit(target: Target, values: Mapping[str, Any]) -> int:
    """Submits a run to Slurm and shows its output.

    Ctrl-C stops showing the output, not the job; scancel cancels the job. Before the time limit Slurm signals the run,
    which saves and requeues its job. A job that loses a node is requeued too. The run continues in the same directory,
    as often as needed, without changes to the script. If three starts in a row are stopped before they have saved
    anything new, the job ends with exit code 2.
    Exit code: that of the job; with --detach, --dry-run and --test-only 0 on success.
    """
    from samestep.launch.sbatch import submit_to_slurm

    return submit_to_slurm(build_job(target, values))
