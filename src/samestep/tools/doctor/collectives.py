"""Checks the results of collectives, and measures each link between two nodes."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist

from samestep.tools.doctor.examination import Context
from samestep.tools.doctor.findings import FAIL, PASS, WARN, Finding, Participants
from samestep.units import format_bytes, format_time
from samestep.world.group import Group
from samestep.world.group_opening import choose_device, open_group
from samestep.world.process_group import close_group

TIMEOUT_S = 10.0
EXACT_SIZES = (1, 1000, 65537)  # elements per rank
MESSAGES = ((256, 10), (1 << 20, 2))  # (numbers in a message, how often it is sent): for the latency, and the bandwidth
SLOW_LINK = 0.5  # fraction of the median
MAX_AGAIN = 8  # links that are measured again


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
    """Return a sentence for each operation whose result is not exact. float32 represents all numbers exactly."""
    wrong = {}
    size = group.world_size
    for num in EXACT_SIZES:
        context.doing = f"collectives of {num} numbers per rank"
        pattern = torch.arange(num * size) % 97  # rank r adds r to it
        given = (pattern + group.rank).float().to(group.device)
        total = given.clone()
        dist.all_reduce(total)
        parts = [torch.empty_like(given[:num]) for _ in range(size)]
        dist.all_gather(parts, given[:num])
        shares = torch.empty_like(given)
        dist.all_to_all_single(shares, given)
        own = pattern[group.rank * num :][:num]
        expected = {
            "all-reduce": (total, pattern * size + size * (size - 1) // 2),
            "all-gather": (torch.cat(parts), torch.cat([pattern[:num] + rank for rank in range(size)])),
            "all-to-all": (shares, torch.cat([own + rank for rank in range(size)])),
        }
        for name, (found, wanted) in expected.items():
            if differing := int((found.cpu() != wanted).sum()):
                wrong[name] = f"{differing} of {len(wanted)} numbers of an {name} are wrong"
    return list(wrong.values())


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
    """Send the messages, each of which is answered. Returns the latency and the bandwidth of the fastest ones."""
    fastest_s = []
    answer = torch.zeros(1, device=group.device)
    for size, number in MESSAGES:
        data = torch.zeros(size, device=group.device)
        times_s = []
        for _ in range(number):
            _wait(group.device)
            began_s = time.perf_counter()
            dist.send(data, peer)
            dist.recv(answer, peer)
            _wait(group.device)
            times_s.append(time.perf_counter() - began_s)
        fastest_s.append(min(times_s))
    latency_s = fastest_s[0] / 2
    return {"latency_s": latency_s, "bytes_per_s": 4 * MESSAGES[-1][0] / max(fastest_s[-1] - latency_s, 1e-9)}


def _take(group: Group, peer: int) -> None:
    """Answer `_send`."""
    for size, number in MESSAGES:
        data = torch.empty(size, device=group.device)
        for _ in range(number):
            dist.recv(data, peer)
            dist.send(data[:1], peer)


# --- findings -----------------------------------------------------------------------------------------------------


def judge_collectives(participants: Participants, facts: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Report wrong results, and links much slower than the others."""
    if not facts:
        return [Finding("collectives", PASS, "one rank: nothing to exchange (more with --nproc-per-node 2)")]
    problems = []
    for sentence in dict.fromkeys(text for fact in facts.values() for text in fact["wrong"]):
        where = participants.name_ranks([rank for rank, fact in facts.items() if sentence in fact["wrong"]])
        advice = "do not train here: look for failing memory, GPUs or network cards there (dmesg, DCGM)"
        problems.append(Finding("collectives", FAIL, f"{sentence}: {where}", advice))
    one = next(iter(facts.values()))
    right = Finding("collectives", PASS, f"right, over {'NCCL' if one['device'] == 'cuda' else 'gloo'}")
    return [*(problems or [right]), *judge_links(participants, one["links"])]


def judge_links(participants: Participants, links: Sequence[dict[str, Any]]) -> list[Finding]:
    """Report the slowest link; warn about links much slower than the others."""
    if not links:
        return []
    usual = median_high([link["bytes_per_s"] for link in links])
    ordered = sorted(links, key=lambda link: float(link["bytes_per_s"]))
    measured = [{**link, **{end: participants.name_node(link[end]) for end in ("from", "to")}} for link in ordered]
    shown = [f"{link['from']} -> {link['to']}, {format_bytes(link['bytes_per_s'])}/s" for link in measured]
    if num_slow := len(find_slow(links)):
        found = (
            f"the slowest link is {'; then '.join(shown[: min(num_slow, 4)])}; the median is {format_bytes(usual)}/s"
        )
        advice = (
            "check the network card, cable and switch port that they share (ethtool: speed, errors), or leave it out"
        )
        return [Finding("links", WARN, found, advice, measured)]
    latency_s = max(link["latency_s"] for link in links)
    found = f"{format_bytes(usual)}/s from host to host (median), {format_time(latency_s)} at most for 1 KB; "
    return [Finding("links", PASS, f"{found}slowest: {shown[0]}", measured=measured)]
