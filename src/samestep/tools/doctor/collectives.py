"""Checks the results of collectives, and measures each link between two nodes."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist

from samestep.tools.doctor.examination import Context
from samestep.tools.doctor.findings import FAIL, PASS, WARN, Finding, Participants
from samestep.torch_internals import set_timeout
from samestep.units import format_bytes
from samestep.world.group import Group
from samestep.world.group_opening import choose_device, open_group
from samestep.world.process_group import close_group

TIMEOUT_S = 10.0
EXACT_SIZES = (1, 1000, 65537)  # elements per rank
NUM_SENT = 1 << 20  # numbers in a message
SLOW_LINK = 0.5  # fraction of the median


# --- on every rank ----------------------------------------------------------------------------------------------


def look_at_collectives(context: Context) -> dict[str, Any] | None:
    """Open the group, check and measure. Collective. Returns None with one rank."""
    if context.environment.world_size == 1:
        return None
    context.doing = "joining the ranks"
    device = choose_device(context.environment, context.device)
    group = open_group(context.environment, device, compares=False)
    set_timeout(timedelta(seconds=TIMEOUT_S))
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
        gathered = [torch.empty_like(given[:num]) for _ in range(size)]
        dist.all_gather(gathered, given[:num])
        shares = torch.empty_like(given)
        dist.all_to_all_single(shares, given)
        own = pattern[group.rank * num :][:num]
        expected = {
            "all-reduce": (total, pattern * size + size * (size - 1) // 2),
            "all-gather": (torch.cat(gathered), torch.cat([pattern[:num] + rank for rank in range(size)])),
            "all-to-all": (shares, torch.cat([own + rank for rank in range(size)])),
        }
        for name, (found, wanted) in expected.items():
            if differing := int((found.cpu() != wanted).sum()):
                wrong[name] = f"{differing} of {len(wanted)} numbers of an {name} are wrong"
    return list(wrong.values())


# --- links --------------------------------------------------------------------------------------------------------


def measure_links(context: Context, group: Group) -> list[dict[str, Any]]:
    """Measure the links between neighbouring nodes in both directions, one after the other. Collective.

    Returns:
        {"from", "to", "bytes_per_s"} for each link, with the numbers of the nodes.
    """
    num_nodes = len(context.participants.leaders)
    if num_nodes == 1:
        return []
    ring = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    own = []
    for sender, receiver in dict.fromkeys([*ring, *((b, a) for a, b in ring)]):
        group.barrier()
        own += _measure_link(context, group, sender, receiver)
    return [link for theirs in group.gather(own) for link in theirs]


def _measure_link(context: Context, group: Group, sender: int, receiver: int) -> list[dict[str, Any]]:
    """Return the measurement on the first rank of the sender; [] on other ranks."""
    participants = context.participants
    start = participants.leaders[sender]
    end = participants.leaders[receiver]
    if group.rank not in (start, end):
        return []
    context.doing = f"sending from {participants.name_node(sender)} to {participants.name_node(receiver)}"
    data = torch.zeros(NUM_SENT, device=group.device)
    answer = torch.zeros(1, device=group.device)
    times_s = []
    for _ in range(2):  # the first one opens the connection
        began_s = time.perf_counter()
        if group.rank == start:
            dist.send(data, end)
            dist.recv(answer, end)
        else:
            dist.recv(data, start)
            dist.send(answer, start)
        float(answer)  # waits for a GPU
        times_s.append(time.perf_counter() - began_s)
    if group.rank == end:
        return []
    return [{"from": sender, "to": receiver, "bytes_per_s": 4 * NUM_SENT / min(times_s)}]


# --- on rank 0 ----------------------------------------------------------------------------------------------------


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
    """Report the slowest link; warn about links much slower than the median (of two: than the faster one)."""
    if not links:
        return []
    usual = median_high([link["bytes_per_s"] for link in links])
    ordered = sorted(links, key=lambda link: float(link["bytes_per_s"]))
    measured = [{**link, **{end: participants.name_node(link[end]) for end in ("from", "to")}} for link in ordered]
    shown = [f"{link['from']} -> {link['to']}, {format_bytes(link['bytes_per_s'])}/s" for link in measured]
    if num_slow := sum(link["bytes_per_s"] < SLOW_LINK * usual for link in links):
        found = (
            f"the slowest link is {'; then '.join(shown[: min(num_slow, 4)])}; the median is {format_bytes(usual)}/s"
        )
        advice = (
            "check the network card, cable and switch port that they share (ethtool: speed, errors), or leave it out"
        )
        return [Finding("links", WARN, found, advice, measured)]
    found = f"{format_bytes(usual)}/s from host to host (median); slowest: {shown[0]}"
    return [Finding("links", PASS, found, measured=measured)]
