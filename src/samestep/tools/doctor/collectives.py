"""Checks the results of collectives, and measures each link between two nodes."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.tools.doctor.examination import Context
from samestep.tools.doctor.findings import FAIL, PASS, WARN, Finding, Participants
from samestep.units import format_bytes, format_time
from samestep.world.group import Group
from samestep.world.group_opening import choose_device, open_group
from samestep.world.process_group import close_group

TIMEOUT_S = 10.0
EXACT_SIZES = (1, 1000, 65537)  # elements per rank
LINK_BYTES = 64 << 20
LINK_CHUNK_BYTES = 256 << 10
LINK_GROWTH = 4
LINK_S = 0.1
PING_SIZE = 256  # numbers
NUM_LINK_PINGS = 10
# fraction of the median; number of links that are measured again
SLOW_LINK = 0.5
MAX_AGAIN = 24
# Slow links with one cause are about equally slow: the links up to this many times as fast as the slowest one.
SAME_CAUSE = 2.0

# torch 2.13 has renamed it.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def _all_reduce(output: Tensor, given: Tensor) -> None:
    output.copy_(given)
    dist.all_reduce(output)


def _pick_shares(inputs: Iterable[Tensor], rank: int, world_size: int) -> Tensor:
    return torch.cat([each.chunk(world_size)[rank].clone() for each in inputs])


# Name -> (output, input) -> None, and (the inputs of all ranks, rank, world size) -> the expected output. The input of
# an all-gather is one part, those of the others hold a part for each rank, as the output does.
OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], object], Callable[[Iterable[Tensor], int, int], Tensor]]] = {
    "all-reduce": (_all_reduce, lambda inputs, *_: reduce(torch.add, inputs)),
    "all-gather": (_all_gather, lambda inputs, *_: torch.cat([*inputs])),
    "all-to-all": (dist.all_to_all_single, _pick_shares),
}


# --- on every rank ----------------------------------------------------------------------------------------------


def look_at_collectives(context: Context) -> dict[str, Any] | None:
    """Open the group, check and measure. Collective. Returns None with one rank."""
    if context.environment.world_size == 1:
        return None
    context.doing = "joining the ranks"
    device = choose_device(context.environment, context.device)
    group = open_group(context.environment, device, timeout_s=TIMEOUT_S, compares=False)
    try:
        return {"wrong": check_results(context, group), "links": measure_links(context, group), "device": device.type}
    finally:
        group.close()
        with suppress(RuntimeError):
            close_group()


def check_results(context: Context, group: Group) -> list[str]:
    """Return a sentence for each operation whose result is not exact."""
    wrong = {}
    for name, (call, expect) in OPERATIONS.items():
        for num in EXACT_SIZES:
            context.doing = f"an {name} of {num} numbers per rank"
            width = num if name == "all-gather" else num * group.world_size
            output = torch.full((num * group.world_size,), -1.0, device=group.device)
            call(output, _fill(group.rank, width).to(group.device))
            expected = expect((_fill(rank, width) for rank in range(group.world_size)), group.rank, group.world_size)
            if differing := int((output.cpu() != expected).sum()):
                wrong[name] = f"{differing} of {len(expected)} numbers of an {name} are wrong"
    return list(wrong.values())


def _fill(rank: int, num: int) -> Tensor:
    """Return integers that differ between ranks, and whose sums float32 represents exactly for up to 5,000 ranks."""
    return (torch.arange(num) % 97 + rank).float()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- links --------------------------------------------------------------------------------------------------------


def plan_rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs of nodes that contain every pair once (a round-robin tournament)."""
    seats = list(range(num_nodes + num_nodes % 2))
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < num_nodes])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def measure_links(context: Context, group: Group) -> list[dict[str, Any]]:
    """Measure the links between the first ranks of all nodes, {"from", "to", "latency_s", "bytes_per_s"}. Collective.

    The pairs of a round run at the same time. Links that are slow then are measured again one after the other, because
    they can share a switch or a machine.
    """
    num_nodes = len(context.participants.leaders)
    if num_nodes == 1:
        return []
    pairs = [
        pair for round_ in plan_rounds(num_nodes) for one, other in round_ for pair in ((one, other), (other, one))
    ]
    links = _gather_links(group, [_measure_link(context, group, *pair) for pair in pairs])
    again = []
    for slow in find_slow([*links.values()])[:MAX_AGAIN]:
        group.barrier()
        again.append(_measure_link(context, group, slow["from"], slow["to"]))
    for pair, better in _gather_links(group, again).items():
        links[pair]["bytes_per_s"] = max(links[pair]["bytes_per_s"], better["bytes_per_s"])
        links[pair]["latency_s"] = min(links[pair]["latency_s"], better["latency_s"])
    return [*links.values()]


def _gather_links(group: Group, links: Sequence[dict[str, Any] | None]) -> dict[tuple[int, int], dict[str, Any]]:
    measured = [link for theirs in group.gather(links) for link in theirs if link is not None]
    return {(link["from"], link["to"]): link for link in measured}


def _measure_link(context: Context, group: Group, sender: int, receiver: int) -> dict[str, Any] | None:
    """Return the measurement on the sender; None on other ranks."""
    participants = context.participants
    start = participants.leaders[sender]
    end = participants.leaders[receiver]
    context.doing = f"sending from {participants.name_node(sender)} to {participants.name_node(receiver)}"
    if group.rank == start:
        return {"from": sender, "to": receiver, **_send(group, end)}
    if group.rank == end:
        _take(group, start)
    return None


