"""`samestep slurm`: prints a batch script.

The batch script starts one launcher per node, not one task per rank (docs/dev/slurm.md), and requeues the job if
the launchers report that the run was stopped and has saved.
"""

import re
import shlex
import signal
import sys
from pathlib import Path

import click

from samestep.config import OPTIONS, Option, format_flags, is_url, to_flags, whole
from samestep.errors import Error
from samestep.launch.target import COMMAND, ScriptCommand, Target, Values, check_target
from samestep.launch.target import FLAGS as LAUNCH_FLAGS
from samestep.plan.tree import check_numbers
from samestep.version import __version__
from samestep.world.environment import FIRST_PORT, NUM_PORTS, SECRET, START_AGAIN, read_overrides

GRACE_S = 120

FLAGS: dict[str, Option] = {
    "nodes": Option(int, "N", "number of nodes; default: 1", whole(1)),
    "gpus_per_node": Option(int, "G", "GPUs per node, each with a rank; default: none", whole(1)),
    "nproc_per_node": Option(int, "N", "ranks per node; default: one per GPU, else 1", whole(1)),
    "cpus_per_rank": Option(
        int, "N", "CPUs per rank, including its data loader; default: 4 with a GPU, else 1", whole(1)
    ),
    "time": Option(str, "T", "time limit of a start: 2:00:00, 90 (minutes), 1-12 (days-hours); longer than --grace-s"),
    "partition": Option(str, "P", "Slurm partition"),
    "account": Option(str, "A", "Slurm account"),
    "sbatch": Option(list, "OPTION", "another option of sbatch, such as --sbatch=--mem=64G; can be repeated"),
    "job_name": Option(str, "NAME", "name of the job; default: the script's"),
    **{name: LAUNCH_FLAGS[name] for name in ("show_all", "tf_config", "max_restarts", "heal")},
    **OPTIONS,
    "grace_s": Option(int, "S", f"seconds from the signal to the limit; default: {GRACE_S}", whole(1)),
}
PASSED_ON = {"show_all", "tf_config", "max_restarts", "heal", *OPTIONS} - {"run_dir"}

# srun would return the code of a node that was lost. The launcher of the first node, which is the rendezvous, knows how
# the run has ended. Each launcher handles the signals; its shell waits for it.
KEEP_CODE = """trap : USR1 TERM INT; "$@"; rc=$?; if [ "$SLURM_NODEID" = 0 ]; then echo $rc > "$0"; fi; exit $rc"""

# Where the nodes meet: the batch script's node, as Slurm itself reaches it, and a port that depends on the job.
# The nodes' secret, new at each start: srun passes the environment on, and no process list shows it.
ENDPOINT = f"""\
export {SECRET}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export MASTER_ADDR=$(scontrol show node --oneliner "$SLURMD_NODENAME" | grep -o ' NodeAddr=[^ ]*' | cut -d= -f2)
export MASTER_PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))
"""

# A launcher that ends before the others must not end the step: --kill-on-bad-exit=0 --wait=0.
SCRIPT = """\
#!/bin/bash
# Written by samestep {version}. Submitted again, it resumes the run from its newest snapshot.
# {num_ranks} ranks: a step needs {num_ranks} micro-batches or more (batch_size / micro_batch_size)
{directives}

{endpoint}code=$(mktemp)
srun --export=ALL --cpus-per-task={num_cpus} --kill-on-bad-exit=0 --wait=0{no_kill} bash -c {keep_code} "$code" \\
  {command}
rc=$?
if [ -s "$code" ]; then rc=$(cat "$code"); fi
rm -f "$code"
# {start_again}: the run was stopped and has saved. The job is requeued, and then resumes.
# {killed}: SIGUSR1 came before the ranks existed. The job is requeued, up to its 10th restart.
if [ $rc -eq {start_again} ] || {{ [ $rc -eq {killed} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 10 ]; }}; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $rc
"""


