"""Mistakes are caught where they are made, in one sentence, and nothing is written that would have to be undone."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from promises.wrong import (
    BATCH_SIZE,
    MICRO_BATCH_SIZE,
    MISTAKES,
    NUM_SAMPLES,
    RANKS,
    Mistake,
    Pairs,
    build,
    learn,
    loop,
    train,
)
from support.selection import one_in
from torch import nn
from torch.utils.data import DataLoader

import samestep
from samestep.plan.ledger import RECORD
from samestep.snapshot.store import Store

# What a run that has begun and failed in its first epoch leaves: nothing that a later start would not begin anew.
BEGUN = {"run.json", "status.json", "lock", "metrics.jsonl", "ledger.bin"}


def check_left(found: Mistake, run_dir: Path, name: str) -> None:
    """What is on disk after a mistake."""
    if found.at == "start":
        assert not run_dir.parent.exists(), sorted(run_dir.parent.rglob("*"))
        return
    assert {path.name for path in run_dir.iterdir() if path.is_file()} - {"timeline.jsonl"} == BEGUN
    snapshots = Store(run_dir).snapshots()
    assert all(snapshot.problem is None for snapshot in snapshots)
    assert all(snapshot.step <= 4 for snapshot in snapshots), "one after the mistake"
    for snapshot in snapshots:
        state = Store(run_dir).read(snapshot)
        tensors = [t for part in state["objects"].values() for t in flatten(part) if isinstance(t, torch.Tensor)]
        assert all(torch.isfinite(tensor).all() for tensor in tensors), f"poisoned: {snapshot.path}"


def flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from flatten(part)
    else:
        yield value


def assert_sentence(message: str, said: str) -> None:
    assert re.search(said, message), message
    assert "\n" not in message
    assert len(message) < 400, message


@pytest.mark.parametrize("name", MISTAKES)
def test_alone(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "x"
    with pytest.raises(samestep.Error) as caught:
        samestep.spawn(train, 1, (name, run_dir))
    assert_sentence(str(caught.value), MISTAKES[name].said)
    check_left(MISTAKES[name], run_dir, name)


@pytest.mark.parametrize("name", one_in(4, [name for name, found in MISTAKES.items() if found.at == "loop"]))
def test_on_two_ranks(name: str, tmp_path: Path) -> None:
    """The same sentence, and at once: no rank waits for another that has failed."""
    run_dir = tmp_path / "runs" / "x"
    with pytest.raises(samestep.Error) as caught:
        samestep.spawn(train, 2, (name, run_dir))
    assert_sentence(str(caught.value), MISTAKES[name].said)
    check_left(MISTAKES[name], run_dir, name)
    if found := re.search(r"on rank (\d)|\(rank (\d)\)", str(caught.value)):
        rank = int(found[1] or found[2])
        assert f"rank {rank} raised this" in caught.value.__notes__[0] or caught.value.rank is None


@pytest.mark.parametrize("name", RANKS)
def test_ranks_that_differ(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "x"
    with pytest.raises(samestep.Error) as caught:
        samestep.spawn(train, 2, (name, run_dir))
    assert_sentence(str(caught.value), RANKS[name].said)
    check_left(RANKS[name], run_dir, name)


# --- the rank that is named -------------------------------------------------------------------------------------------


def test_the_rank_of_a_loss() -> None:
    """Every rank is told; the one that computed it is named."""
    for v, rank in ((0, 0), (1, 0), (2, 1), (3, 1)):

        def train(v: int = v) -> None:
            def body(step: Any, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
                factor = float("nan") if (step.number, step.micro_batch) == (1, v) else 1.0
                step.backward((model(x) - y).mean() * factor)

            loop(*build(None), body)

        with pytest.raises(samestep.Error, match=rf"step 1 is nan in micro-batch {v} \(rank {rank}\)"):
            samestep.spawn(train, 2)


@pytest.mark.parametrize(("sample", "rank"), [(0, 0), (2, 0), (4, 1), (7, 1)])
def test_the_rank_of_a_sample(sample: int, rank: int) -> None:
    """Unshuffled, step 0 has samples 0 to 7, the first half of them on rank 0."""

    def train(num_workers: int) -> None:
        loop(*build(None), data=Pairs(fail=sample), shuffle=False, num_workers=num_workers)

    for num_workers in (0, 1):
        with pytest.raises(samestep.Error, match=rf"sample {sample} .*on rank {rank} in step 0") as caught:
            samestep.spawn(train, 2, (num_workers,))
        assert caught.value.rank == rank


def test_the_rank_of_a_lone_sample() -> None:
    """Of 7 samples in micro-batches of 2, the last one has one; whichever rank holds it."""

    def train() -> None:
        run, model, optimizer = build(None, lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
        loop(run, model, optimizer, lambda step, model, x, y: step.backward(model(x).mean()), data=Pairs(7))

    for num_ranks, rank in ((1, 0), (2, 1), (4, 3)):
        with pytest.raises(samestep.Error, match=rf"micro-batch 3 of step 0 \(rank {rank}\) has one sample") as caught:
            samestep.spawn(train, num_ranks)
        assert caught.value.rank == rank


# --- scores -----------------------------------------------------------------------------------------------------------

SCORES: dict[str, tuple[Any, str]] = {
    "nothing": (lambda b: None, r"the score function returned a NoneType: return a dict"),
    "a tensor": (lambda b: b[0], r"the score function returned a Tensor: return a dict"),
    "values": (lambda b: {"a": b[0]}, r"score 'a' is neither a number, .* but Tensor: average it, or turn it into a l"),
    "a string": (lambda b: {"a": "b"}, r"score 'a' is neither a number, .* but str"),
    "None": (lambda b: {"a": None}, r"score 'a' is neither a number, .* but NoneType"),
    "three": (lambda b: {"a": (1, 2, 3)}, r"score 'a' is neither a number, .* but tuple"),
    "a short list": (lambda b: {"a": [1] * 3}, r"score 'a' has 3 entries for [12] samples: give one per sample"),
    "a weight of -1": (lambda b: {"a": (1.0, -1)}, r"score 'a' has weight -1\.0: a weight is a finite number of at le"),
    "a weight of nan": (lambda b: {"a": (1.0, float("nan"))}, r"score 'a' has weight nan"),
    "weights of 0": (lambda b: {"a": (1.0, 0)}, r"the total weight of score 'a' is 0: no sample of the data set count"),
    "sometimes a list": (lambda b: {"a": [1, 2] if len(b[0]) == 2 else 1.0}, r"score 'a' is not the same kind of valu"),
    "sometimes nothing": (lambda b: {"a": 1.0} if len(b[0]) == 2 else {}, r"score 'a' is .* missing in some"),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_scores(num_ranks: int) -> None:
    """Bad ones are told; nan and infinities are values like others."""

    def train() -> dict[str, str]:
        run, model, _ = build(None)
        said = {}
        for name, (score, _) in SCORES.items():
            with pytest.raises(samestep.Error) as caught:
                run.evaluate(score, Pairs(5))
            said[name] = str(caught.value)
            assert model.training
        for bad in (0, -1, "2", 1.5):
            with pytest.raises(samestep.Error, match="micro_batch_size must be a whole number above 0"):
                run.evaluate(lambda _: {"a": 1.0}, Pairs(5), micro_batch_size=bad)
        with pytest.raises(samestep.Error, match=r"the data set .* is empty"):
            run.evaluate(lambda _: {"a": 1.0}, [])
        with pytest.raises(samestep.Error, match=r"needs a function score\(batch\) -> dict, not 'accuracy'"):
            run.evaluate("accuracy", Pairs(5))
        inf = float("inf")
        found = run.evaluate(
            lambda b: {"a": inf if len(b[0]) == 2 else -inf, "b": inf, "c": (float("nan"), 0 if len(b[0]) == 2 else 1)},
            Pairs(5),
        )
        assert (str(found["a"]), found["b"], str(found["c"])) == ("nan", inf, "nan")
        return said

    said = samestep.spawn(train, num_ranks)
    for name, (_, words) in SCORES.items():
        assert_sentence(said[name], words)


# --- arguments of Run -------------------------------------------------------------------------------------------------

WHOLE = r"must be a whole number "
ARGUMENTS: list[tuple[str, list[Any], str]] = [
    ("batch_size", ["32", 0, -1, 1.5, 8.0, True, None], WHOLE + "above 0, found"),
    ("micro_batch_size", ["2", 0, -1, 1.5, True], WHOLE + "above 0, found"),
    ("micro_batch_size", [3, 16], r"batch_size 8 is not a multiple of micro_batch_size \d+: use a batch_size of .* or"),
    ("seed", [-1, "0", 1.5, True, None], WHOLE + "of at least 0, not"),
    ("num_threads", [0, -1, "1", 1.5, None], WHOLE + "from 1 to 4096, not"),
    ("keep_last", [0, -1, "3", None], WHOLE + "of at least 1, not"),
    ("log_every", [0, -1, "x", 1.5, None, "never"], "log_every is .*: give steps such as 10, epochs such as 1epochs"),
    ("compare_every", [0, "5days"], "compare_every is .*: give a number of steps such as 10"),
    ("check_compute_every", [0, "1epochs", "30s", True], "check_compute_every is .*: give a number of steps such"),
    ("check_compute", ["ignore", None, True], "check_compute must be stop or warn, not"),
    ("max_steps", [0, -1, "3", 1.5, True], WHOLE + "of at least 1, not"),
    ("precision", ["fp8", "", "FP16", None, 32, ["fp32"], torch.float16], "precision must be fp32, tf32, bf16 or fp16"),
    ("reduction", ["slow", None, 1, ["exact"]], "reduction must be exact or fast, not"),
    ("device", ["tpu", "cuda:", 0, ""], "device must be cpu, cuda or one GPU such as cuda:1, not"),
    ("snapshot_every", ["2weeks", 0, -1, True, 1.5, "0epochs", "", "epochs"], "snapshot_every is .*: give a number of"),
    ("resume", ["", -1, 1.5, []], "resume must be latest, a step, a snapshot's name such as best, or never, not"),
    ("bucket_cap_mb", [0, -1, float("nan"), float("inf"), "25", [25]], "bucket_cap_mb must be a number above 0, not"),
    ("deterministic", ["no", None, 1], "deterministic must be True or False, not"),
    ("trackers", [None, 3, samestep.TensorBoard()], r"trackers must be a list such as \[samestep\.TensorB"),
    ("trackers", [[3], [samestep.TensorBoard]], r"trackers holds .*, which is not a tracker: pass objects"),
    ("trackers", [["wanbd"], "tensorboard,wanbd"], r"trackers names 'wanbd', which is not a tracker; there are "),
    ("config", [3, "x", [1], [("a", 1)]], r"config must be a dict such as vars\(args\), not a"),
    ("run_dir", [3, b"x", ["x"], "", "a\0b"], "run_dir must be the path of a directory, or None"),
]


def test_arguments(tmp_path: Path) -> None:
    def try_all() -> int:
        count = 0
        for name, values, words in ARGUMENTS:
            for value in values:
                given = {"run_dir": tmp_path / "runs" / "x", "batch_size": 8, name: value}
                with pytest.raises(samestep.Error) as caught:
                    samestep.Run(given.pop("run_dir"), **given)
                assert_sentence(str(caught.value), words)
                assert repr(value)[:10] in str(caught.value) or name in ("device", "config", "trackers"), caught.value
                count += 1
        return count

    assert samestep.spawn(try_all) == sum(len(values) for _, values, _ in ARGUMENTS)
    assert list(tmp_path.iterdir()) == []


def test_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(samestep.Error, match="device cuda was asked for, but torch finds no GPU: leave the option out"):
        samestep.spawn(lambda: samestep.Run(None, batch_size=4, micro_batch_size=1, device="cuda"))


def test_user_directories_are_found(tmp_path: Path) -> None:
    def start() -> str:
        return str(samestep.Run("~/run", batch_size=4, micro_batch_size=1).dir)

    assert samestep.spawn(start, env={"HOME": str(tmp_path)}) == str(tmp_path / "run")


# --- what is no mistake -----------------------------------------------------------------------------------------------


class Lookahead:
    """Wraps an optimizer, as some do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def test_checks_do_not_get_in_the_way(tmp_path: Path) -> None:
    """Each of these stands near a mistake above."""

    def train() -> tuple[float, Any]:
        run = samestep.Run(tmp_path / "run", batch_size=8, micro_batch_size=2, log_every=1, device="cpu")
        model = torch.nn.Linear(4, 1)

        lookahead = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
        run.prepare(model=model, lookahead=lookahead)
        stranger = torch.nn.Linear(1, 1)
        others = torch.optim.SGD(stranger.parameters(), lr=0.1)
        run.state["best"] = float("inf")
        for epoch in run.epochs(Pairs(), 2):
            for step in epoch:
                for v, (x, y) in enumerate(step):
                    lookahead.inner.zero_grad()  # as scripts have it: before
                    if v == 0 and step.number == 2:
                        continue
                    step.backward(torch.nn.functional.mse_loss(model(x), y))
                    step.log(a=1, b=torch.ones(()), c=True)
                others.step()
                stranger(torch.ones(1, 1)).sum().backward()
                lookahead.inner.step()
                out = run.evaluate(lambda b: {"a": (b[0].mean(), len(b[0])), "b": b[1][:, 0].tolist()}, Pairs(5))
                assert len(out["b"]) == 5
            run.state["worst"] = float("nan")
            run.snapshot("best")
        sizes = run.evaluate(lambda b: {"size": float(len(b[0]))}, DataLoader(Pairs(5), batch_size=4))
        assert sizes == {"size": (4 * 4 + 1 * 1) / 5}, "a DataLoader's own micro-batches"
        torch.optim.Adam(model.parameters()).step()  # after the loop, the model is the script's
        return float(step.loss), run.state

    for num_ranks in (1, 2):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        loss, state = samestep.spawn(train, num_ranks)
        assert loss > 0
        kept = Store(tmp_path / "run")
        snapshot = kept.find("best")
        assert snapshot is not None
        assert snapshot.step == 2 * NUM_SAMPLES // 8
        found = kept.read(snapshot)["state"]
        assert (found["best"], str(found["worst"])) == (float("inf"), "nan")
        assert str(state) == str(found)


