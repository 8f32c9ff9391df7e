"""A run that continues another one in a new directory, with other numbers (`--continue-from`)."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.runs import ask
from support.tiny import Stream, tiny_run

import samestep
from samestep.errors import Error
from samestep.snapshot.store import Store

EVERY = {"snapshot_every": 2, "keep_last": 9}
CONTINUE_FROM = "SAMESTEP_CONTINUE_FROM"


def train(run_dir: Path, num_epochs: int = 4, num_ranks: int = 1, **arguments: Any) -> str:
    """Train a tiny model on steps of 8 samples in epochs of 4 steps, and return the digest of the last snapshot."""
    samestep.spawn(tiny_run, num_ranks, (run_dir,), {"num_epochs": num_epochs, **EVERY, **arguments})
    return ask("inspect", run_dir, "--digest")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two of four epochs, that the next runs continue."""
    run_dir = tmp_path / "source"
    train(run_dir, 2)
    monkeypatch.setenv(CONTINUE_FROM, str(run_dir))
    return run_dir


def test_with_the_same_numbers_the_bits_are_those_of_one_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    continued = train(tmp_path / "new")
    monkeypatch.delenv(CONTINUE_FROM)
    assert train(tmp_path / "whole") == continued
    assert ask("diff", tmp_path / "whole", tmp_path / "new").startswith("identical in all 16 common steps")


@pytest.mark.parametrize(
    ("sizes", "num_steps"), [({"micro_batch_size": 4}, 16), ({"batch_size": 16}, 12)], ids=lambda each: str(each)
)
def test_with_other_sizes_any_number_of_ranks_gives_the_same_bits(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], num_steps: int
) -> None:
    """Also if it is stopped and resumed; each epoch uses each sample once."""
    once = train(tmp_path / "once", **sizes)
    train(tmp_path / "twice", num_ranks=2, max_steps=10, **sizes)
    monkeypatch.delenv(CONTINUE_FROM)
    assert train(tmp_path / "twice", **sizes) == once
    assert once != train(source)
    shown = ask("inspect", tmp_path / "twice")
    (name,) = sizes
    assert re.search(rf"^  8 +{name} .* -> {sizes[name]}$", shown, re.M)
    assert re.search(rf"^  run +{source}$", shown, re.M)
    samples = ask("inspect", tmp_path / "twice", "--samples")
    assert "audit passed" in samples
    assert samples.count(" epoch 3 ") == (num_steps - 8) // 2


def test_a_loop_over_steps_continues_with_the_next_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a further loop of a script would. The number of steps counts those of the first run."""
    train(tmp_path / "steps", num_steps=6)
    monkeypatch.setenv(CONTINUE_FROM, str(tmp_path / "steps"))
    train(tmp_path / "new", num_steps=10, batch_size=16)
    samples = ask("inspect", tmp_path / "new", "--samples")
    assert re.findall(r"^(\d+) epoch (\d)", samples, re.M) == [("6", "2"), ("7", "2"), ("8", "3"), ("9", "3")]


def test_a_start_that_was_interrupted_copies_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(Error, match="No space left"):
        patch.setattr(Store, "prepare", fail)
        tiny_run(tmp_path / "new", num_epochs=4, **EVERY)
    monkeypatch.delenv(CONTINUE_FROM)
    assert train(tmp_path / "new") == train(source)


def test_a_stream_keeps_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its position is that of its lanes, which were read with the seed."""
    stream = {"data": Stream(), "num_steps": 3}
    assert samestep.spawn(tiny_run, 1, (tmp_path / "stream",), stream) == 3
    monkeypatch.setenv(CONTINUE_FROM, str(tmp_path / "stream"))
    for numbers in ({"seed": 1}, {"micro_batch_size": 4}, {"batch_size": 16}):
        with pytest.raises(Error, match="keep its batch_size, micro_batch_size and seed"):
            samestep.spawn(tiny_run, 1, (tmp_path / "new",), stream | numbers)
    assert samestep.spawn(tiny_run, 1, (tmp_path / "new",), stream | {"num_steps": 5}) == 5


def test_what_cannot_be_continued(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written then."""
    for sizes, wrong, which in (
        ({"batch_size": 16}, r"step 6 of .* is inside an epoch.*: use --continue-from .*source@8$", "@6"),
        ({}, "there is no snapshot named best", "@best"),
        ({"precision": "fp16"}, "has no loss scale", ""),
    ):
        monkeypatch.setenv(CONTINUE_FROM, f"{source}{which}")
        with pytest.raises(Error, match=wrong):
            train(tmp_path / "new", **sizes)
        assert not (tmp_path / "new" / "run.json").exists()
    monkeypatch.setenv(CONTINUE_FROM, str(tmp_path / "other"))
    with pytest.raises(Error, match="holds a run that does not continue"):
        train(source)
