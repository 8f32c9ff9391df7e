"""The events of a run come in the order that `Interceptor` describes, and interceptors are installed by name."""

import gc
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.tiny import Pairs

import samestep
from samestep.config import OPTIONS
from samestep.engine.passes import PassAttempt
from samestep.train.context import RunContext
from samestep.train.step.interception import Interceptor, install, load_interceptor, read_request
from samestep.train.step.steps import Step, StepObserver

SOURCE = Path(samestep.__file__).parent
NOTIFICATIONS = {name for name in vars(StepObserver) if not name.startswith("_")}
QUESTIONS = {name for name in vars(Interceptor) if callable(getattr(Interceptor, name))}
AHEAD = "borrow"  # is also asked when samples are read ahead
ENDS = {"exchange_failed", "leave"}  # of a run that fails


class Recorder(Interceptor):
    """Records every event, and answers so that all places where it can change something are reached."""

    events: ClassVar[list[str]] = []

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self.events.append("__init__")

    def borrow(self, step: int, num_micro_batches: int) -> Sequence[int]:
        self.events.append("borrow")
        other = 0 if self.context.rank else num_micro_batches - 1
        return [other] if step % 2 and self.context.world_size > 1 else []

    def probe(self, step: Step) -> Iterator[Any]:
        self.events.append("probe")
        if step.number != 1:
            yield torch.ones(2, 4), torch.ones(2, 1)

    def after_exchange(self, step: Step, reduced: Any) -> Iterator[Any]:
        self.events.append("after_exchange")
        if step.number == 2 and self.context.rank == 1:
            yield from step.compute(0, (torch.ones(2, 4), torch.ones(2, 1)))


def record(name: str) -> Callable[..., Any]:
    def method(self: Recorder, *args: Any, **arguments: Any) -> Any:
        self.events.append(name)
        return getattr(Interceptor, name)(self, *args, **arguments)

    return method


for each in (NOTIFICATIONS | QUESTIONS) - {*vars(Recorder)}:
    setattr(Recorder, each, record(each))


def train(run_dir: Path | None, left_at: int = -1, **arguments: Any) -> list[list[str]]:
    """Train in two loops. Returns the events on each rank.

    Args:
        left_at: the step whose loop is left by break.
    """
    recorder = replace(OPTIONS["check_compute_every"], interceptor=f"{__name__}:Recorder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIONS, "check_compute_every", recorder)
        patch.setattr(Recorder, "events", [])
        run = samestep.Run(
            run_dir, batch_size=8, micro_batch_size=2, device="cpu", check_compute_every=1, check_compute="warn",
            **arguments,
        )  # fmt: skip
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model=model, optimizer=optimizer)

        def learn(step: Any) -> None:
            for number in range(1 + step.number % 2):  # two passes in odd steps
                for x, y in step:
                    if step.number == left_at:
                        break
                    step.log(size=len(x))
                    step.backward(F.mse_loss(model(x), y))
                    step.log(number=number)
            if step.number == left_at:
                return
            step.log(twice=2.0)
            optimizer.step()
            step.log(done=1.0)

        try:
            for epoch in run.epochs(Pairs(16), 2):
                for step in epoch:
                    learn(step)
            for step in run.steps(Pairs(16), 2):
                learn(step)
        except (samestep.UsageError, RuntimeError):
            pass
        events: list[Any] = [None] * run.world_size
        if run.world_size == 1:
            return [Recorder.events]
        dist.all_gather_object(events, Recorder.events)
        return events


# --- the description -------------------------------------------------------------------------------------------------


@dataclass
class Life:
    """The described order, as a finite automaton. `moves`: state -> the next states by event, "" for none."""

    moves: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    end: int = 0

    def add(self, event: str, start: int) -> int:
        """Add a move to a new state. Returns it."""
        new = len(self.moves) + 1
        self.moves.setdefault(start, []).append((event, new))
        self.moves[new] = []
        return new

    def pass_over(self, states: set[int]) -> set[int]:
        """Return the states that are reached from `states` without an event."""
        while more := {new for state in states for event, new in self.moves[state] if not event} - states:
            states |= more
        return states

    def check(self, events: Sequence[str]) -> None:
        """Compare the events of one start with the description."""
        states = self.pass_over({0})
        for number, event in enumerate(events):
            after = {new for state in states for expected, new in self.moves[state] if expected == event}
            if event == AHEAD:
                after |= states
            elif event == "leave":
                after = {self.end}
            expected = {event for state in states for event, _ in self.moves[state]} - {""}
            assert after, f"{event} came after {events[max(0, number - 8) : number]}, expected: {expected}"
            states = self.pass_over(after)
        assert self.end in states, f"the events end with {events[-8:]}"


