"""Trains a LightningModule with a samestep run, in place of Lightning's Trainer. Does not import Lightning."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from samestep import InvalidType, InvalidValue, Run

__all__ = ["fit"]

# Methods of a LightningModule that replace a part of Lightning's loop, which does not run here.
NOT_CALLED = (
    "backward", "configure_gradient_clipping", "lr_scheduler_step", "on_after_batch_transfer",
    "on_before_batch_transfer", "optimizer_step", "optimizer_zero_grad", "transfer_batch_to_device",
)  # fmt: skip


@dataclass
class Schedule:
    """A learning rate scheduler as `configure_optimizers` returns it."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    name: str | None = None
    strict: bool = True
    reduce_on_plateau: bool = False

    def step(self, values: Mapping[str, float]) -> None:
        """Take a step, with the monitored value if the scheduler needs it."""
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        elif self.monitor is not None and self.monitor in values:
            self.scheduler.step(values[self.monitor])
        elif self.strict:
            raise InvalidValue(
                f"ReduceLROnPlateau monitors {self.monitor}, which the module has not logged: there are "
                f"{', '.join(sorted(values)) or 'no values'}"
            )


class Trainer(SimpleNamespace):
    """The module's `self.trainer`: the attributes of Lightning's Trainer that a module reads in its hooks.

    Attributes:
        callback_metrics: the last value of each logged name, averaged over all ranks.
        should_stop: set it to end the run after the epoch.
    """

    def __init__(self, run: Run, max_epochs: int, num_training_batches: int) -> None:
        super().__init__(
            max_epochs=max_epochs, num_training_batches=num_training_batches,
            estimated_stepping_batches=max_epochs * num_training_batches, current_epoch=0, global_step=run.steps_done,
            global_rank=run.rank, local_rank=run.local_rank, world_size=run.world_size, is_global_zero=run.rank == 0,
            callback_metrics={}, optimizers=[], lr_scheduler_configs=[], logger=None, loggers=[], datamodule=None,
            should_stop=False, training=False, validating=False, sanity_checking=False, progress_bar_callback=None,
            barebones=False, default_root_dir=str(run.dir), state=SimpleNamespace(fn="fit"),
        )  # fmt: skip


class Logs:
    """Collects the values that the module logs with `self.log`, by the running hook.

    Attributes:
        values: name -> (value, batch size or None), since the last `take`.
        of_epoch: values of `training_step` whose averages over the epoch are wanted: name -> name of the average. As in
            Lightning, the value of a step is then `<name>_step`; `<name>_epoch` is the average of what has both.
    """

    def __init__(self) -> None:
        self.values: dict[str, tuple[Any, int | None]] = {}
        self.of_epoch: dict[str, str] = {}
        self.in_training_step = False

    def log(
        self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None,
        on_epoch: bool | None = None, *_: Any, batch_size: int | None = None, **__: Any,
    ) -> None:  # fmt: skip
        """Like `LightningModule.log`. Values are averaged over all ranks, as with `sync_dist=True`."""
        if not isinstance(value, int | float | Tensor) or (isinstance(value, Tensor) and value.numel() != 1):
            raise InvalidType(
                f"self.log got {name}, a {type(value).__name__}: log a number or a tensor of one element; samestep "
                "averages it over all ranks, which an object such as a torchmetrics.Metric would do a second time"
            )
        if self.in_training_step and on_epoch:
            self.of_epoch[f"{name}_step"] = name if on_step is False else f"{name}_epoch"
            name = f"{name}_step"
        self.values[name] = (value.detach() if isinstance(value, Tensor) else value, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], *more: Any, **options: Any) -> None:
        """Like `LightningModule.log_dict`."""
        for name, value in dictionary.items():
            self.log(name, value, *more, **options)

    def take(self) -> dict[str, tuple[Any, int | None]]:
        """Return the values, and forget them."""
        values, self.values = self.values, {}
        return values


