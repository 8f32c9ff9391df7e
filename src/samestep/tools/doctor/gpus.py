"""Checks the GPUs of each node: number, free memory and health."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.errors import Error
from samestep.tools.doctor.facts import CheckFacts, Context, Finding, failure, warning, well
from samestep.units import format_bytes

LEAST_FREE = 0.9  # fraction of a GPU's memory
# Bits of nvmlDeviceGetCurrentClocksEventReasons that a healthy GPU never sets, busy or idle.
SLOWDOWNS = {
    0x08: "slowed down by its hardware",
    0x20: "slowed down, too hot",
    0x40: "slowed down by its hardware, too hot",
    0x80: "slowed down by the power supply",
}
# constants of NVML
UNCORRECTED = 1
VOLATILE = 0


def look_at_gpus(context: Context) -> dict[str, Any]:
    """Collect the device of this rank, and on the first rank of a node all GPUs of the node."""
    import torch

    from samestep.world.group_opening import choose_device

    facts: dict[str, Any] = {"device": "cpu", "problem": ""}
    try:
        facts["device"] = choose_device(context.environment, context.options.device).type
    except Error as error:
        facts["problem"] = str(error)
    if context.is_leader:
        is_usable = torch.cuda.is_available()
        num_gpus = torch.cuda.device_count() if is_usable else 0
        facts["num_gpus"] = num_gpus
        facts["num_present"] = len(list(Path("/dev").glob("nvidia[0-9]*")))
        facts["torch"] = torch.__version__
        facts["no_peers"] = [
            [one, other]
            for one in range(num_gpus)
            for other in range(num_gpus)
            if one != other and not torch.cuda.can_device_access_peer(one, other)
        ]
        facts["names"] = [torch.cuda.get_device_name(i) for i in range(num_gpus)]
        uuids = [str(getattr(torch.cuda.get_device_properties(i), "uuid", "")) for i in range(num_gpus)]
        facts["gpus"] = read_gpus(open_nvml(), uuids) if num_gpus else []
    return facts


def open_nvml() -> Any:
    """Return the initialised module of nvidia-ml-py; None if it or its library is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml


