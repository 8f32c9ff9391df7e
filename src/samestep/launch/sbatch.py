"""`samestep submit` to Slurm: writes and submits the batch script, and follows the output of the job.

The batch script starts one launcher per node, not one task per rank (docs/decisions/slurm.md), and requeues the job if
the launchers report that the run was stopped and has saved.
"""

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from samestep.console import say
from samestep.errors import Error
from samestep.files import open_regular, replace_file
from samestep.launch.job import Job
from samestep.processes import run_captured
from samestep.version import __version__
from samestep.world.environment import SECRET, START_AGAIN, child_variables

READ_S = 0.2  # interval at which the output is read
# interval of queries to Slurm; grows while nothing changes
ASK_S = 0.5
MAX_ASK_S = 10.0
FIRST_PORT = 15000
NUM_PORTS = 17000

ENDS = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")

SCRIPT = """\
#!/bin/bash
# Written by samestep {version}. To resume the run from its newest snapshot: sbatch THIS-FILE
{directives}

{launch}
rc=$?
{own_code}
# {start_again}: the run was stopped and has saved. The job is requeued, and then resumes.
# {killed}: SIGUSR1 came before the ranks existed. The job is requeued, up to its 10th restart.
if [ $rc -eq {start_again} ] || {{ [ $rc -eq {killed} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 10 ]; }}; then
  scontrol requeue {job_id}
fi
exit $rc
"""

# The address of the batch script's node, as Slurm itself reaches it, and a port that depends on the job.
# The launchers' secret, new at each start: srun passes the environment on, and no process list shows it.
ENDPOINT = f"""\
export {SECRET}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
head=$(scontrol show node --oneliner "$SLURMD_NODENAME" | grep -o ' NodeAddr=[^ ]*' | cut -d= -f2)
port=$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))
"""

# With --heal: srun would return the code of a node that was lost. The launcher of the first node, which is the
# rendezvous, knows how the run has ended. Each launcher handles the signals; its shell waits for it.
KEEP_CODE = """trap : USR1 TERM INT; "$@"; rc=$?; if [ "$SLURM_NODEID" = 0 ]; then echo $rc > "$0"; fi; exit $rc"""
OWN_CODE = """\
if [ -s "$code" ]; then rc=$(cat "$code"); fi
rm -f "$code"
"""


def render(job: Job) -> str:
    """Return the batch script."""
    options = job.options
    is_array = "array" in job.options
    directory = find_directory(job)
    given = {name: options[name] for name in ("time", "partition", "account", "array") if name in options}
    directives = {
        "job-name": job.name,
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": job.num_cpus,
        **({"gpus-per-node": job.num_gpus} if job.num_gpus else {}),
        **given,
        "signal": f"USR1@{job.grace_s}",
        "open-mode": "append",
        "chdir": Path.cwd(),
        "output": str(directory / ("%A_%a.out" if is_array else "%j.out")),
    }
    for name, value in directives.items():
        if not str(value).isprintable():
            raise Error(
                f"--{name} of the batch script would be {str(value)!r}: use names without control characters for the "
                "script and its directories",
                code="SS101",
            )
    lines = [f"#SBATCH --{name}={_quote(str(value))}" for name, value in directives.items()]
    heals = options.get("heal", False)
    flags = ["requeue", *(["no-kill"] if heals else [])]
    lines += [*(f"#SBATCH --{option}" for option in flags), *(f"#SBATCH {each}" for each in options.get("sbatch", ()))]
    run_dir = f"{job.run_dir}/$SLURM_ARRAY_TASK_ID" if is_array else job.run_dir
    command = job.build_command(sys.executable, "$head:$port", run_dir)
    of_shell = {"$head:$port": '"$head:$port"'}
    if is_array:
        of_shell[run_dir] = f"{shlex.quote(job.run_dir)}/$SLURM_ARRAY_TASK_ID"
    words = [of_shell.get(word, shlex.quote(word)) for word in command]
    # A launcher that ends before the others must not end the step. Without --heal, Slurm itself handles a lost node.
    srun = f"srun --export=ALL --cpus-per-task={job.num_cpus} --kill-on-bad-exit=0 --wait=0"
    if heals:
        srun += f' --no-kill bash -c {shlex.quote(KEEP_CODE)} "$code"'
    return SCRIPT.format(
        version=__version__,
        directives="\n".join(lines),
        launch=(ENDPOINT if job.num_nodes > 1 else "")
        + ("code=$(mktemp)\n" if heals else "")
        + f"{srun} \\\n  {' '.join(words)}",
        own_code=OWN_CODE if heals else "",
        start_again=START_AGAIN,
        killed=128 + signal.SIGUSR1,
        # The job id of the last task of an array is that of the array: it would requeue all tasks.
        job_id='"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if is_array else '"$SLURM_JOB_ID"',
    )