def fit(
    run: Run,
    module: Any,
    train_loader: Any,
    val_loader: Any = None,
    *,
    max_epochs: int,
    gradient_clip_val: float | None = None,
    monitor: str | None = None,
    mode: str = "min",
    patience: int | None = None,
) -> dict[str, float]:
    """Train a LightningModule with automatic optimization, as `Trainer.fit` does, with the promises of a run.

    The run's `batch_size / micro_batch_size` takes the place of Lightning's `accumulate_grad_batches`, and the run's
    `precision` that of Lightning's. `sync_dist=True` is always on. `training_step` gets the number of the step as
    `batch_idx`. The hooks called are `prepare_data` (on rank 0), `setup`, `configure_model`, `configure_optimizers`,
    `teardown`, `on_fit_*`, `on_train_*`, `on_validation_*`, `on_after_backward` and `on_before_optimizer_step`.
    Callbacks and loggers of Lightning are not used: see `Run` for trackers and snapshots.

    Args:
        run: created before the module.
        module: LightningModule with one optimizer and any schedulers.
        train_loader: a data set, or a DataLoader with the run's micro-batch size as its batch size.
        val_loader: the same for validation after each epoch, with any batch size.
        max_epochs: number of epochs.
        gradient_clip_val: maximum norm of the gradients.
        monitor: a logged value. The snapshot with the best one is named "best".
        mode: "min" or "max": which value of `monitor` is the best.
        patience: end the run after that many epochs without a better value of `monitor`.

    Returns:
        The last value of each logged name.

    Raises:
        InvalidValue: the module optimizes manually, uses several optimizers, replaces a part of Lightning's loop (such
            as `optimizer_step`), or has not logged `monitor`.
        InvalidType: the module logs values that are not numbers.

    Example::

        >>> import lightning, samestep, torch
        >>> from samestep.adapters.lightning import fit
        >>> class Linear(lightning.LightningModule):
        ...     def configure_model(self):
        ...         self.layer = torch.nn.Linear(2, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> run = samestep.Run(None, batch_size=4, micro_batch_size=2)
        >>> values = fit(run, Linear(), torch.ones(8, 2), max_epochs=2)
        >>> [*values]
        ['loss']
    """
    _check(module, monitor, mode, patience)
    data = getattr(train_loader, "dataset", train_loader)
    trainer, logs = Trainer(run, max_epochs, math.ceil(len(data) / run.batch_size)), Logs()
    module.trainer, module.log, module.log_dict, module.print = trainer, logs.log, logs.log_dict, run.print
    optimizer, schedules = _prepare(run, module, trainer)
    for epoch in run.epochs(train_loader, max_epochs):
        trainer.current_epoch, trainer.training = epoch.number, True
        module.on_train_epoch_start()
        for step in epoch:
            trainer.global_step = step.number
            _run_step(run, module, step, logs, gradient_clip_val)
            optimizer.step()
            trainer.callback_metrics |= step.metrics
            _step(schedules, "step", step.number, trainer.callback_metrics)
        trainer.global_step, trainer.training = run.steps_done, False
        _log_epoch(run, module, epoch, logs, val_loader)
        _step(schedules, "epoch", epoch.number, trainer.callback_metrics)
        if monitor is not None:
            _keep_best(run, trainer, monitor, 1 if mode == "min" else -1, epoch.number, patience)
        if trainer.should_stop:
            run.stop()
    module.on_train_end()
    module.on_fit_end()
    module.teardown("fit")
    return dict(trainer.callback_metrics)


def _log_epoch(run: Run, module: Any, epoch: Any, logs: Logs, val_loader: Any) -> None:
    """Validate after an epoch, and record what the module logged."""
    values = {name: epoch.metrics[of_step] for of_step, name in logs.of_epoch.items()}
    module.trainer.callback_metrics |= values
    if val_loader is not None:
        values |= _validate(run, module, val_loader, logs)
    module.on_train_epoch_end()
    values |= {name: float(value) for name, (value, _) in logs.take().items()}
    module.trainer.callback_metrics |= values
    if values:
        run.log(values)


def _prepare(run: Run, module: Any, trainer: Trainer) -> tuple[torch.optim.Optimizer, list[Schedule]]:
    """Call the hooks before the training, and prepare the objects that they create."""
    run.once(module.prepare_data)
    module.setup("fit")
    module.configure_model()
    optimizer, schedules = _configure(module)
    named = {f"scheduler{i or ''}": each.scheduler for i, each in enumerate(schedules)}
    run.prepare(module=module, optimizer=optimizer, **named)
    trainer.optimizers, trainer.lr_scheduler_configs = [optimizer], schedules
    module.on_fit_start()
    module.on_train_start()
    return optimizer, schedules


def _check(module: Any, monitor: str | None, mode: str, patience: int | None) -> None:
    if not callable(getattr(module, "training_step", None)) or not hasattr(module, "configure_optimizers"):
        raise InvalidType(f"fit needs a LightningModule, not a {type(module).__name__}")
    name = type(module).__name__
    if not module.automatic_optimization:
        raise InvalidValue(
            f"{name} optimizes manually: set automatic_optimization = True, or write its training_step as a loop over "
            "run.epochs, which allows several optimizers"
        )
    of_lightning = next(each for each in type(module).__mro__ if each.__name__ == "LightningModule")
    replaced = [each for each in NOT_CALLED if getattr(type(module), each) is not getattr(of_lightning, each)]
    if replaced:
        raise InvalidValue(f"{name} replaces {' and '.join(replaced)} of Lightning's loop, which fit does not call")
    if mode not in ("min", "max"):
        raise InvalidValue(f"mode must be min or max, not {mode!r}")
    if patience is not None and monitor is None:
        raise InvalidValue("patience needs monitor, the name of a logged value")


