"""Interceptors change what a run does, without a branch in the loop, and the facts of a run that they may use.

Tools and options install them by name.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from torch import nn

from samestep.config import NO_INTERCEPTORS, OPTIONS, RunConfig
from samestep.decoding import parse_json
from samestep.engine.passes import Gradients
from samestep.errors import InvalidValue
from samestep.nested import find_tensors
from samestep.plan.shards import OUTSIDE, ParamSize
from samestep.train.context import RunContext
from samestep.train.divided_state import Blocks, find_blocks
from samestep.train.loop_data import LoopData
from samestep.train.objects import Objects
from samestep.train.step import StepInterceptor
from samestep.watch.beats import PhaseClock
from samestep.world.environment import TRACE

OWN_NAME = re.compile(r"samestep(\.[a-z_0-9]+)+:[A-Za-z_0-9]+")


@dataclass(frozen=True)
class LoopParts:
    """What an interceptor may use of a loop.

    Attributes:
        data: the data set of its steps, and the plan of their samples.
        gradients: the gradients of the run's models.
        clock: the phases of this rank, and the seconds spent in each.
        build_state: position -> the state for a snapshot.
        measure_sizes: returns the sizes of the parameters and of their optimizers' state.
    """

    data: LoopData
    gradients: Gradients
    clock: PhaseClock
    build_state: Callable[[dict[str, Any]], dict[str, Any]]
    measure_sizes: Callable[[], list[ParamSize]]


class Interceptor(StepInterceptor):
    """Changes what a run does. Every method does nothing by default.

    The life of a run, with all events in their places. `<name>` notifies observers: an interceptor is one, too, and the
    last in the list. `[name]` calls the interceptors and uses their results. ::

        def compute(v):                                   # <forward>
            for each call in the script's body:
                if step.log(...):                         # <log>
                if step.backward(...):                    # <backward>
            end the micro-batch                           # <end_micro_batch>

        run = samestep.Run(...)                           # [__init__]
        run.prepare(...)                                  # [prepare]
        for each loop of the script:                      # [begin_loop]
            for each step:                                # [borrow] <begin_step>
                for each pass over the step:              # <begin_pass> [probe]
                    for each batch of the probe:
                        for each call in the script's body:
                            if step.log(...):             # <log>
                            if step.backward(...):        # <backward>
                    for each v, borrowed or of this rank:
                        compute(v)
                    exchange                              # [results]
                    after the exchange                    # [after_exchange]
                    for each v to compute again:
                        compute(v)
                    apply                                 # <exchanged> <reduced>
                for each call before or after optimizer.step():
                    if step.log(...):                     # <log>
                end the step                              # <end_step>
                for each body that ends here, of the step or of its epoch:
                    save                                  # <end_body>

    `[borrow]` is also called earlier, when samples are read ahead.

    Args:
        options: of the request of a tool, see `read_request`.

    Attributes:
        is_trial: whether a tool trains only to look at the run. Then trackers are off, and `run.restore`
            of a snapshot that is not there does nothing (a trial may be too short to reach it).
        called: for messages: the option that installs it.
        permits_fsdp2: whether it works with `shard="fsdp2"`.
        permits_healing: whether the other ranks can continue after the death of one. Then a pass can be repeated with
            other micro-batches, and the number of this rank can change.
    """

    is_trial: ClassVar[bool] = False
    called: ClassVar[str] = "a tool that observes the run"
    permits_fsdp2: ClassVar[bool] = True
    permits_healing: ClassVar[bool] = False

    def __init__(self, context: RunContext, options: Mapping[str, Any]) -> None:
        self.context = context
        self.options = options

    def prepare(self, modules: Mapping[str, nn.Module]) -> None:
        """The models are on the device; they are made equal on all ranks and restored next. May change them.

        Args:
            modules: the models that were passed to `run.prepare`, without wrappers.
        """

    def begin_loop(self, loop: LoopParts) -> None:
        """A loop begins, after a snapshot was restored. Called on all ranks, also for a loop without steps left."""


def find_kinds(config: RunConfig) -> list[type[Interceptor]]:
    """Return the interceptors that belong to options which are set."""
    return [
        load_interceptor(OPTIONS[name].interceptor) for name in NO_INTERCEPTORS if getattr(config, name) is not None
    ]


def read_request(text: str | None) -> tuple[list[type[Interceptor]], dict[str, Any]]:
    """Return the interceptor that a tool has requested by the variable SAMESTEP_TRACE, if it is set, and its options.

    The value is JSON: "interceptor" is the "module:class", and the rest are options. A process inherits its
    environment, so only classes of samestep itself are accepted.

    Raises:
        Error: the value does not name an interceptor.
    """
    if text is None:
        return [], {}
    try:
        options = parse_json(text)
        name = options.pop("interceptor")
        if not OWN_NAME.fullmatch(name):
            raise ValueError("the name is not one of samestep's own")
        return [load_interceptor(name)], options
    except (ValueError, TypeError, AttributeError, KeyError, ImportError) as error:
        raise InvalidValue(
            f"{TRACE} names no interceptor ({error}): samestep's own commands set it, unset it everywhere else",
            code="SS105",
        ) from None


def load_interceptor(name: str) -> type[Interceptor]:
    """Return the class "module:class".

    Raises:
        ImportError, AttributeError: there is none.
        TypeError: it is no interceptor.
    """
    module, _, attribute = name.partition(":")
    kind = getattr(import_module(module), attribute)
    if not (isinstance(kind, type) and issubclass(kind, Interceptor)):
        raise TypeError(f"{name} is no Interceptor")
    return kind


def measure_sizes(objects: Objects, blocks: Blocks | None) -> list[ParamSize]:
    """Return the sizes of the models' parameters, undivided: `nbytes` is that of all slices of a tensor.

    Call it after an update, which allocates the optimizers' state.

    Args:
        blocks: as `shard_blocks` of `Run.prepare`.
    """
    states = {id(p): state for optimizer in objects.optimizers.values() for p, state in optimizer.state.items()}
    found = [block for module in objects.modules.values() for block in find_blocks(module, blocks)]
    homes: dict[int, int] = {}
    for number, block in enumerate(found, start=OUTSIDE + 1):
        for param in block.parameters():
            homes.setdefault(id(param), number)
    sizes = []
    for param in objects.name_params().values():
        tensors = find_tensors(states.get(id(param)))
        of_shape = sum(each.nbytes for each in tensors if each.shape == param.shape)
        sizes.append(
            ParamSize(
                num_bytes=param.nbytes,
                num_rows=param.shape[0] if param.dim() else 1,
                gradient_bytes=param.nbytes if param.requires_grad else 0,
                state_bytes=of_shape,
                small_bytes=sum(each.nbytes for each in tensors) - of_shape,
                block=homes.get(id(param), OUTSIDE),
            )
        )
    return sizes