def read_life() -> Life:
    """Build the automaton from the description. An indented block is repeated after `for`, and optional after `if`."""
    text = (Interceptor.__doc__ or "").partition("::\n\n")[2].partition("\n\n    `[borrow]`")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    life, blocks = Life({0: []}), dict[str, list[str]]()

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    def build(lines: list[str], state: int) -> int:
        while lines:
            first, *lines = lines
            num = next((n for n, line in enumerate(lines) if indent(line) <= indent(first)), len(lines))
            inner, lines = lines[:num], lines[num:]
            code, _, comment = first.strip().partition("#")
            if defined := re.fullmatch(r"def (\w+)\(.*\):", code.strip()):
                blocks[defined[1]] = [f"{' ' * 99}# {comment}", *inner]
                continue
            began = life.add("", state)
            after = began
            for event in re.findall(r"[<\[](\w+)[>\]]", comment):
                after = life.add(event, after)
            after = build(inner, after)
            if (name := code.partition("(")[0]) in blocks:
                after = build(blocks[name], after)
            if code.startswith("for "):
                life.moves[after].append(("", began))
                state = life.add("", began)
            elif code.startswith("if "):
                state = life.add("", after)
                life.moves[began].append(("", state))
            else:
                state = after
        return state

    life.end = build(lines, 0)
    return life


def test_the_description_has_every_event() -> None:
    text = Interceptor.__doc__ or ""
    assert {*re.findall(r"<(\w+)>", text)} - {"name"} == NOTIFICATIONS
    assert {*re.findall(r"\[(\w+)\]", text)} - {"name"} == QUESTIONS


def test_events_come_in_the_described_order(tmp_path: Path) -> None:
    """On 2 ranks with 2 micro-batches each, in two loops; the first one is stopped within an epoch, and resumed."""
    life, seen = read_life(), set[str]()
    for arguments in ({"max_steps": 3}, {}):
        for events in samestep.spawn(train, 2, (tmp_path / "run",), arguments):
            assert events.count("begin_loop") == 2
            life.check(events)
            seen |= {*events}
    assert seen == (NOTIFICATIONS | QUESTIONS) - ENDS


def test_events_of_a_run_that_does_not_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    life = read_life()
    (events,) = train(None, left_at=2)
    assert "leave" in events
    life.check(events)
    gc.collect()  # ends this run, which is in reference cycles, before the next one

    def fail(*_: Any) -> None:
        raise RuntimeError("the other rank is gone")

    monkeypatch.setattr(PassAttempt, "exchange", fail)
    (events,) = train(None)
    assert {*events[events.index("exchange_failed") :]} == ENDS
    life.check(events)


@pytest.mark.parametrize(
    "wrong",
    [
        ["begin_step"],
        ["__init__", "prepare", "begin_loop", "borrow", "begin_step", "begin_micro_batch"],
        ["__init__", "prepare", "begin_loop", "borrow", "begin_step"],
        ["__init__", "prepare", "begin_loop", "leave", "begin_loop"],
    ],
)
def test_another_order_is_found(wrong: list[str]) -> None:
    with pytest.raises(AssertionError):
        read_life().check(wrong)


# --- names --------------------------------------------------------------------------------------------------------


def test_every_name_in_the_source_is_an_interceptor() -> None:
    named = re.compile(r'[ (=]"(samestep\.(?:checks|tools)\.[.\w]+:\w+)"')
    names = {name for file in SOURCE.rglob("*.py") for name in named.findall(file.read_text())}
    assert {option.interceptor for option in OPTIONS.values()} - {""} < names
    for name in names:
        load_interceptor(name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"dir": "x"}',
        '{"interceptor": 1}',
        '{"interceptor": "os:system"}',
        '{"interceptor": "samesteps.x:Y"}',
        '{"interceptor": "samestep.tools.verify.trace:Path"}',
        '{"interceptor": "samestep.tools.verify.trace:hash_batch"}',
        '{"interceptor": "samestep.tools.verify.trace:None"}',
        '{"interceptor": "samestep.tools.nothing:Trace"}',
    ],
)
def test_the_environment_may_name_interceptors_of_samestep_only(text: str) -> None:
    with pytest.raises(samestep.InvalidValue, match=r"SAMESTEP_TRACE names no interceptor .*: samestep's own commands"):
        read_request(text)


def test_an_interceptor_is_installed_once() -> None:
    (request,) = read_request('{"interceptor": "samestep.checks.second_opinion:SecondOpinion", "a": 1}')
    assert request.options == {"a": 1}
    context: Any = None
    with pytest.raises(samestep.Error, match="SecondOpinion was requested twice for one run"):
        install(context, [request, request])
