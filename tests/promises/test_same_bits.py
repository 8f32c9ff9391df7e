"""Any number of ranks gives the same bits: digests, losses, scores and random draws do not depend on it."""

import functools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from promises import gradients, training  # noqa: F401 - they fill CASES
from promises.loops import CASES
from support.runs import check, digest, samestep_command
from support.selection import one_in
from support.trace import assert_same

import samestep

WORLD_SIZES = (2, 3, 4, 5, 12)
# These need a core for each thread, or a compiler for each rank: fewer ranks.
HEAVY = {"two_threads": (2, 3), "compiled_by_aot_eager": (2, 3)}
ENDINGS = ("metrics.jsonl", "ledger.bin")


@functools.cache
def run_alone(train: Callable[[], Any]) -> Any:
    return samestep.spawn(train, 1)


@pytest.mark.parametrize(("name", "world_size"), [
    *one_in(11, [(name, world_size) for name in CASES for world_size in HEAVY.get(name, WORLD_SIZES[:4])]),
    *(pytest.param(name, 12, marks=pytest.mark.soak) for name in CASES if name not in HEAVY),
])  # fmt: skip
def test_any_model(name: str, world_size: int) -> None:
    train = CASES[name]
    assert_same(samestep.spawn(train, world_size), run_alone(train), f"{world_size} ranks", "1 rank")


@pytest.mark.parametrize("world_size", one_in(4, [3, 1, 2, 5]))
def test_workers_draw_as_the_rank_itself(world_size: int) -> None:
    env = {"SAMESTEP_STUCK_AFTER_S": "120"}  # a stuck rank is named before the test times out
    trace = samestep.spawn(training.augmentation_in_workers, world_size, env=env)
    assert_same(trace, run_alone(training.augmentation), f"{world_size} ranks with workers", "1 rank without")


@pytest.mark.soak  # compiles C++ for a minute; `test_any_model` compiles without kernels
@pytest.mark.timeout(400)
@pytest.mark.parametrize("train", [training.compiled_by_inductor, training.compiled_for_many_lengths])
def test_compiled_to_kernels(train: Callable[[], Any]) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("no C++ compiler")
    alone = run_alone(train)  # first: the ranks then find the kernels in inductor's cache
    assert_same(samestep.spawn(train, 3), alone, "3 ranks", "1 rank")


@pytest.mark.soak  # compiles C++ for a minute
@pytest.mark.timeout(900)
def test_ranks_share_what_is_compiled(tmp_path: Path) -> None:
    """With an empty cache, the C++ compiler makes each library once, and the second rank finds it."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "g++").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/log\nexec {compiler} "$@"\n')
    (tmp_path / "g++").chmod(0o755)
    train = training.compiled_by_inductor
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    assert_same(samestep.spawn(train, 2, env=env), samestep.spawn(train, 1, env=env), "2 ranks", "1 rank")
    made = re.findall(r" -shared .* -o (\S+)", (tmp_path / "log").read_text())
    assert len(made) > 2
    assert len({*made}) == len(made)


class Recipe:
    """A recipe that the command trains, each time in another directory."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name

    @functools.cache  # noqa: B019
    def train(self, world_size: int, *flags: str) -> tuple[str, dict[str, bytes]]:
        """The digest that `inspect` prints, and the files that must be the same."""
        directory = self.root / f"{self.name}-{world_size}{''.join(flags)}"
        done = samestep_command(
            "train", self.name, "--nproc-per-node", str(world_size), "--batch-size", "96", "--micro-batch-size", "8",
            "--max-steps", "20", "--run-dir", directory, *flags, cwd=self.root,
        )  # fmt: skip
        check(done)
        return digest(directory), {name: (directory / name).read_bytes() for name in ENDINGS}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return Recipe(tmp_path_factory.mktemp("digits"), "digits")


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return Recipe(tmp_path_factory.mktemp("mlp"), "mlp")


# A recipe on one rank and on several, each with its validations: 6 s, and 20 s on a busy machine.
@pytest.mark.parametrize(
    ("world_size", "num_workers"), one_in(14, [(2, 2), (3, 2), (2, 0), (3, 0), (4, 0), (5, 2), (12, 0), (1, 2)])
)
def test_digits(digits: Recipe, world_size: int, num_workers: int) -> None:
    wanted, files = digits.train(1)
    found, found_files = digits.train(world_size, *(["--num-workers", "2"] if num_workers else []))
    assert found == wanted
    assert found_files == files
    assert files["metrics.jsonl"].count(b'"validation/accuracy"') == 2


@pytest.mark.parametrize("world_size", one_in(len(WORLD_SIZES), reversed(WORLD_SIZES)))
def test_mlp(mlp: Recipe, world_size: int) -> None:
    assert mlp.train(world_size) == mlp.train(1)


def test_other_numbers_give_other_bits(mlp: Recipe) -> None:
    """Another seed gives another digest."""
    digests = {mlp.train(1, *flags)[0] for flags in [(), ("--seed", "1"), ("--resume", "latest", "--num-threads", "1")]}
    assert len(digests) == 2