def _configure(module: Any) -> tuple[torch.optim.Optimizer, list[Schedule]]:
    """Return the optimizer and schedules from the result of `configure_optimizers`, in any of its forms."""
    given = module.configure_optimizers()
    optimizers, schedulers = given, []
    if isinstance(given, Mapping):
        optimizers, schedulers = given["optimizer"], [given["lr_scheduler"]] if "lr_scheduler" in given else []
    elif isinstance(given, list | tuple) and len(given) == 2 and isinstance(given[0], list | tuple):
        optimizers, schedulers = given
    if isinstance(optimizers, list | tuple) and len(optimizers) == 1:
        optimizers = optimizers[0]
        if isinstance(optimizers, Mapping):
            schedulers = [optimizers["lr_scheduler"]] if "lr_scheduler" in optimizers else []
            optimizers = optimizers["optimizer"]
    if not isinstance(optimizers, torch.optim.Optimizer):
        raise InvalidValue(
            f"configure_optimizers must return one optimizer, with its schedulers, not {type(optimizers).__name__}: "
            "several need a loop over run.epochs"
        )
    schedulers = schedulers if isinstance(schedulers, list | tuple) else [schedulers]
    schedules = [Schedule(**each) if isinstance(each, Mapping) else Schedule(each) for each in schedulers]
    return optimizers, schedules


def _step(schedules: list[Schedule], interval: str, number: int, values: Mapping[str, float]) -> None:
    """Step the schedules of an interval after the step or epoch of this number, where they are due."""
    for schedule in schedules:
        if schedule.interval == interval and (number + 1) % schedule.frequency == 0:
            schedule.step(values)


def _run_step(run: Run, module: Any, step: Any, logs: Logs, gradient_clip_val: float | None) -> None:
    """Compute the gradient of a batch, with the hooks around it."""
    logs.in_training_step = True
    for batch in step:
        module.on_train_batch_start(batch, step.number)
        with run.autocast():
            output = module.training_step(batch, step.number)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is not None:  # the module leaves this micro-batch out
            step.backward(loss)
        module.on_train_batch_end(output, batch, step.number)
        if values := logs.take():
            step.log({name: value for name, (value, _) in values.items()})
    logs.in_training_step = False
    module.on_after_backward()
    (optimizer,) = module.trainer.optimizers
    module.on_before_optimizer_step(optimizer)
    if gradient_clip_val is not None:
        run.clip_grad_norm_(module.parameters(), gradient_clip_val)


def _validate(run: Run, module: Any, loader: Any, logs: Logs) -> dict[str, float]:
    """Run `validation_step` on every sample once. Returns the averages of what it logs."""
    module.trainer.validating = True
    module.on_validation_start()
    module.on_validation_epoch_start()
    batches = iter(range(10**18))  # of this rank: other ranks have different micro-batches

    def score(batch: Any) -> dict[str, Any]:
        number = next(batches)
        module.on_validation_batch_start(batch, number)
        with run.autocast():
            output = module.validation_step(batch, number)
        module.on_validation_batch_end(output, batch, number)
        return {name: value if size is None else (value, size) for name, (value, size) in logs.take().items()}

    values = run.evaluate(score, loader)
    module.trainer.callback_metrics |= values
    module.on_validation_epoch_end()
    module.on_validation_end()
    module.trainer.validating = False
    return values | {name: float(value) for name, (value, _) in logs.take().items()}


def _keep_best(run: Run, trainer: Trainer, monitor: str, sign: int, epoch: int, patience: int | None) -> None:
    """Take the snapshot "best" if this epoch is the best so far, and end the run after `patience` worse epochs."""
    if monitor not in trainer.callback_metrics:
        raise InvalidValue(
            f"monitor is {monitor}, which the module has not logged: there are "
            f"{', '.join(sorted(trainer.callback_metrics)) or 'no values'}"
        )
    value = sign * trainer.callback_metrics[monitor]
    best, at = run.state.get("best", [math.inf, epoch])
    if value < best:
        run.state["best"] = [value, epoch]
        run.snapshot("best")
    elif patience is not None and epoch - at >= patience:
        trainer.should_stop = True