def read_gpus(nvml: Any, uuids: Iterable[str] = ()) -> list[dict[str, Any]] | None:
    """Query NVML for each GPU that torch sees; None without NVML. Unsupported values are left out."""
    if nvml is None:
        return None
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    seen = [uuid for uuid in uuids if uuid]
    if seen:
        handles = [h for h in handles if any(uuid in _text(nvml.nvmlDeviceGetUUID(h)) for uuid in seen)]
    gpus = []
    for handle in handles:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        gpu = {
            "name": _text(nvml.nvmlDeviceGetName(handle)),
            "free_bytes": memory.free,
            "total_bytes": memory.total,
        }
        with suppress(nvml.NVMLError):
            gpu["temperature"] = nvml.nvmlDeviceGetTemperature(handle, 0)
        with suppress(nvml.NVMLError):
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            gpu["slowdowns"] = [text for bit, text in SLOWDOWNS.items() if reasons & bit]
        with suppress(nvml.NVMLError):
            gpu["ecc_errors"] = nvml.nvmlDeviceGetTotalEccErrors(handle, UNCORRECTED, VOLATILE)
        with suppress(nvml.NVMLError):
            _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
            gpu["rows"] = "pending" if is_pending else ""
            if has_failed:
                gpu["rows"] = "failed"
        gpus.append(gpu)
    return gpus


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def judge_gpus(facts: CheckFacts) -> Iterator[Finding]:
    """Report missing, different, occupied, throttled and failing GPUs."""
    participants = facts.participants
    by_node = facts.by_node
    problems = {rank: fact["problem"] for rank, fact in facts.by_rank.items() if fact["problem"]}
    for rank in sorted(problems)[:1]:  # the other ranks have the same one
        found = f"{problems[rank]} (on {participants.name_ranks([rank])})"
        yield failure(found, "give every rank a GPU, or use --device cpu")
    for node, fact in by_node.items():
        if fact["num_present"] and not fact["num_gpus"]:
            found = f"torch {fact['torch']} cannot use the {fact['num_present']} GPUs of {participants.name_node(node)}"
            advice = "install a build of torch for CUDA, and a driver that is new enough for it (nvidia-smi)"
            yield failure(found, advice)
    counts = {node: fact["num_gpus"] for node, fact in by_node.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{num} on {participants.name_node(node)}" for node, num in counts.items())
        advice = "check with nvidia-smi whether a GPU is missing; all nodes need as many as --nproc-per-node"
        yield warning(f"GPUs: {shown}", advice)
    for node, fact in by_node.items():
        yield from _judge_node(participants.name_node(node), fact)
    gpus = [gpu for fact in by_node.values() for gpu in fact["gpus"] or ()]
    names = sorted({gpu["name"] for gpu in gpus} or {name for fact in by_node.values() for name in fact["names"]})
    if len(names) > 1:
        advice = "results are bitwise equal on GPUs of one model only: leave the others out (CUDA_VISIBLE_DEVICES)"
        yield warning(f"GPUs of several models: {', '.join(names)}", advice)
    on_cpu = [rank for rank, fact in facts.by_rank.items() if fact["device"] == "cpu"]
    if 0 < len(on_cpu) < len(facts.by_rank):
        found = f"{participants.name_ranks(on_cpu)}: on the CPU, the others on GPUs"
        yield failure(found, "give every rank a GPU, or use --device cpu")
    if any(counts.values()):
        shown = f"{max(counts.values())} x {names[0] if names else 'GPU'}"
        shown += f"{' on each host' if len(participants.leaders) > 1 else ''}, nothing wrong with them"
        shown += "; ranks run on the CPU as asked for" if on_cpu else ""
    else:
        shown = "no GPU: ranks run on the CPU"
    yield well(shown, {participants.name_node(node): fact["gpus"] for node, fact in by_node.items()})


def _judge_node(name: str, fact: dict[str, Any]) -> Iterator[Finding]:
    if fact["num_gpus"] and fact["gpus"] is None:
        found = f"nvidia-ml-py is missing on {name}: memory, ECC errors and throttling of its GPUs were not checked"
        found += f" ({', '.join(sorted({*fact['names']}))})"
        yield warning(found, "pip install 'samestep[nvidia]'")
    for number, gpu in enumerate(fact["gpus"] or ()):
        where = f"GPU {number} of {name}"
        if gpu["free_bytes"] < LEAST_FREE * gpu["total_bytes"]:
            free = format_bytes(gpu["free_bytes"])
            total = format_bytes(gpu["total_bytes"])
            advice = "nvidia-smi shows the processes that hold the rest: end those of earlier runs"
            yield warning(f"{where} has {free} free of {total}", advice)
        for what in gpu.get("slowdowns", ()):
            heat = f", at {gpu['temperature']} C" if "temperature" in gpu else ""
            advice = "all ranks wait for it: check cooling and power, or leave it out (CUDA_VISIBLE_DEVICES)"
            yield warning(f"{where} is {what}{heat}", advice)
        if gpu.get("ecc_errors"):
            found = f"{where} has had {gpu['ecc_errors']} memory errors that ECC could not correct"
            yield failure(found, "drain the node, reset the GPU, and have it examined")
        rows = f"{where} has memory rows to be remapped ({gpu.get('rows')})"
        if gpu.get("rows") == "pending":
            yield warning(rows, "reset it")
        elif gpu.get("rows"):
            yield failure(rows, "have it replaced")
    if fact["no_peers"]:
        one, other = fact["no_peers"][0]
        found = f"GPUs {one} and {other} of {name} cannot reach each other's memory"
        found += f" ({len(fact['no_peers']) // 2} such pairs)" if len(fact["no_peers"]) > 2 else ""
        advice = "they exchange through the host, more slowly: see nvidia-smi topo -m; in a VM, turn ACS off"
        yield warning(found, advice)