def _quote(text: str) -> str:
    """Quote a value for sbatch, which reads it like a shell, without variables."""
    return text if re.fullmatch(r"[\w@%+=:,./-]+", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def find_directory(job: Job) -> Path:
    """Return the directory of the batch script and the output; for a run at a URL, in the working directory."""
    return Path("slurm") if "://" in job.run_dir else Path(job.run_dir or ".", "slurm")


def submit_to_slurm(job: Job) -> int:
    """Submit a job, follow it unless --detach is given, and return the exit code."""
    script = render(job)
    if job.options.get("dry_run"):
        print(script, end="")
        return 0
    if job.options.get("test_only"):
        print("\n".join(estimate_start(script)))
        return 0
    directory = find_directory(job)
    for path in (directory, *directory.glob("*.out")):
        if path.is_symlink():
            raise Error(
                f"{path} is a link, and Slurm would write the output of the job through it: remove it", code="SS401"
            )
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        number = _sbatch(["--parsable"], script).stdout.strip().partition(";")[0]
    except Error:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise
    kept = directory / f"{number}.sbatch"
    replace_file(kept, script.encode())
    say(f"submitted job {number} ({kept}); to cancel it: scancel {number}")
    files = directory / (f"{number}_*.out" if "array" in job.options else f"{number}.out")
    if job.options.get("detach"):
        say(f"its output: {files}")
        return 0
    follower = Follower(number, files)
    try:
        return follower.run()
    except KeyboardInterrupt:
        say(f"job {number} continues; to follow it again: tail -F {files}; to cancel it: scancel {number}")
        raise


def estimate_start(script: str) -> list[str]:
    """Return Slurm's lines about when and where it would start a batch script. Raises Error if it would not."""
    return [line.removeprefix("sbatch: ") for line in _sbatch(["--test-only"], script).stderr.splitlines()]


def _sbatch(options: Sequence[str], script: str) -> subprocess.CompletedProcess[str]:
    variables = child_variables() | {"SLURM_TIME_FORMAT": "standard"}  # times are read from what it prints
    try:
        done = run_captured(["sbatch", *options], variables=variables, stdin=script)
    except OSError as error:
        raise Error(
            f"sbatch cannot be started ({error.strerror}): submit from a machine of the cluster, or print the batch "
            "script with --dry-run",
            code="SS107",
        ) from None
    if done.returncode:
        lines = [line.strip().removeprefix("sbatch: ") for line in done.stderr.splitlines() if line.strip()]
        words = "; ".join(line.removeprefix("error: ") for line in lines)
        raise Error(f"sbatch refused the job: {words or f'exit code {done.returncode}'}", code="SS512")
    return done


class Follower:
    """Follows a job, or the tasks of an array, to its end. `files`: its output file; for an array, a pattern."""

    def __init__(self, number: str, files: Path) -> None:
        self._number = number
        self._files = files
        self._is_array = "*" in files.name
        self._read: dict[Path, int] = {}
        self._said: dict[str, str] = {}

    def run(self) -> int:
        """Show the output and state of the job. Returns its exit code at the end."""
        wait_s = ASK_S
        asked_s = -MAX_ASK_S
        is_over = False  # must be observed twice, because a job that is being requeued is briefly reported as failed
        while True:
            self._copy_output()
            if time.monotonic() - asked_s >= wait_s:
                tasks = self._ask()
                asked_s = time.monotonic()
                is_changed = self._say_changes(tasks)
                wait_s = ASK_S if is_changed else min(wait_s * 1.2, MAX_ASK_S)
                now_over = all(task["JobState"] in ENDS for task in tasks)
                if is_over and now_over:
                    self._copy_output()
                    return max((self._conclude(task) for task in tasks), default=1)
                if now_over:
                    wait_s = ASK_S
                is_over = now_over
            time.sleep(READ_S)

    def _ask(self) -> list[dict[str, str]]:
        """Query the state of each task."""
        while True:
            done = run_captured(["scontrol", "show", "job", "--oneliner", self._number])
            if done.returncode == 0:
                return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in done.stdout.splitlines() if line.strip()]
            if "Invalid job id" in done.stderr:
                raise Error(
                    f"Slurm has dropped job {self._number}, and how it ended: see its output in {self._files}, or "
                    "sacct",
                    code="SS512",
                )
            time.sleep(MAX_ASK_S)  # the controller is down or busy

    def _say_changes(self, tasks: Sequence[dict[str, str]]) -> bool:
        is_changed = False
        for task in tasks:
            state = task["JobState"]
            name = self._name(task)
            reason = task.get("Reason", "None")
            text = f"{state.lower().replace('_', ' ')}"
            if state == "PENDING" and reason not in ("None", ""):
                text = f"pending ({reason})"
            elif state == "RUNNING":
                text = f"running on {task.get('NodeList', '')}"
            if task.get("Restarts", "0") != "0" and state in ("PENDING", "RUNNING"):
                text += f", start {int(task['Restarts']) + 1}"
            if state == "COMPLETING" or self._said.get(name) == text:
                continue
            self._said[name] = text
            is_changed = True
            if state not in ENDS:
                say(f"{name} is {text}")
        return is_changed

    def _name(self, task: dict[str, str]) -> str:
        return f"job {self._number}" + (f"_{task.get('ArrayTaskId', '')}" if self._is_array else "")

    def _conclude(self, task: dict[str, str]) -> int:
        """Print how a failed task has ended. Returns the exit code."""
        code, _, signum = task.get("ExitCode", "1:0").partition(":")
        found = int(code) or (128 + int(signum) if int(signum or 0) else 0)
        if task["JobState"] == "COMPLETED":
            return found
        say(f"{self._name(task)} has ended: {self._said.get(self._name(task))}, exit code {code}:{signum}")
        return found or 1

    def _copy_output(self) -> None:
        """Show the new output."""
        files = sorted(self._files.parent.glob(self._files.name)) if self._is_array else [self._files]
        for file in files:
            # Opened each time, because a network file system updates its cache on open.
            with suppress(FileNotFoundError), open(file, "rb", opener=open_regular) as opened:
                opened.seek(self._read.get(file, 0))
                data = opened.read()
                if self._is_array:
                    data = data[: data.rfind(b"\n") + 1]
                self._read[file] = self._read.get(file, 0) + len(data)
                if data and self._is_array:
                    mark = file.stem.partition("_")[2].encode()
                    data = b"".join(b"[" + mark + b"] " + line for line in data.splitlines(keepends=True))
                sys.stdout.buffer.write(data)
        sys.stdout.flush()
