"""Manual optimization: each call of `training_step` pauses at an update, until the calls of all micro-batches do."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from samestep import InvalidValue, Step


class Closed(BaseException):
    """Ends the thread of a call that is not continued."""


class PausedCall:
    """A call in a thread of its own, which runs during `resume` only."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._turns: SimpleQueue[bool] = SimpleQueue()
        self._events: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        Thread(target=self._run, args=(fn,), daemon=True).start()

    def resume(self) -> tuple[str, Any]:
        """Run until `pause`, and return its arguments; or to the end, and return ("end", result)."""
        self._turns.put(True)
        kind, value = self._events.get()
        if kind == "error":
            raise value
        return kind, value

    def pause(self, kind: str, value: Any) -> None:
        """Return from `resume`. The call does this."""
        self._events.put((kind, value))
        if not self._turns.get():
            raise Closed

    def close(self) -> None:
        """End the thread, if it has not ended."""
        self._turns.put(False)

    def _run(self, fn: Callable[[], Any]) -> None:
        try:
            if self._turns.get():
                self._events.put(("end", fn()))
        except Closed:
            pass
        except BaseException as error:
            self._events.put(("error", error))


class ManualOptimizer:
    """What `self.optimizers()` returns. Every pass replaces the gradients, so `zero_grad` has nothing to do."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
        self.optimizer = optimizer
        self.step = step
        self.zero_grad = lambda set_to_none=True: None
        self.toggle_model = lambda sync_grad=True: nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class ManualOptimization:
    """Runs the `training_step` of a module with manual optimization, and replaces the module's methods for it.

    A step has a pass over the micro-batches for each update, and one for what follows the last update.
    """

    def __init__(self, module: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._call: PausedCall | None = None
        given = [ManualOptimizer(each, partial(self._pause, "update", i)) for i, each in enumerate(optimizers)]
        module.optimizers = lambda use_pl_optimizer=True: given if len(given) > 1 else given[0]
        module.manual_backward = lambda loss, *_, **__: self._pause("loss", loss)
        module.toggle_optimizer = module.untoggle_optimizer = lambda optimizer: None
        module.clip_gradients = module.lr_schedulers = self._refuse

    def advance(self, call: PausedCall, step: Step) -> tuple[str, Any]:
        """Continue a call to its next update, ("update", number of the optimizer), or its end, ("end", output)."""
        self._call = call
        has_loss = False
        while (event := call.resume())[0] == "loss":
            step.backward(event[1])
            has_loss = True
        self._call = None
        if has_loss and event[0] == "end":
            raise InvalidValue(
                "training_step ended with gradients that no optimizer has used: update in each training_step, since "
                "the run's batch_size takes the place of accumulated gradients",
                code="SS805",
            )
        return event

    def _pause(self, kind: str, value: Any) -> None:
        if self._call is None:
            raise InvalidValue(
                "manual_backward and the step of an optimizer were called outside of training_step", code="SS805"
            )
        self._call.pause(kind, value)

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise InvalidValue(
            "self.clip_gradients and self.lr_schedulers would be called for each micro-batch: pass gradient_clip_val "
            "to fit, and step the schedulers of self.trainer.lr_scheduler_configs in on_train_epoch_end",
            code="SS805",
        )
