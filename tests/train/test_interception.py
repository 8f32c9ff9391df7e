"""The events of a run come in the order that `Interceptor` describes, and interceptors are installed by name."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from support.tiny import Pairs, Tiny

import samestep
from samestep.config import OPTIONS
from samestep.train.context import RunContext
from samestep.train.interception import Interceptor, read_request
from samestep.train.step import Step, StepInterceptor, StepObserver

NOTIFICATIONS = {name for name in vars(StepObserver) if not name.startswith("_")}
QUESTIONS = {name for kind in (Interceptor, StepInterceptor) for name in vars(kind) if callable(getattr(kind, name))}


class Recorder(Interceptor):
    """Records every event, and answers so that all places where it can change something are reached."""

    events: ClassVar[list[str]] = []

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self.events.append("__init__")

    def borrow(self, step: int, num_micro_batches: int) -> Sequence[int]:
        self.events.append("borrow")
        return []

    def probe(self, step: Step) -> Iterator[Any]:
        self.events.append("probe")
        if step.number != 1:
            yield torch.ones(2, 4), torch.ones(2, 1)


def record(name: str) -> Callable[..., Any]:
    def method(self: Recorder, *args: Any, **arguments: Any) -> Any:
        self.events.append(name)
        return getattr(Interceptor, name)(self, *args, **arguments)

    return method


for each in (NOTIFICATIONS | QUESTIONS) - {*vars(Recorder)}:
    setattr(Recorder, each, record(each))


def train() -> list[str]:
    """Train 3 steps, the second one in two passes. Return the events, without those of reading ahead."""
    recorder = replace(OPTIONS["check_compute_every"], interceptor=f"{__name__}:Recorder")
    OPTIONS["check_compute_every"] = recorder  # in a process that ends with this run
    tiny = Tiny(batch_size=4, check_compute_every=1)
    for step in tiny.run.steps(Pairs(12), 3):
        for _ in range(1 + step.number % 2):
            for x, y in step:
                step.backward(F.mse_loss(tiny.model(x), y))
                step.log(size=len(x))
        tiny.optimizer.step()
        step.log(done=1.0)
    return [event for event in Recorder.events if event != "borrow"]


def test_the_description_has_every_event() -> None:
    text = Interceptor.__doc__ or ""
    assert {*re.findall(r"<(\w+)>", text)} - {"name"} == NOTIFICATIONS
    assert {*re.findall(r"\[(\w+)\]", text)} - {"name"} == QUESTIONS


COMPUTE = ["forward", "backward", "log", "end_micro_batch"]
APPLY = ["results", "after_exchange", "exchanged", "reduced"]
PROBED = ["begin_pass", "probe", "backward", "log", *COMPUTE, *APPLY]
PLAIN = ["begin_pass", "probe", *COMPUTE, *APPLY]
ENDED = ["log", "end_step", "end_body"]


def test_events_come_in_the_described_order() -> None:
    """On a rank with one of two micro-batches. The probe adds a batch to each pass but those of step 1."""
    first = ["begin_step", *PROBED, *ENDED, "begin_step", *PLAIN, *PLAIN, *ENDED]
    expected = ["__init__", "prepare", "begin_loop", *first, "begin_step", *PROBED, *ENDED]
    assert samestep.spawn(train, 2) == expected


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"dir": "x"}',
        '{"interceptor": 1}',
        '{"interceptor": "os:system"}',
        '{"interceptor": "samesteps.x:Y"}',
        '{"interceptor": "samestep.tools.interceptors:Path"}',
        '{"interceptor": "samestep.tools.interceptors:hash_batch"}',
        '{"interceptor": "samestep.tools.interceptors:None"}',
        '{"interceptor": "samestep.tools.nothing:Trace"}',
    ],
)
def test_the_environment_may_name_interceptors_of_samestep_only(text: str) -> None:
    with pytest.raises(samestep.InvalidValue, match=r"SAMESTEP_TRACE names no interceptor .*: samestep's own commands"):
        read_request(text)