def test_a_later_run_of_the_process_takes_over(tmp_path: Path) -> None:
    """A cell of a notebook is run a second time: the run begins or goes on; the first object is of no use any more."""

    def train() -> None:
        first, model, optimizer = build(tmp_path / "run", snapshot_every=1)
        steps = first.steps(Pairs(), 4)
        for _ in range(2):
            for x, y in next(steps):
                learn(first._loop.step, model, x, y)
            optimizer.step()
        next(steps)
        second, model, optimizer = build(tmp_path / "run", snapshot_every=1)
        assert second.steps_done == 2
        with pytest.raises(samestep.Error, match=r"was ended by a later samestep\.Run of this process"):
            first.log({"a": 1.0})
        for step in second.steps(Pairs(), 4):
            for x, y in step:
                learn(step, model, x, y)
            optimizer.step()
        assert second.steps_done == 4

    samestep.spawn(train)
    assert [snapshot.step for snapshot in Store(tmp_path / "run").snapshots()] == [2, 3, 4]
    assert (tmp_path / "run" / "ledger.bin").stat().st_size == 4 * RECORD.size


def test_prepare_again_after_a_mistake() -> None:
    """In a notebook, the cell is mended and run again."""

    def train() -> int:
        run = samestep.Run(None, batch_size=4, micro_batch_size=1)
        model = torch.nn.Linear(4, 1)
        with pytest.raises(samestep.Error, match="second"):
            run.prepare(model=model, second=None)
        run.prepare(model=model)
        with pytest.raises(samestep.Error, match="empty"):
            run.epochs([], 1)
        for epoch in run.epochs(Pairs(), 1):
            for step in epoch:
                for x, y in step:
                    learn(step, model, x, y)
        return run.steps_done

    assert samestep.spawn(train) == 8