@click.command("slurm", cls=ScriptCommand, flags=FLAGS)
def run_slurm(target: Target, values: Values) -> None:
    """Prints the batch script of a run, for Slurm: samestep slurm --nodes 2 ... train.py | sbatch

    Before the time limit Slurm signals the run, which saves and requeues its job. A job that loses a node is requeued
    too. The run continues in the same directory, as often as needed, without changes to the script.
    """
    script = render_script(target, values)
    directory = find_directory(values)
    for path in (directory, *directory.glob("*.out")):
        if path.is_symlink():
            raise Error(
                f"{path} is a link, and Slurm would write the output of the job through it: remove it", code="SS401"
            )
    # Slurm does not create it, and a job whose output has no directory fails without a word.
    directory.mkdir(parents=True, exist_ok=True)
    print(script, end="")


def render_script(target: Target, values: Values) -> str:
    """Return the batch script of a job. Raises Error if an option is invalid."""
    check_target(target)
    for name in ("fresh", "resume"):
        if name in values:
            raise Error(
                f"--{name} would apply to each start of the job, which would lose the work of the previous one: name "
                "another --run-dir instead",
                code="SS104",
            )
    num_nodes, num_gpus = values.get("nodes", 1), values.get("gpus_per_node", 0)
    num_local = values.get("nproc_per_node", num_gpus or 1)
    num_cpus = num_local * values.get("cpus_per_rank", 4 if num_gpus else 1)
    sizes = {**read_overrides(), **values}
    if "batch_size" in sizes and "micro_batch_size" in sizes:
        check_numbers(sizes["batch_size"], sizes["micro_batch_size"], num_nodes * num_local, format_flags)
    directives = {
        "job-name": values.get("job_name") or (Path(target.name).stem if target.kind == "script" else target.said),
        "nodes": num_nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": num_cpus,
        **({"gpus-per-node": num_gpus} if num_gpus else {}),
        **{name: values[name] for name in ("time", "partition", "account") if name in values},
        "signal": f"USR1@{values.get('grace_s', GRACE_S)}",
        "open-mode": "append",
        "chdir": Path.cwd(),
        "output": find_directory(values) / "%j.out",
    }
    lines = [f"--{name}={_quote(str(value))}" for name, value in directives.items()]
    lines += ["--requeue", *(["--no-kill"] if values.get("heal") else []), *values.get("sbatch", ())]
    for line in lines:
        if not line.isprintable():
            raise Error(
                f"the batch script would have the option {line!r}: use names without control characters",
                code="SS101",
            )
    flags = ["--nproc-per-node", num_local, *(["--run-dir", values["run_dir"]] if values.get("run_dir") else [])]
    flags += to_flags({name: value for name, value in values.items() if name in PASSED_ON})
    start = shlex.join([sys.executable, *COMMAND[1:], "node" if num_nodes > 1 else "launch"])
    return SCRIPT.format(
        version=__version__,
        num_ranks=num_nodes * num_local,
        directives="\n".join(f"#SBATCH {line}" for line in lines),
        endpoint=ENDPOINT if num_nodes > 1 else "",
        num_cpus=num_cpus,
        no_kill=" --no-kill" if values.get("heal") else "",
        keep_code=shlex.quote(KEEP_CODE),
        command=f"{start} {shlex.join([*map(str, flags), *target.to_words()])}",
        start_again=START_AGAIN,
        killed=128 + signal.SIGUSR1,
    )


def _quote(text: str) -> str:
    """Quote a value for sbatch, which reads it like a shell, without variables."""
    return text if re.fullmatch(r"[\w@%+=:,./-]+", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def find_directory(values: Values) -> Path:
    """Return the directory of the output of the job; for a run at a URL, in the working directory."""
    run_dir = values.get("run_dir", "")
    return Path("slurm") if is_url(run_dir) else Path(run_dir, "slurm")
