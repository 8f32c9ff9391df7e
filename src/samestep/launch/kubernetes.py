"""`samestep submit --k8s`: submits a JobSet whose pods are the nodes."""

import json
import re
import subprocess
from typing import Any

from samestep.console import say
from samestep.errors import Error
from samestep.launch.handshake import make_secret
from samestep.launch.job import Job
from samestep.launch.rendezvous_client import DEFAULT_PORT
from samestep.world.environment import SECRET, START_AGAIN

GROUP = "node"  # the only group of pods
MOST_NAME = 63 - len(f"-{GROUP}-0-0000")  # longest name that leaves room for a pod's host name
USERS_GROUP = 10001  # that of the Dockerfile's user
SPARE_S = 30  # for the launcher, in addition to the grace time of its ranks
MAX_RESTARTS = 3  # default
WAIT = 'until getent hosts {host}; do sleep 1; done; exec "$@"'  # DNS knows the name a while after the start


def build_manifest(job: Job) -> dict[str, Any]:
    """Build the JobSet. Raises Error if the image is missing, a name or claim is invalid, or the run would be lost.

    With a claim and no run directory, the run is in the directory on the claim that has the job's name.
    A pod with exit code 75 has saved; a disrupted pod has lost its machine. In both cases its Job fails with the reason
    PodFailurePolicy and all pods restart, without a limit. After other failures they restart --max-restarts times.
    """
    options = job.options
    if "image" not in options:
        raise Error("--k8s needs --image IMAGE: a container image with torch, samestep and the script")
    name = build_name(job.name)
    first = f"{name}-{GROUP}-0-0.{name}"  # the first pod, in the headless service of the JobSet
    run_dir, volumes, mounts = _place_run(job, name)
    wait, launch = (
        ["sh", "-c", WAIT.format(host=first), "sh"],
        # Kubernetes expands $(NAME), and replaces $$ by $.
        [word.replace("$", "$$") for word in job.build_command("python", f"{first}:{DEFAULT_PORT}", run_dir)],
    )
    key = {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": f"{name}-rdzv", "key": "secret"}}}
    resources: dict[str, Any] = {"requests": {"cpu": job.num_cpus}}
    if job.num_gpus:
        resources["limits"] = {"nvidia.com/gpu": job.num_gpus}
    container = {
        "name": "launch",
        "image": options["image"],
        **({"command": wait, "args": launch, "env": [key]} if job.num_nodes > 1 else {"command": launch}),
        "resources": resources,
        "volumeMounts": mounts,
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s + SPARE_S,
        # So that a user other than root, as of the Dockerfile's image, can write on the claim.
        "securityContext": {"fsGroup": USERS_GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [container],
        "volumes": volumes,
    }
    failures = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [START_AGAIN]}},
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]},
    ]
    pods = {
        "completionMode": "Indexed",
        "completions": job.num_nodes,
        "parallelism": job.num_nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": failures},
        "podReplacementPolicy": "Failed",
        "template": {"spec": pod},
    }
    again = {
        "name": "savedOrDisrupted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, **({"namespace": options["namespace"]} if "namespace" in options else {})},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": options.get("max_restarts", MAX_RESTARTS), "rules": [again]},
            "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": pods}}],
        },
    }


def _place_run(job: Job, name: str) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the run directory, the volumes and where to mount them. Raises Error if the run would be lost."""
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]  # a container's own is too small for data loaders
    run_dir, given = job.run_dir, str(job.options.get("claim", ""))
    if given:
        claim, _, path = given.partition(":")
        if not claim or not path.startswith("/"):
            raise Error(f"--claim takes CLAIM:/PATH, not {given!r}")
        run_dir = run_dir or f"{path.rstrip('/')}/{name}"
        if "://" not in run_dir and not run_dir.startswith(f"{path.rstrip('/')}/"):
            raise Error(
                f"--run-dir {run_dir} is not on the claim, which is mounted at {path}, and would be lost with its "
                "pod: name a directory below it"
            )
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "runs", "mountPath": path})
    elif "://" not in run_dir:
        raise Error(
            "the disk of a pod is lost with the pod, and the run with it: give --claim CLAIM:/PATH, a "
            "PersistentVolumeClaim and where to mount it, or --run-dir URL, such as s3://BUCKET/RUN"
        )
    return run_dir, volumes, mounts


def build_secret(job: Job) -> dict[str, Any]:
    """Build the Secret that the launchers share, with a new value."""
    namespace = {"namespace": job.options["namespace"]} if "namespace" in job.options else {}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{build_name(job.name)}-rdzv", **namespace},
        "stringData": {"secret": make_secret()},
    }


def build_name(text: str) -> str:
    """Convert to a Kubernetes name: lower-case letters, digits and dashes. Raises Error if nothing remains."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:MOST_NAME].rstrip("-")
    if not name:
        raise Error(f"{text!r} contains no Kubernetes name: give one with --job-name")
    return name


def submit_to_kubernetes(job: Job) -> int:
    """Apply the JobSet and the Secret with kubectl, or print them with --dry-run. Returns the exit code."""
    manifests = [build_manifest(job), *([build_secret(job)] if job.num_nodes > 1 else [])]
    # Documents of a YAML stream, of which JSON is a subset.
    text = "".join(f"---\n{json.dumps(manifest, indent=2)}\n" for manifest in reversed(manifests))
    if job.options.get("dry_run"):
        print(text, end="")
        return 0
    try:
        done = subprocess.run(["kubectl", "apply", "-f", "-"], input=text, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Error(
            f"kubectl cannot be started ({error.strerror}): install it, or print the manifest with --dry-run"
        ) from None
    if done.returncode:
        raise Error(f"kubectl refused the JobSet: {' '.join(done.stderr.split())}")
    name = build_name(job.name)
    secret = f" secret/{name}-rdzv" if job.num_nodes > 1 else ""
    say(f"{'; '.join(done.stdout.splitlines())}; its output: kubectl logs -f -l "
        f"jobset.sigs.k8s.io/jobset-name={name}; to end it: kubectl delete jobset/{name}{secret}")  # fmt: skip
    return 0
