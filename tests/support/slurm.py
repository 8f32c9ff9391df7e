"""A Slurm cluster on this machine: a controller, and daemons for several nodes of 4 cores each.

Nothing of the system's own Slurm is read or written: configuration, keys, sockets and logs live in one directory.
"""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from samestep.processes import running
from support.ports import reserve_port
from support.runs import clean_variables
from support.waiting import DEADLINE_S, wait_until

# cred_expire: the time that a requeued job waits, and a second more. The timeouts are for a busy machine: a daemon that
# is late is no failed node, and a job that is cancelled has the time to save.
CONFIGURATION = """\
ClusterName=samestep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,requeue_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MessageTimeout=60
SlurmdTimeout=120
KillWait=120
ReturnToService=2
FirstJobId={first_job}
JobRequeue=1
SlurmdParameters=config_overrides
"""
ASK_EVERY_S = 0.1
TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")


def why_not() -> str:
    """Return why a cluster cannot be started here; "" if it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


class Cluster:
    """A cluster whose daemons run until `stack` is closed.

    Attributes:
        variables: environment variables by which commands find it.
    """

    def __init__(self, root: Path, num_nodes: int, stack: ExitStack) -> None:
        self.root = root
        self.nodes = [f"n{number}" for number in range(1, num_nodes + 1)]
        self._stack = stack
        self.variables = {"SLURM_CONF": str(root / "slurm.conf")}

    def start(self, ports: Sequence[int]) -> None:
        """Start the daemons, with a port for each. Returns when all nodes wait for jobs."""
        for name in ("state", "spool", "log"):
            (self.root / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 Sockets=1 CoresPerSocket=4 "
            "ThreadsPerCore=1 RealMemory=1000\n"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        ]
        lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=1-0 DefaultTime=10 State=UP\n")
        # Jobs of clusters that run at the same time have different numbers, which determine the ports of their runs.
        first_job = 1 + os.getpid() * 20 % 16000
        (self.root / "slurm.conf").write_text(
            CONFIGURATION.format(host=host, port=ports[0], root=self.root, first_job=first_job) + "".join(lines)
        )
        munge = self.root / "munge"
        munge.mkdir(mode=0o711)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={munge / name}" for option, name in files.items()]
        self._start("munged", "munged", "--foreground", "--force", *options)
        wait_until((munge / "socket").exists, "munged listens")
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for name in self.nodes:
            self._start(name, "slurmd", "-D", "-N", name)
        self.wait_idle()

    def _start(self, name: str, *words: str) -> None:
        variables = clean_variables({**self.variables, "PATH": f"{os.environ['PATH']}:/usr/sbin"})
        command = ["setpriv", "--pdeathsig", "KILL", *words]
        self._stack.enter_context(running(command, variables, self.root / "log" / f"{name}.out"))

    def run(self, *words: str) -> str:
        """Run a command of Slurm. Fails if it fails."""
        done = self.try_run(*words)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def try_run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, env=clean_variables(self.variables), capture_output=True, text=True, check=False, timeout=DEADLINE_S
        )

    def wait_idle(self) -> None:
        """Wait until no node has a job."""
        idle, words = ["idle"] * len(self.nodes), ("sinfo", "--noheader", "--Node", "--format=%T")
        wait_until(lambda: self.try_run(*words).stdout.split() == idle, "all nodes are idle", every_s=ASK_EVERY_S)

    def show(self, job: str) -> Mapping[str, str]:
        """Return what Slurm shows about a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", "--oneliner", job)))

    def wait_for(self, job: str, state: str) -> None:
        wait_until(lambda: self.show(job)["JobState"] == state, f"job {job} is {state}", every_s=ASK_EVERY_S)

    def close(self) -> None:
        """End all processes of jobs."""
        left = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == self.variables["SLURM_CONF"]:  # of a job of this cluster
                    left.append(process)
                    process.kill()
        psutil.wait_procs(left, 10)


@contextmanager
def open_cluster() -> Iterator[Cluster]:
    """Open a cluster of two nodes. Its processes are ended afterwards."""
    with ExitStack() as stack:
        root = stack.enter_context(TemporaryDirectory(prefix="slurm-", dir="/tmp"))  # the path of a socket is limited
        ports = [stack.enter_context(reserve_port()) for _ in range(3)]
        cluster = Cluster(Path(root), 2, stack)
        stack.callback(cluster.close)  # after the daemons, which are opened later, have ended
        cluster.start(ports)
        yield cluster
