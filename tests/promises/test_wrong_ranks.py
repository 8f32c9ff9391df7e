"""A rank that computes wrong results is found in the first checked step, and named, and a replica that differs from the
others before anything is saved. Correct ranks raise no error.
"""

import random
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from support.snapshots import list_steps
from support.tiny import Pairs, Stream, Tiny, learn, tiny_run, update
from torch import Tensor, nn

import samestep

HOST = re.escape(socket.gethostname())


class Flip(nn.Module):
    """Returns its input, of which a bit is flipped: in the "forward", or in the "backward" of its gradient."""

    what, element = "", 0

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "forward":
            x = x + (self.flip(x.detach()) - x.detach())
        if self.what == "backward":
            x.register_hook(self.flip)
        return x

    def flip(self, tensor: Tensor) -> Tensor:
        flipped = tensor.clone()
        flipped.view(torch.int32).view(-1)[self.element % tensor.numel()] ^= 1 << 12
        return flipped


def train(run_dir: Path, rank: int, what: str) -> None:
    """Trains. From step 7 on, `rank` computes wrong results."""

    def before(t: Tiny) -> None:
        flip = t.model[1]
        flip.what = what if t.run.rank == rank and t.step.number >= 7 else ""
        flip.element = t.step.number

    tiny_run(
        run_dir, batch_size=12, num_steps=12, before=before, optimizer=torch.optim.AdamW, check_compute_every=3,
        snapshot_every=6,
        model=lambda: nn.Sequential(
            nn.Linear(4, 8), Flip(), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1)
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_ranks", "rank", "what", "words"),
    [
        (3, 1, "forward", rf"^rank 1 \({HOST}, cpu\) computed different results for micro-batch \d of step 8 than rank "
         r"\d .* and rank \d .*, from the same weights and samples: .* more differ; suspect the processor .*; "
         r"nothing of this step is saved, but all ranks last agreed in step 5, so later"),
        (2, 1, "backward", rf"^rank \d \({HOST}, cpu\) and rank \d .*step 8, and no majority says which is right"),
    ],
)  # fmt: skip
def test_a_wrong_rank_is_named_before_the_step_is_applied(
    num_ranks: int, rank: int, what: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(samestep.Error, match=words):
        samestep.spawn(train, num_ranks, (tmp_path, rank, what))
    assert list_steps(tmp_path) == [6]


def train_with_totals(**arguments: Any) -> list[Any]:
    found: list[Any] = []
    tiny_run(
        batch_size=6, micro_batch_size=1, num_steps=3,
        before=lambda t: found.append(t.step.total(lambda batch: batch[0].sum())),
        body=lambda t, x, y: [learn(t, x, y), t.step.log(micro_batch=t.step.micro_batch)],
        then=lambda t: [t.optimizer.step(), found.append(t.step.metrics)], **arguments,
    )  # fmt: skip
    return found


def test_the_check_changes_no_numbers() -> None:
    """A total before the loop loads what this rank borrows first, as the loop does. What the script logs in a
    micro-batch that a rank has borrowed does not count. (For all bits of all models, see test_same_bits.py.)
    """
    assert samestep.spawn(train_with_totals, 2, (), {"check_compute_every": 1}) == train_with_totals()


class Drawing(Pairs):
    """Each read gives another sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + random.SystemRandom().random(), y


@pytest.mark.parametrize(("data", "words"), [
    (Drawing(), r"read different samples for micro-batch \d of step 1, although the"),
    (Stream(), "only one rank reads a lane of an IterableDataset: leave it out"),
])  # fmt: skip
def test_what_cannot_be_compared_is_an_error(data: Any, words: str) -> None:
    with pytest.raises(samestep.Error, match=words):
        samestep.spawn(tiny_run, 2, (), {"data": data, "num_steps": 4, "check_compute_every": 2})


# --- replicas ---------------------------------------------------------------------------------------------------------


def flip(tensor: torch.Tensor) -> None:
    """Flips the lowest bit of the last element."""
    tensor.detach().view(torch.int32).view(-1)[-1] ^= 1


def train_replicas(run_dir: Path | None, rank: int = -1, step: int = -1, what: str = "", **arguments: Any) -> None:
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
        samestep.spawn(train_replicas, num_ranks, (None, rank, 7, what), {"compare_every": 3})
    assert "all were equal after step 6" in str(raised.value)


def test_it_is_found_before_the_next_snapshot(tmp_path: Path) -> None:
    """The default is every 100 steps, and the snapshot of the epoch is due before."""
    run_dir = tmp_path / "run"
    with pytest.raises(
        samestep.Error, match=r"after step 10, .*: model.2.weight differs, and all were equal after step 5"
    ):
        samestep.spawn(train_replicas, 2, (run_dir, 1, 7, "weight"))
    assert list_steps(run_dir) == [5]
    samestep.spawn(train_replicas, 3, (run_dir,))
    assert list_steps(run_dir)[-1] == 20