def test_memory_used_again_is_no_old_model() -> None:
    """A new model may get the addresses of one that was there before the Run and is gone."""

    def train() -> None:
        old = [torch.nn.Linear(4, 4) for _ in range(50)]
        run = samestep.Run(None, batch_size=4, micro_batch_size=1)
        ids = {id(param) for layer in old for param in layer.parameters()}
        old.clear()
        new = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(50)])
        assert ids & {id(param) for param in new.parameters()}, "the test is of no use"
        run.prepare(model=new)

    samestep.spawn(train)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_sampler_that_has_changed(num_ranks: int, tmp_path: Path) -> None:
    """Since an epoch was begun: some samples would be used twice in it, and others not at all."""

    def train(shift: int, max_steps: int) -> int:
        run, model, optimizer = build(tmp_path / "run", snapshot_every=1, max_steps=max_steps)
        sampler = lambda epoch: [(i + shift) % NUM_SAMPLES for i in range(NUM_SAMPLES)]  # noqa: E731
        loop(run, model, optimizer, sampler=sampler)
        return int(run.steps_done)

    assert samestep.spawn(train, num_ranks, (0, 2)) == 2
    with pytest.raises(samestep.Error, match=r"sampler\(0\) gave other indices than before the restart: make them dep"):
        samestep.spawn(train, num_ranks, (1, 8))
    assert samestep.spawn(train, num_ranks, (0, 4)) == 4
    assert samestep.spawn(train, num_ranks, (1, 8)) == 8, "an epoch that begins may have another order"


