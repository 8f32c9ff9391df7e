"""A replica that differs from the others stops the run before anything is saved. Equal replicas raise no error."""

import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Pairs, tiny_run, update
from torch import nn

import samestep
from samestep.snapshot.store import Store

HOST = re.escape(socket.gethostname())


def flip(tensor: torch.Tensor) -> None:
    """Flips the lowest bit of the last element."""
    tensor.detach().view(torch.int32).view(-1)[-1] ^= 1


def train(run_dir: Path | None, rank: int = -1, step: int = -1, what: str = "", **arguments: Any) -> None:
    """Trains; at `step` a bit flips on `rank` in the model's "weight" or in the "average"."""

    def then(t: Any) -> None:
        update(t)
        t.average.update_parameters(t.model)
        if (t.run.rank, t.step.number) == (rank, step):
            flip({"weight": t.model[2].weight, "average": t.average.module[0].weight}[what])

    tiny_run(
        run_dir, num_epochs=4, micro_batch_size=1, data=Pairs(40), then=then,
        optimizer=lambda params: torch.optim.AdamW(params, 1e-2),
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)),
        objects=lambda t: {"average": torch.optim.swa_utils.AveragedModel(t.model)}, **arguments,
    )  # fmt: skip


@pytest.mark.parametrize(("num_ranks", "rank", "what", "words"), [
    (3, 2, "weight", rf"rank 2 \({HOST}\) has a different model than the other 2, .* after step 9: model.2.weight "),
    (2, 1, "weight", rf"rank 0 \({HOST}\) and rank 1 \({HOST}\) do not .* step 9, .*: model.2.weight differs"
     r".* Suspect first a decision .* on the loss of one rank.*: base it on step\.loss, step\.metrics or epoch\.me"),
    (3, 1, "average", rf"rank 1 \({HOST}\) has a different model .* after step 9: average.module.0.weight differs"),
])  # fmt: skip
def test_a_flipped_bit_is_found_and_named(num_ranks: int, rank: int, what: str, words: str) -> None:
    with pytest.raises(samestep.Error, match=words) as raised:
        samestep.spawn(train, num_ranks, (None, rank, 7, what), {"compare_every": 3})
    assert "all were equal after step 6" in str(raised.value)


def test_it_is_found_before_the_next_snapshot(tmp_path: Path) -> None:
    """The default is every 100 steps, and the snapshot of the epoch is due before."""
    run_dir = tmp_path / "run"
    with pytest.raises(
        samestep.Error, match=r"after step 10, .*: model.2.weight differs, and all were equal after step 5"
    ):
        samestep.spawn(train, 2, (run_dir, 1, 7, "weight"))
    assert [snapshot.step for snapshot in Store(run_dir).snapshots()] == [5]
    samestep.spawn(train, 3, (run_dir,))
    assert [snapshot.step for snapshot in Store(run_dir).snapshots()][-1] == 20