def find_slow(links: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the links much slower than the median (of two: than the faster one), the slowest first."""
    usual = median_high([link["bytes_per_s"] for link in links])
    slow = [link for link in links if link["bytes_per_s"] < SLOW_LINK * usual]
    return sorted(slow, key=lambda link: float(link["bytes_per_s"]))


def _send(group: Group, peer: int) -> dict[str, float]:
    """Measure the latency, then send chunks of growing size until one takes long enough to time."""
    latency_s = min(_send_once(group, peer, torch.zeros(PING_SIZE)) for _ in range(NUM_LINK_PINGS))
    num_bytes = LINK_CHUNK_BYTES
    took_s = 0.0
    while True:
        # Each chunk takes LINK_GROWTH times as long as the one before; the numbers of the last one are 1.
        is_last = num_bytes >= LINK_BYTES or LINK_GROWTH * took_s > LINK_S
        took_s = _send_once(group, peer, torch.full((num_bytes // 4,), float(is_last)))
        if is_last:
            return {"latency_s": latency_s / 2, "bytes_per_s": num_bytes / max(took_s - latency_s / 2, 1e-9)}
        num_bytes *= LINK_GROWTH


def _send_once(group: Group, peer: int, data: Tensor) -> float:
    data = data.to(group.device)
    answer = torch.zeros(1, device=group.device)
    _wait(group.device)
    began_s = time.perf_counter()
    dist.send(data, peer)
    dist.recv(answer, peer)
    _wait(group.device)
    return time.perf_counter() - began_s


def _take(group: Group, peer: int) -> None:
    """Answer `_send`."""
    for _ in range(NUM_LINK_PINGS):
        _answer(group, peer, PING_SIZE)
    num_bytes = LINK_CHUNK_BYTES
    while not _answer(group, peer, num_bytes // 4)[0]:
        num_bytes *= LINK_GROWTH


def _answer(group: Group, peer: int, size: int) -> Tensor:
    data = torch.empty(size, device=group.device)
    dist.recv(data, peer)
    dist.send(torch.zeros(1, device=group.device), peer)
    return data


# --- findings -----------------------------------------------------------------------------------------------------


def judge_collectives(participants: Participants, facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    """Report wrong results."""
    if not facts:
        advice = "" if len(participants.hosts) > 1 else " (more with --nproc-per-node 2)"
        yield Finding(PASS, f"one rank: nothing to exchange{advice}")
        return
    for sentence in dict.fromkeys(text for fact in facts.values() for text in fact["wrong"]):
        ranks = [rank for rank, fact in facts.items() if sentence in fact["wrong"]]
        advice = "do not train here: look for failing memory, GPUs or network cards there (dmesg, DCGM)"
        yield Finding(FAIL, f"{sentence}: {participants.name_ranks(ranks)}", advice)
    devices = {fact["device"] for fact in facts.values()}
    yield Finding(PASS, f"right, over {'NCCL' if devices == {'cuda'} else 'gloo'}")


def judge_links(participants: Participants, facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    """Report the slowest link; warn about links much slower than the others."""
    links: list[dict[str, Any]] = next((fact["links"] for fact in facts.values()), [])
    if not links:
        return
    usual = median_high([link["bytes_per_s"] for link in links])
    ordered = sorted(links, key=lambda link: link["bytes_per_s"])
    measured = [{**link, **{end: participants.name_node(link[end]) for end in ("from", "to")}} for link in ordered]
    if slow := find_slow(links):
        shown = [_describe_link(participants, link) for link in slow]
        found = f"the slowest link is {shown[0]}{'; and ' if shown[1:] else ''}{', '.join(shown[1:4])}"
        found += f" and {len(slow) - 4} more" if len(slow) > 4 else ""
        suspect = _find_suspect(slow)
        where = "" if suspect is None else f" of {participants.name_node(suspect)}"
        advice = f"check the network card, cable and switch port{where} (ethtool: speed, errors), or leave it out"
        yield Finding(WARN, f"{found}; the median is {format_bytes(usual)}/s", advice, measured=measured)
    latency_s = max(link["latency_s"] for link in links)
    found = f"{format_bytes(usual)}/s from host to host (median), {format_time(latency_s)} at most for 1 KB; "
    yield Finding(PASS, f"{found}slowest: {_describe_link(participants, ordered[0])}", measured=measured)


def _find_suspect(slow: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the node whose network card or cable explains the slowest links; None if there is no such node.

    Links that are slow, but much faster than the slowest one, have another cause (a busy host, for example).
    """
    slowest = min(link["bytes_per_s"] for link in slow)
    slow = [link for link in slow if link["bytes_per_s"] <= SAME_CAUSE * slowest]
    senders = {link["from"] for link in slow}
    receivers = {link["to"] for link in slow}
    common = {node for node in senders | receivers if all(node in (link["from"], link["to"]) for link in slow)}
    return next((nodes.pop() for nodes in (common, senders, receivers) if len(nodes) == 1), None)


def _describe_link(participants: Participants, link: Mapping[str, Any]) -> str:
    start, end = (participants.name_node(link[name]) for name in ("from", "to"))
    return f"{start} -> {end}, {format_bytes(link['bytes_per_s'])}/s"