def test_rows_from_before_the_loop_stand_once(tmp_path: Path) -> None:
    """A script that scores its model before it trains logs the same at every start."""

    def train(max_steps: int) -> None:
        run = samestep.Run(
            tmp_path / "run", batch_size=BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE, device="cpu",
            snapshot_every=1, max_steps=max_steps, log_every=2,
        )  # fmt: skip
        run.log({"unprepared": 0.0})
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model=model, optimizer=optimizer)
        run.log({"untrained": 1.0})
        loop(run, model, optimizer)
        run.log({"trained": 2.0})

    for max_steps in (2, 4, 4):
        samestep.spawn(train, 1, (max_steps,))
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [row for row in rows if "unprepared" in row] == ['{"step": 0, "unprepared": 0.0}']
    assert (tmp_path / "run" / "ledger.bin").stat().st_size == 4 * RECORD.size
    assert [row for row in rows if "untrained" in row] == ['{"step": 0, "untrained": 1.0}']
    assert [row for row in rows if '"trained"' in row] == ['{"step": 4, "trained": 2.0}']


def test_rows_from_an_epochs_head_stand_once(tmp_path: Path) -> None:
    """A run that goes on in the midst of an epoch runs the lines before its steps once more."""

    def train(max_steps: int) -> None:
        run = samestep.Run(
            tmp_path / "run", batch_size=BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE, device="cpu",
            snapshot_every=1, max_steps=max_steps, log_every=100,
        )  # fmt: skip
        model = nn.Linear(1, 1)
        run.prepare(model=model)
        for epoch in run.epochs(torch.randn(2 * BATCH_SIZE, 1), 3):
            run.log({"head of": epoch.number})
            for step in epoch:
                for x in step:
                    step.backward(model(x).mean())
                run.log({"body of": step.number})

    for max_steps in (1, 3, 4, 6):
        samestep.spawn(train, 2, (max_steps,))
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["head of"] for row in rows if "head of" in row] == [0, 1, 2]
    assert [row["body of"] for row in rows if "body of" in row] == list(range(6))


