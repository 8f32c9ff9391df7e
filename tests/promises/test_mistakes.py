"""A mistake in a script raises an error of one sentence, and leaves nothing on disk that a later start must undo.
Correct programs that resemble mistakes run without an error and without a warning.
"""

import gc
import os
import re
import warnings
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from promises.wrong import MISTAKES, RANKS, Mistake, train
from support.snapshots import list_steps, read_snapshot
from support.tiny import Pairs, Tiny, update
from torch import nn
from torch.optim import SGD, Adam, optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import samestep
from samestep.plan.ledger import RECORD
from samestep.snapshot.store import Store
from samestep.watch.records import LOCK, read_status

# The files of a run that failed in its first epoch.
BEGUN = {"run.json", "status.json", "lock", "metrics.jsonl", "ledger.bin"}


def assert_caught(name: str, found: Mistake, num_ranks: int, run_dir: Path) -> samestep.Error:
    """Check the error's sentence and what is on disk after it. Returns the error."""
    with pytest.raises(samestep.Error) as caught:
        samestep.spawn(train, num_ranks, (name, run_dir))
    assert_sentence(str(caught.value), found.sentence)
    assert re.fullmatch(r"SS\d{3}", caught.value.code)
    if found.at == "start":
        assert {path.name for path in run_dir.parent.rglob("*") if path.is_file()} <= {LOCK}
        return caught.value
    assert {path.name for path in run_dir.iterdir() if path.is_file()} == BEGUN
    assert num_ranks > 1 or read_status(run_dir)["status"] == "failed"
    snapshots = Store(run_dir).snapshots()
    assert all(snapshot.problem is None for snapshot in snapshots)
    assert all(snapshot.step <= 4 for snapshot in snapshots), "no snapshot of a step after the mistake"
    for snapshot in snapshots:
        state = read_snapshot(Store(run_dir), snapshot)
        tensors = [leaf for leaf in tree_leaves(state["objects"]) if isinstance(leaf, torch.Tensor)]
        assert all(torch.isfinite(tensor).all() for tensor in tensors), f"not finite: {snapshot.path}"
    return caught.value


def assert_sentence(message: str, expected: str) -> None:
    assert re.search(expected, message), message
    assert "\n" not in message
    assert len(message) < 400, message


@pytest.mark.parametrize("name", MISTAKES)
def test_on_one_rank(name: str, tmp_path: Path) -> None:
    assert_caught(name, MISTAKES[name], 1, tmp_path / "runs" / "x")


@pytest.mark.parametrize("name", [name for name, found in MISTAKES.items() if found.at == "loop"][::4])
def test_on_two_ranks(name: str, tmp_path: Path) -> None:
    """The sentence is the same, and no rank waits for one that has failed."""
    error = assert_caught(name, MISTAKES[name], 2, tmp_path / "runs" / "x")
    if found := re.search(r"on rank (\d)|\(rank (\d)\)", str(error)):
        assert f"rank {found[1] or found[2]} raised this" in error.__notes__[0] or error.rank is None


@pytest.mark.parametrize("name", RANKS)
def test_ranks_that_differ(name: str, tmp_path: Path) -> None:
    error = assert_caught(name, RANKS[name], 2, tmp_path / "runs" / "x")
    if name.startswith("a sample of rank"):
        assert f"rank {error.rank}" in name


# --- scores -----------------------------------------------------------------------------------------------------------

