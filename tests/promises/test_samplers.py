"""A sampler may depend on the state of the training. The run has the same bits at any number of ranks and loader
workers, and through any kill.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import ask, digest
from support.tiny import NUM_SAMPLES, Tiny, update

import samestep

Outcome = tuple[str, bytes, bytes, str]


def learn_by_curriculum(
    run_dir: Path, strikes: dict[str, str] | None = None, *, num_workers: int = 0, num_steps: int | None = None,
    **arguments: Any,
) -> list[int]:  # fmt: skip
    """The samples of an epoch follow from the last loss, and from the steps done.

    Args:
        strikes: place -> how this start ends there: "kill" or "terminate". A place is a step, or an epoch's end.

    Returns:
        The levels at the ends of the epochs of this start.
    """

    def reach(place: str) -> None:
        if (how := (strikes or {}).get(place)) is not None:
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)

    def sample(epoch: int) -> list[int]:
        level, seen = tiny.run.state.get("level", 0), tiny.run.state.get("seen", 0)
        assert seen == tiny.run.steps_done, "the sampler is called when the epoch begins"
        order: list[int] = torch.randperm(NUM_SAMPLES).roll(level).tolist()
        return order[seen % 11 :][:21]

    def then(t: Tiny) -> None:
        update(t)
        t.run.state["seen"] = t.step.number + 1
        if num_steps is not None:
            t.run.state["level"] = int(1000 * t.step.metrics["loss"]) % 11
        reach(f"step {t.step.number}")

    def before_epoch(t: Tiny) -> None:
        if t.run.state.get("epoch") != t.epoch.number:
            t.run.state |= {"epoch": t.epoch.number, "began": t.run.steps_done}

    def after_epoch(t: Tiny) -> None:
        assert t.step.number + 1 - t.run.state["began"] == t.epoch.num_steps == 3
        t.run.state["level"] = int(1000 * t.epoch.metrics["loss"]) % 11
        t.run.log({"level": t.run.state["level"]})
        reach(f"the end of epoch {t.epoch.number}")
        levels.append(t.run.state["level"])

    tiny = Tiny(run_dir, snapshot_every=2, log_every=1, **arguments)
    levels: list[int] = []
    feed: Any = {"num_workers": num_workers, "sampler": sample, "then": then}
    if num_steps is None:
        tiny.train(5, before_epoch=before_epoch, after_epoch=after_epoch, **feed)
    else:
        tiny.train(num_steps=num_steps, **feed)
    # Another loop, of another length, which counts the epochs of the first one.
    tiny.train(1, sampler=lambda epoch: [epoch] * 20)
    return levels


def read(run_dir: Path) -> Outcome:
    said = ask("inspect", run_dir, "--samples")
    assert "audit passed" in said
    return str(digest(run_dir)), *((run_dir / name).read_bytes() for name in ("metrics.jsonl", "ledger.bin")), said


LOOPS: dict[str, dict[str, Any]] = {"epochs": {}, "steps": {"num_steps": 14}}
Undisturbed = dict[str, Outcome]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    outcomes = {}
    for name, arguments in LOOPS.items():
        run_dir = tmp_path_factory.mktemp("samplers") / name
        levels = samestep.spawn(learn_by_curriculum, 1, (run_dir,), arguments)
        outcomes[name] = read(run_dir)
        assert name != "epochs" or len({*levels}) > 2, "the samples depend on the losses"
    return outcomes


# Four to six starts, some of them with loader workers: 12 s, and 16 s on a busy machine.
@pytest.mark.parametrize("loop", LOOPS)
def test_killed_and_resumed(tmp_path: Path, undisturbed: Undisturbed, loop: str) -> None:
    """Within an epoch, at its end, before the snapshot of its end, and with other numbers of ranks and workers."""
    run_dir = tmp_path / "run"
    strikes = [("step 1", "terminate"), ("step 3", "kill"), ("step 6", "terminate"), ("step 9", "kill")]
    if loop == "epochs":
        strikes.insert(2, ("the end of epoch 1", "kill"))
        strikes.append(("the end of epoch 3", "terminate"))
    for number, (place, how) in enumerate(strikes):
        arguments = (run_dir, {place: how})
        more = LOOPS[loop] | {"num_workers": number % 3}
        if how == "kill":
            with pytest.raises(RuntimeError, match="SIGKILL"):
                samestep.spawn(learn_by_curriculum, 1 + number % 3, arguments, more)
        else:
            assert samestep.spawn(learn_by_curriculum, 1 + number % 3, arguments, more) is None
    for _ in range(2):  # the second one has nothing left to do
        samestep.spawn(learn_by_curriculum, 2, (run_dir,), LOOPS[loop] | {"num_workers": 1})
        assert read(run_dir) == undisturbed[loop]


@pytest.mark.parametrize("lazily", [False, True])
def test_an_error_in_a_sampler_names_the_epoch(lazily: bool) -> None:
    def sample(epoch: int) -> Any:
        return map(pick, range(8)) if lazily else [*map(pick, range(8))]

    def pick(index: int) -> int:
        return [*range(8)][index + tiny.run.steps_done]

    tiny = Tiny()
    with pytest.raises(IndexError, match="list index out of range") as caught:
        tiny.train(sampler=sample)
    assert caught.value.__notes__ == ["raised in sampler(1)"]
