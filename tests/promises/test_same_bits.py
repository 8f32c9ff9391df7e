"""Any number of ranks gives the same bits: digests, losses, scores and random draws do not depend on it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from promises.cases import CASES, train_compiled
from support.selection import cover
from support.trace import assert_same

import samestep
from samestep.engine import routes

# These need a core for each thread, or a compiler for each rank: fewer ranks.
HEAVY = ("two_threads", "compiled_by_aot_eager")
# Models that FSDP2 cannot have, and what the error says.
NOT_SHARDED = {
    "gradients_that_a_function_withholds": "has no forward",
    "gradients_kept_for_the_next_step": "DTensor|unevenly sharded",  # computes with a whole one and a shard
    "gan": "a backward pass ran outside of step.backward",  # has a gradient penalty
    "scores_that_change_the_model": "a backward pass ran outside of step.backward",
    "dtypes": "forward and one dtype",
}
if torch.torch_version.TorchVersion(torch.__version__) < "2.12":
    NOT_SHARDED["parameters_of_integers"] = "cannot be sharded"
PRECISE = ("fp16_with_overflows", "dtypes")  # have a precision of their own
# The last two change the bits, also of the run on one rank that a row is compared with; the others do not.
FACTORS: dict[str, tuple[Any, ...]] = {
    "shard": ("none", "optimizer", "fsdp2"),
    "world_size": (2, 3, 4, 5),
    "check": ("", "COMPARE_EVERY", "CHECK_COMPUTE_EVERY"),
    "route": ("gather", "hosts", "long"),
    "precision": ("", "bf16"),
    "exchange_dtype": ("none", "bf16"),
}


def is_allowed(name: str, shard: str, world_size: int, check: str, route: str, *numbers: str) -> bool:
    if shard == "fsdp2" and (name in NOT_SHARDED or check == "CHECK_COMPUTE_EVERY" or world_size > 3):
        return False
    if name in HEAVY and (world_size > 2 or shard == "fsdp2" or check):
        return False
    return not (name in PRECISE and numbers[0])


@functools.cache
def run_alone(train: Callable[[], Any], **variables: str) -> Any:
    return samestep.spawn(train, 1, env=variables)


def train_with(train: Callable[[], Any], route: str) -> Any:
    """`route`: with "hosts", no bucket goes through the sockets of one host; with "long", none is small enough for an
    all-gather.
    """
    if route != "gather":
        routes.NEIGHBORS_MAX_BYTES = 0
    if route == "long":
        routes.GATHER_MAX_BYTES = 0
    return train()


# Tied weights, also with FSDP2.
TIED = ("transformer", "fsdp2", 3, "", "gather", "", "none")


@pytest.mark.parametrize(("name", *FACTORS), [*cover(CASES, FACTORS, is_allowed), TIED])
def test_any_model(
    name: str, shard: str, world_size: int, check: str, route: str, precision: str, exchange_dtype: str
) -> None:
    numbers = {"SAMESTEP_EXCHANGE_DTYPE": exchange_dtype} | ({"SAMESTEP_PRECISION": precision} if precision else {})
    variables = {**numbers, "SAMESTEP_SHARD": shard} | ({f"SAMESTEP_{check}": "1"} if check else {})
    found = samestep.spawn(train_with, world_size, (CASES[name], route), env=variables)
    assert_same(found, run_alone(CASES[name], **numbers), f"{world_size} ranks", "1 rank")


@pytest.mark.parametrize("name", {words: name for name, words in NOT_SHARDED.items()}.values())
def test_models_that_fsdp2_cannot_have(name: str) -> None:
    with pytest.raises((samestep.Error, RuntimeError), match=NOT_SHARDED[name]):
        samestep.spawn(CASES[name], 2, env={"SAMESTEP_SHARD": "fsdp2"})


@pytest.mark.soak  # compiles C++ for a minute; `test_any_model` compiles without kernels
@pytest.mark.timeout(400)
def test_compiled_to_kernels() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("no C++ compiler")
    train = functools.partial(train_compiled, "inductor")
    alone = run_alone(train)  # first: the ranks then find the kernels in inductor's cache
    assert_same(samestep.spawn(train, 3), alone, "3 ranks", "1 rank")


def test_a_notebook_trains_here_and_on_ranks() -> None:
    train = CASES["batch_norm"]
    assert_same(train(), samestep.spawn(train, 3), "this process", "3 ranks")