SCORES: dict[str, tuple[Any, str]] = {
    "nothing": (lambda b: None, r"the score function returned a NoneType: return a dict"),
    "a tensor": (lambda b: b[0], r"the score function returned a Tensor: return a dict"),
    "values": (lambda b: {"a": b[0]}, r"score 'a' is neither a number, .* but Tensor: average it, or turn it into s"),
    "a string": (lambda b: {"a": "b"}, r"score 'a' is neither a number, .* but str"),
    "three": (lambda b: {"a": (1, 2, 3)}, r"score 'a' is neither a number, .* but tuple"),
    "a short list": (lambda b: {"a": [1] * 3}, r"score 'a' is neither .* for each of [12] samples, but list: average"),
    "a weight of -1": (lambda b: {"a": (1.0, -1)}, r"score 'a' has weight -1\.0: a weight is a finite number of at le"),
    "a weight of nan": (lambda b: {"a": (1.0, float("nan"))}, r"score 'a' has weight nan"),
    "weights of 0": (lambda b: {"a": (1.0, 0)}, r"the total weight of score 'a' is 0: no sample of the data set count"),
    "sometimes a list": (lambda b: {"a": [1, 2] if len(b[0]) == 2 else 1.0}, r"score 'a' is not the same kind of valu"),
    "sometimes nothing": (lambda b: {"a": 1.0} if len(b[0]) == 2 else {}, r"score 'a' is .* missing in some"),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_scores(num_ranks: int) -> None:
    """Bad scores raise an error; nan and infinities are valid."""

    def evaluate() -> dict[str, str]:
        tiny = Tiny()
        run, sentences = tiny.run, {}
        for name, (score, _) in SCORES.items():
            with pytest.raises(samestep.Error) as caught:
                run.evaluate(score, Pairs(5))
            sentences[name] = str(caught.value)
            assert tiny.model.training
        inf = float("inf")
        found = run.evaluate(
            lambda b: {"a": inf if len(b[0]) == 2 else -inf, "b": inf, "c": (float("nan"), 0 if len(b[0]) == 2 else 1)},
            Pairs(5),
        )
        assert (str(found["a"]), found["b"], str(found["c"])) == ("nan", inf, "nan")
        return sentences

    sentences = samestep.spawn(evaluate, num_ranks)
    for name, (_, words) in SCORES.items():
        assert_sentence(sentences[name], words)


def test_an_exception_of_one_rank_in_a_score_function() -> None:
    """The script may catch it, so all ranks learn of it. The buffers are as before."""

    def evaluate() -> str:
        tiny = Tiny(model=lambda: nn.BatchNorm1d(4))
        run = tiny.run

        def score(batch: Any) -> dict[str, float]:
            if run.rank == 1:
                tiny.model.train()(batch[0])
                raise ValueError("no label")
            return {"a": 1.0}

        with pytest.raises((ValueError, RuntimeError)) as caught:
            run.evaluate(score, Pairs(4))
        assert not tiny.model.running_mean.any()
        assert run.evaluate(lambda _: {"a": 1.0}, Pairs(4)) == {"a": 1.0}, "the ranks are at the same place"
        return run._context.group.gather(f"{caught.type.__name__}: {caught.value}")  # type: ignore[return-value]

    said = ["PeerFailed: rank 1 failed: ValueError: no label", "ValueError: no label"]
    assert samestep.spawn(evaluate, 2) == said


# --- arguments of Run -------------------------------------------------------------------------------------------------

WHOLE = r"must be a whole number "
ARGUMENTS: list[tuple[str, list[Any], str]] = [
    ("batch_size", ["32", 0, -1, 1.5, 8.0, True, None], WHOLE + "above 0, found"),
    ("micro_batch_size", ["2", 0, -1, 1.5, True], WHOLE + "above 0, found"),
    ("micro_batch_size", [3, 16], r"batch_size 8 is not a multiple of micro_batch_size \d+: use a batch_size of .* or"),
    ("seed", [-1, "0", 1.5, True, None], WHOLE + "of at least 0, not"),
    ("num_threads", [0, -1, "1", 1.5, None], WHOLE + "from 1 to 4096, not"),
    ("keep_last", [0, -1, "3", None], WHOLE + "of at least 1, not"),
    ("log_every", [None, "never", "30s"], "log_every is .*: give a number of steps such as 10, or of"),
    ("compare_every", ["30min"], "compare_every is .*: give a number of steps such as 10"),
    ("check_compute_every", ["1epochs", "30s"], "check_compute_every is .*: give a number of steps such"),
    ("max_steps", [0, -1, "3", 1.5, True], WHOLE + "of at least 1, not"),
    ("precision", ["fp8", "", "FP16", None, 32, ["fp32"], torch.float16], "precision must be fp32, tf32, bf16 or fp16"),
    ("exchange_dtype", ["fp16", "", 16, torch.bfloat16], "exchange_dtype must be bf16 or none, not"),
    ("device", ["tpu", "cuda:", 0, ""], "device must be cpu, cuda or one GPU such as cuda:1, not"),
    ("snapshot_every", ["2weeks"], "snapshot_every is .*: give a number of"),
    ("shard", ["model"], "shard must be optimizer, fsdp2 or none, not"),
    ("resume", ["", -1, 1.5, []], "resume must be latest, a step, a snapshot's name such as best, or never, not"),
    ("deterministic", ["no", None, 1], "deterministic must be True or False, not"),
    ("trackers", [None, 3, samestep.TensorBoard()], r"trackers must be a list such as \[samestep\.TensorB"),
    ("trackers", [[3], [samestep.TensorBoard]], r"trackers has .*, which is not a tracker: pass objects"),
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


# --- correct code -----------------------------------------------------------------------------------------------------


def test_a_later_run_of_the_process_ends_the_first(tmp_path: Path) -> None:
    """As where a cell of a notebook is run a second time: the second Run begins or resumes."""

    def train() -> None:
        first = Tiny(tmp_path / "run", snapshot_every=1)
        steps = first.run.steps(Pairs(), 4)
        for _ in range(2):
            first.take([next(steps)])
        next(steps)
        second = Tiny(tmp_path / "run", snapshot_every=1)
        assert second.run.steps_done == 2
        with pytest.raises(samestep.Error, match=r"was ended by a later samestep\.Run of this process"):
            first.run.log({"a": 1.0})
        assert second.train(num_steps=4).run.steps_done == 4

    samestep.spawn(train)
    assert list_steps(tmp_path / "run") == [2, 3, 4]
    assert (tmp_path / "run" / "ledger.bin").stat().st_size == 4 * RECORD.size


def test_a_dropped_run_is_collected() -> None:
    """As where a cell of a notebook is interrupted and run again: no second model and optimizer remains."""
    tiny = Tiny()
    steps = tiny.run.steps(Pairs(), 4)
    tiny.take([next(steps)])
    next(steps)
    parts = [ref(part) for part in (tiny.model, tiny.optimizer, tiny.run)]
    del tiny, steps
    gc.collect()
    assert [part() for part in parts] == [None] * 3
    assert not optimizer._global_optimizer_pre_hooks


def test_a_new_model_at_the_address_of_an_old_one() -> None:
    """A model that is built after the Run may get the memory of one that was there before it."""

    def train() -> None:
        old = [nn.Linear(4, 4) for _ in range(50)]
        run = samestep.Run(None, batch_size=4, micro_batch_size=1)
        ids = {id(param) for layer in old for param in layer.parameters()}
        old.clear()
        new = nn.Sequential(*[nn.Linear(4, 4) for _ in range(50)])
        assert ids & {id(param) for param in new.parameters()}, "no address was used again: nothing is tested"
        run.prepare(model=new)

    samestep.spawn(train)


def test_user_directories_are_found(tmp_path: Path) -> None:
    def start() -> str:
        return str(samestep.Run("~/run", batch_size=4, micro_batch_size=1).dir)

    assert samestep.spawn(start, env={"HOME": str(tmp_path)}) == str(tmp_path / "run")


def test_prepare_again_after_a_mistake() -> None:
    """As where a cell of a notebook is corrected and run again."""

    def train() -> None:
        run = samestep.Run(None, batch_size=4, micro_batch_size=1)
        model = nn.Linear(4, 1)
        with pytest.raises(samestep.Error, match="second"):
            run.prepare(model=model, second=None)
        run.prepare(model=model)
        with pytest.raises(samestep.Error, match="empty"):
            run.epochs([], 1)
        run.epochs(Pairs(), 1)

    samestep.spawn(train)


# --- correct programs that resemble mistakes --------------------------------------------------------------------------


class Wrapper:
    """The usual pair: one optimizer for matrices, another for the rest. Saves both."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.matrices = SGD([p for p in parameters if p.ndim > 1], 0.1, momentum=0.9)
        self.rest = Adam([p for p in parameters if p.ndim <= 1], 0.01)

    def step(self) -> None:
        self.matrices.step()
        self.rest.step()

    def state_dict(self) -> dict[str, Any]:
        return {"matrices": self.matrices.state_dict(), "rest": self.rest.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.matrices.load_state_dict(state["matrices"])
        self.rest.load_state_dict(state["rest"])


def build_two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


def update_with_critic(t: Tiny) -> None:
    update(t)
    t.plain.step()


def begin_with_an_empty_update(t: Tiny) -> None:
    t.optimizer.zero_grad()
    t.optimizer.step()
    t.train()


def resemble_mistakes(t: Tiny) -> None:
    """Each of these lines resembles a mistake of wrong.py."""
    stranger = nn.Linear(1, 1)
    others = SGD(stranger.parameters(), lr=0.1)

    def body(t: Tiny, x: torch.Tensor, y: torch.Tensor) -> None:
        t.optimizer.matrices.zero_grad()  # at the start of the body, as in many scripts
        if t.step.micro_batch == 0 and t.step.number == 2:
            return
        t.step.backward(F.mse_loss(t.model(x), y) + stranger(x[:, :1]).square().mean())
        t.step.log(a=1, b=torch.ones(()), c=True)

    def then(t: Tiny) -> None:
        others.zero_grad()  # drops this rank's part; the gradient below is the same on all ranks
        others.step()
        stranger(torch.ones(1, 1)).sum().backward()
        others.step()
        update(t)
        out = t.run.evaluate(lambda b: {"a": (b[0].mean(), len(b[0])), "b": b[1][:, 0].tolist()}, Pairs(5))
        assert len(out["b"]) == 5

    t.run.state |= {"best": torch.inf, "worst": torch.nan}
    t.train(body=body, then=then, after_epoch=lambda t: t.run.snapshot("best"))
    sizes = t.run.evaluate(lambda b: {"size": float(len(b[0]))}, DataLoader(Pairs(5), batch_size=4))
    assert sizes == {"size": (4 * 4 + 1 * 1) / 5}, "a DataLoader's own micro-batches"
    Adam(t.model.parameters()).step()  # after the loop, the script may change the model


class Bounded(nn.Linear):
    """Has a parameter that is infinite on purpose."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.least = nn.Parameter(torch.tensor([-torch.inf]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).maximum(self.least)


class Bounding(SGD):
    """Its state is infinite on purpose, and has memory that nobody reads."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if not self.state[param]:
                self.state[param]["smallest"] = torch.full_like(param, torch.inf)
                # As if torch.empty_like had returned memory with other content on each rank.
                self.state[param]["scratch"] = torch.full_like(param, float(os.environ.get("RANK", 0)))
        return super().step(closure)


CORRECT: dict[str, dict[str, Any]] = {
    "two optimizers in an object": {"model": build_two_layers, "optimizer": Wrapper},
    "a wrapper beside an optimizer": {
        "model": build_two_layers, "optimizer": lambda p: Wrapper(p[:2]),
        "objects": lambda t: {"plain": SGD(t.model[1].parameters(), 0.1)}, "then": update_with_critic},
    "lines that resemble mistakes": {
        "do": resemble_mistakes, "optimizer": Wrapper, "log_every": 1},
    "an update without gradients before the loop": {"do": begin_with_an_empty_update},
    "a parameter that is infinite": {"model": Bounded},
    "a run in the loop of another one": {"then": lambda t: [update(t), t.step.number == 1 and Tiny(None)]},
    "state that is infinite, and memory that nobody reads": {"optimizer": lambda p: Bounding(p, 0.1)},
}  # fmt: skip


def train_correctly(run_dir: Path, name: str) -> dict[str, Any]:
    """Returns the model's weights before and after."""
    arguments = dict(CORRECT[name])
    then = arguments.pop("then", update)
    do = arguments.pop("do", lambda tiny: tiny.train(then=then))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny = Tiny(run_dir, snapshot_every=2, compare_every=1, **arguments)
        before = {name: param.detach().clone() for name, param in tiny.model.named_parameters()}
        do(tiny)
    return {name: (before[name], param.detach()) for name, param in tiny.model.named_parameters()}


@pytest.mark.parametrize("name", CORRECT)
def test_no_alarm(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = samestep.spawn(train_correctly, 2, (tmp_path / "two", name))
    again = samestep.spawn(train_correctly, 1, (tmp_path / "one", name))
    for key, (before, after) in found.items():
        assert torch.equal(after, again[key][1]), key
        assert not torch.equal(before, after) or key == "least", f"{key} is not trained"
    assert "silence" not in capfd.readouterr().out
