"""A replica that goes astray stops the run before anything of it is saved; those that do not are never suspected."""

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from promises import gradients, training  # noqa: F401 - they fill CASES
from promises.loops import CASES
from support.runs import samestep_command
from support.selection import one_in
from torch import nn

import samestep
from samestep.snapshot.store import Store

HOST = re.escape(socket.gethostname())


def flip(tensor: torch.Tensor) -> None:
    """Flips the lowest bit of the last element."""
    tensor.detach().view(torch.int32).view(-1)[-1] ^= 1


def train(
    run_dir: Path | None, rank: int = -1, step: int = -1, what: str = "", num_epochs: int = 4, **arguments: Any
) -> None:
    """Trains; at `step` a bit flips on `rank` in the model's "weight", or in the optimizer's "exp_avg"."""
    run = samestep.Run(run_dir, batch_size=8, micro_batch_size=1, device="cpu", **arguments)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    average = torch.optim.swa_utils.AveragedModel(model)
    run.prepare(model=model, optimizer=optimizer, average=average)
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, generator=generator), i % 3) for i in range(40)]
    for epoch in run.epochs(data, num_epochs):
        for now in epoch:
            for x, y in now:
                now.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            average.update_parameters(model)
            if (run.rank, now.number) == (rank, step):
                last = model[2].weight
                flip({"weight": last, "average": average.module[0].weight}.get(what, optimizer.state[last].get(what)))


@pytest.mark.parametrize(
    ("num_ranks", "rank", "what", "words"),
    [
        (3, 2, "weight", rf"rank 2 \({HOST}\) has another model than the other 2, .* after step 9: model.2.weight "),
        (3, 0, "exp_avg", rf"rank 0 \({HOST}\) has another .* after step 9: .*model.2.weight"),
        (2, 1, "weight", rf"rank 0 \({HOST}\) and rank 1 \({HOST}\) do not .* step 9, .*: model.2.weight differs"),
        (3, 1, "average", rf"rank 1 \({HOST}\) has another .* after step 9: average.module.0.weight differs"),
    ],
)
def test_a_flipped_bit_is_found_and_named(num_ranks: int, rank: int, what: str, words: str) -> None:
    with pytest.raises(samestep.Error, match=words) as raised:
        samestep.spawn(train, num_ranks, (None, rank, 7, what), {"compare_every": 3})
    assert "all were equal after step 6" in str(raised.value)


def test_replicas_are_compared_by_the_clock() -> None:
    words = f"rank 1 .{HOST}. has another .* after step .*: model.2.weight "
    with pytest.raises(samestep.Error, match=words):
        samestep.spawn(train, 3, (None, 1, 3, "weight", 10**6), {"compare_every": "1s"})


def decide(per_rank: bool) -> list[float]:
    """A schedule that follows a loss: each rank's own, or the average. Returns the epochs' learning rates."""
    run = samestep.Run(None, batch_size=8, micro_batch_size=2, device="cpu", compare_every=1)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    run.prepare(model=model, optimizer=optimizer, scheduler=scheduler)
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, generator=generator), i % 3) for i in range(24)]
    rates = []
    for epoch in run.epochs(data, 20):
        total = 0.0
        for step in epoch:
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                step.backward(loss)
                total += loss.item()
            optimizer.step()
        scheduler.step(total if per_rank else epoch.metrics["loss"])
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_a_rank_s_own_loss_is_suspected_first() -> None:
    words = r"Suspect first a decision .* on a rank's own loss, .*: decide on step\.loss, step\.metrics or epoch\.me"
    with pytest.raises(samestep.Error, match=words):
        samestep.spawn(decide, 2, (True,))
    rates = samestep.spawn(decide, 2, (False,))
    assert rates == samestep.spawn(decide, 1, (False,))
    assert rates[-1] < rates[0]


def test_it_is_found_before_the_next_snapshot(tmp_path: Path) -> None:
    """Of the default, every 100 steps, none is due before the epoch's snapshot is."""
    run_dir = tmp_path / "run"
    with pytest.raises(
        samestep.Error, match=r"after step 10, .*: model.2.weight differs, and all were equal after step 5"
    ):
        samestep.spawn(train, 2, (run_dir, 1, 7, "weight"))
    assert [snapshot.step for snapshot in Store(run_dir).snapshots()] == [5]
    samestep.spawn(train, 3, (run_dir,))  # goes on from before
    assert [snapshot.step for snapshot in Store(run_dir).snapshots()][-1] == 20


def test_never(tmp_path: Path) -> None:
    samestep.spawn(train, 2, (tmp_path / "run", 1, 7, "weight"), {"compare_every": None})


def test_the_command_ends_with_2_and_says_it_once(tmp_path: Path) -> None:
    script = tmp_path / "astray.py"
    script.write_text(f"import sys; sys.path.append({str(Path(__file__).parents[1])!r})\n"
                      "from promises.test_replicas import train\ntrain('run', 1, 7, 'weight')\n")  # fmt: skip
    done = samestep_command("launch", "--nproc-per-node", "3", "--compare-every", "1", "astray.py", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("has another model than the other 2, which agree, after step 8") == 1, done.stderr
    assert "Traceback" not in done.stderr


def compare_always(fn: Callable[[], Any]) -> None:
    """Runs it and compares after every step, buffers included: what is alike now stays alike."""
    from samestep.train import replicas

    names = replicas.name_replicated

    def name_all(objects: Any) -> Any:
        yield from names(objects)
        for name, thing in objects.items():
            if isinstance(thing, nn.Module):
                yield from ((f"{name}.{path}", buffer) for path, buffer in thing.named_buffers())

    replicas.name_replicated = name_all
    fn()


@pytest.mark.parametrize("name", one_in(12, sorted(set(CASES) - {"two_threads", "compiled_by_aot_eager"})))
def test_no_sound_run_is_suspected(name: str) -> None:
    samestep.spawn(compare_always, 3, (CASES[name],), env={"SAMESTEP_COMPARE_EVERY": "1"})