def test_steps_without_an_update() -> None:
    """Steps whose gradients no optimizer is meant to use, and updates that torch's hooks do not see."""

    def train() -> float:
        run = samestep.Run(None, batch_size=BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE, device="cpu")
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
        lookahead = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
        run.prepare(model=model, first=first, second=second, lookahead=lookahead)
        scaler = torch.amp.GradScaler("cpu")  # the script's own

        def scale_too_far() -> None:
            model[0].weight.grad[0] = torch.inf
            scaler.scale(torch.ones(()))
            scaler.step(first)
            scaler.update()

        def update_by_hand() -> None:
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad

        def assign_data() -> None:
            model[0].weight.data = model[0].weight.data * 0.9

        bodies = [
            model.zero_grad,
            lambda: model.zero_grad(set_to_none=False),
            first.step,
            second.step,
            lookahead.inner.step,
            scale_too_far,
            update_by_hand,
            assign_data,
        ]
        for step in run.steps(Pairs(), len(bodies) + 1):
            if step.number == len(bodies):
                model.zero_grad()  # before the inner loop it drops nothing that is of use
            for x, y in step:
                learn(step, model, x, y)
            bodies[step.number % len(bodies)]()
        return float(step.loss)

    assert samestep.spawn(train, 1) == samestep.spawn(train, 2)


def test_a_closure_that_iterates_a_step_again() -> None:
    def train() -> float:
        run = samestep.Run(None, batch_size=BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE, device="cpu")
        model = nn.Linear(4, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
        run.prepare(model=model, optimizer=optimizer)
        for step in run.steps(Pairs(), 4):

            def closure(step: Any = step) -> torch.Tensor:
                for x, y in step:
                    learn(step, model, x, y)
                return step.loss

            optimizer.step(closure)
        return float(step.loss)

    assert samestep.spawn(train, 1) == samestep.spawn(train, 2)
