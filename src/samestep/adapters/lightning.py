"""Trains a LightningModule with a samestep run, in place of Lightning's Trainer. Does not import Lightning."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from samestep import InvalidType, InvalidValue, Run, UsageError
from samestep.adapters.lightning_metrics import Metrics, is_metric
from samestep.train.evaluate import PerMicroBatch

__all__ = ["fit", "test", "validate"]

# Methods of a LightningModule that replace steps of Lightning's loop, which does not run here.
NOT_CALLED = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_batch_transfer",
    "on_before_batch_transfer",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)
FLAGS = {"validation": "validating", "test": "testing"}
OF_METRICS = "states of metrics"
TRAINING = "training"


@dataclass
class LightningSchedule:
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
                f"{', '.join(sorted(values)) or 'no values'}",
                code="SS803",
            )


class Trainer(SimpleNamespace):
    """The module's `self.trainer`: the attributes of Lightning's Trainer that hooks of modules read.

    Attributes:
        callback_metrics: the last value of each logged name, averaged over all ranks.
        should_stop: set it to end the run after the epoch.
    """

    def __init__(self, run: Run, max_epochs: int, **more: Any) -> None:
        super().__init__(
            max_epochs=max_epochs,
            current_epoch=0,
            global_step=run.steps_done,
            global_rank=run.rank,
            local_rank=run.local_rank,
            world_size=run.world_size,
            is_global_zero=run.rank == 0,
            callback_metrics={},
            optimizers=[],
            lr_scheduler_configs=[],
            logger=None,
            loggers=[],
            should_stop=False,
            training=False,
            validating=False,
            testing=False,
            predicting=False,
            sanity_checking=False,
            default_root_dir=str(run.dir),
            state=SimpleNamespace(fn="fit"),
            **more,
        )
        self.lightning_module.trainer = self


class Logs:
    """Collects the values that the module logs with `self.log`, by the running hook.

    Attributes:
        values: name -> (value, batch size or None), since the last `take`.
        of_epoch: values of `training_step` whose averages over the epoch are wanted: name -> name of the average. As in
            Lightning, the value of a step is then `<name>_step`; `<name>_epoch` is the average of what has both.
        plain: names of a step's and an epoch's value, where `self.log` gave one name for both -> that name.
        metrics: the metrics of torchmetrics.
        of_metrics: names of metrics whose values over the training epoch are wanted.
        step_of: TRAINING or "evaluation" while the module runs a step of it, else "".
    """

    def __init__(self, run: Run, trainer: Trainer) -> None:
        self._trainer = trainer
        self.values: dict[str, tuple[Any, int | None]] = {}
        self.of_epoch: dict[str, str] = {}
        self.plain: dict[str, str] = {}
        module = trainer.lightning_module
        self.metrics = Metrics(module)
        self.of_metrics: dict[str, str] = {}
        self.step_of = ""
        module.log = self.log
        module.log_dict = self.log_dict
        module.print = run.print

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        *_: Any,
        batch_size: int | None = None,
        **__: Any,
    ) -> None:
        """Like `LightningModule.log`. Values are averaged over all ranks, as with `sync_dist=True`."""
        in_step = self.step_of == TRAINING
        on_step = in_step if on_step is None else on_step
        on_epoch = not in_step if on_epoch is None else on_epoch
        of_step, of_epoch = (f"{name}_step", f"{name}_epoch") if on_step and on_epoch else (name, name)
        if on_step and on_epoch:
            self.plain |= {of_step: name, of_epoch: name}
        if is_metric(value):
            if self.step_of:
                self.metrics.log(value, of_step if on_step and in_step else None, of_epoch if on_epoch else None)
                return
            value = self.metrics.compute_now(name, value)
        if not isinstance(value, int | float | Tensor) or (isinstance(value, Tensor) and value.numel() != 1):
            raise InvalidType(
                f"self.log got {name}, a {type(value).__name__}: log a number, a tensor of one element, or a metric of "
                "torchmetrics that is an attribute of the module",
                code="SS803",
            )
        if in_step and on_epoch:
            name = f"{name}_step"
            self.of_epoch[name] = of_epoch
        elif on_epoch:
            name = of_epoch
        self.values[name] = (value.detach() if isinstance(value, Tensor) else value, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], *more: Any, **options: Any) -> None:
        """Like `LightningModule.log_dict`."""
        for name, value in dictionary.items():
            self.log(name, value, *more, **options)

    def take(self) -> dict[str, tuple[Any, int | None]]:
        """Return the values, and forget them."""
        values = self.values
        self.values = {}
        return values

    def take_numbers(self) -> dict[str, float]:
        """Return the values that hooks outside of micro-batches have logged, and forget them."""
        return {name: float(value) for name, (value, _) in self.take().items()}

    def show(self, values: Mapping[str, float]) -> dict[str, float]:
        """Add values to `Trainer.callback_metrics`, also under the names given to `self.log`. Returns these."""
        shown = {**values, **{self.plain[name]: value for name, value in values.items() if name in self.plain}}
        self._trainer.callback_metrics |= shown
        return shown


def fit(
    run: Run,
    module: Any,
    train_loader: Any = None,
    val_loader: Any = None,
    *,
    max_epochs: int,
    datamodule: Any = None,
    gradient_clip_val: float | None = None,
    monitor: str | None = None,
    mode: str = "min",
    patience: int | None = None,
) -> dict[str, float]:
    """Train a LightningModule, as `Trainer.fit` does, with the promises of a run.

    The run's `batch_size / micro_batch_size` takes the place of Lightning's `accumulate_grad_batches`, and the run's
    `precision` that of Lightning's. `sync_dist=True` is always on. `training_step` gets the number of the step as
    `batch_idx`. The hooks called are `prepare_data` (on one rank per host), `setup`, `configure_model`,
    `configure_optimizers`, `teardown`, `on_fit_*`, `on_train_*`, `on_validation_*`, `on_before_backward`,
    `on_after_backward` and `on_before_optimizer_step`.

    Metrics of torchmetrics that are attributes of the module can be logged. They cost a short exchange per step.
    docs/coming-from.md has a list of what is not supported.

    Args:
        run: created before the module.
        module: LightningModule with automatic optimization.
        train_loader: a data set, a DataLoader with the run's batch size or micro-batch size as its batch size, or a
            LightningDataModule. None: that of the data module, or of the module.
        val_loader: the same for validation after each epoch, with any batch size.
        max_epochs, datamodule: as in Lightning.
        gradient_clip_val: maximum norm of the gradients.
        monitor: a logged value. The snapshot with the best one is named "best".
        mode: "min" or "max": which value of `monitor` is the best.
        patience: end the run after that many epochs without a better value of `monitor`.

    Returns:
        The last value of each logged name.

    Raises:
        InvalidType, InvalidValue: the module or an argument cannot be used.

    Example::

        >>> import lightning, samestep, torch
        >>> from samestep.adapters.lightning import fit, test, validate
        >>> class Linear(lightning.LightningModule):
        ...     def configure_model(self):
        ...         self.layer = torch.nn.Linear(2, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch).square().mean()
        ...     def validation_step(self, batch, batch_idx):
        ...         self.log("mean", batch.mean())
        ...     test_step = validation_step
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> run, module = samestep.Run(None, batch_size=4, micro_batch_size=2), Linear()
        >>> values = fit(run, module, torch.ones(8, 2), max_epochs=2)
        >>> [*values]
        ['loss']
        >>> scores = validate(run, module, torch.ones(6, 2)), test(run, module, torch.ones(6, 2))
        >>> scores
        ({'mean': 1.0}, {'mean': 1.0})
    """
    _check(module, monitor, mode, patience)
    if datamodule is None and find_class(train_loader, "LightningDataModule"):
        train_loader, datamodule = None, train_loader
    trainer = Trainer(run, max_epochs, lightning_module=module, datamodule=datamodule)
    _set_up(run, trainer, "fit")
    train_loader = _open(trainer, "train", train_loader)
    val_loader = _open(trainer, "val", val_loader)
    if train_loader is None:
        raise InvalidValue(
            "fit got no training data: pass train_loader or a LightningDataModule, or define train_dataloader",
            code="SS802",
        )
    trainer.num_training_batches = math.ceil(len(getattr(train_loader, "dataset", train_loader)) / run.batch_size)
    trainer.estimated_stepping_batches = max_epochs * trainer.num_training_batches
    logs = _prepare(run, trainer)
    for epoch in run.epochs(train_loader, max_epochs):
        _run_epoch(run, trainer, epoch, logs, gradient_clip_val)
        _log_epoch(run, trainer, epoch, logs, val_loader)
        _step(trainer, "epoch", epoch.number)
        _keep_best(run, trainer, monitor, 1 if mode == "min" else -1, epoch.number, patience)
        if trainer.should_stop:
            run.stop()
    module.on_train_end()
    module.on_fit_end()
    _tear_down(trainer, "fit")
    return dict(trainer.callback_metrics)


def validate(run: Run, module: Any, data: Any = None) -> dict[str, float]:
    """Run `validation_step` on every sample once, after `fit`, and log the averages. Call it on all ranks.

    Args:
        run, module: those of `fit`.
        data: a data set, a DataLoader, or a LightningDataModule. None: as in `fit`.

    Returns:
        The value of each logged name.

    Raises:
        UsageError: `fit` was not called.
        InvalidValue: there are no data.

    Example: see `fit`.
    """
    return _run_stage(run, module, data, "validate")


def test(run: Run, module: Any, data: Any = None) -> dict[str, float]:  # noqa: PT028
    """Run `test_step` on every sample once, after `fit`, and log the averages. Arguments and result as for `validate`.

    To test the best weights, call `run.restore("best")` first.

    Example: see `fit`.
    """
    return _run_stage(run, module, data, "test")


def _run_stage(run: Run, module: Any, data: Any, stage: str) -> dict[str, float]:
    """Validate or test after `fit`."""
    trainer = getattr(module, "_trainer", None)
    if not isinstance(trainer, Trainer):
        raise UsageError(
            f"call fit before {stage}: it restores the weights of the run, and trains if steps are left", code="SS221"
        )
    if find_class(data, "LightningDataModule"):
        data, trainer.datamodule = None, data
    _set_up(run, trainer, stage)
    kind = "val" if stage == "validate" else stage
    if (loader := _open(trainer, kind, data)) is None:
        raise InvalidValue(
            f"{stage} got no data: pass them, or a LightningDataModule with {kind}_dataloader", code="SS802"
        )
    logs = Logs(run, trainer)
    values = _evaluate(run, trainer, "validation" if stage == "validate" else stage, loader, logs)
    run.log(values)
    _tear_down(trainer, stage)
    return logs.show(values)


def _set_up(run: Run, trainer: Trainer, stage: str) -> None:
    """Prepare the data on one rank per host, and call `setup`."""
    own = [] if trainer.datamodule is None else [trainer.datamodule]

    def prepare_data() -> None:
        for owner in (*own, trainer.lightning_module):
            if run.rank == 0 or owner.prepare_data_per_node:
                owner.prepare_data()

    run.once(prepare_data)
    if run.rank > 0 and run.local_rank == 0:
        prepare_data()
    run.once(int)  # wait for all hosts; from here on, the random generators are equal again
    for datamodule in own:
        datamodule.trainer = trainer
        datamodule.setup(stage)
    trainer.lightning_module.setup(stage)


def _tear_down(trainer: Trainer, stage: str) -> None:
    if trainer.datamodule is not None:
        trainer.datamodule.teardown(stage)
    trainer.lightning_module.teardown(stage)


def _open(trainer: Trainer, kind: str, given: Any) -> Any:
    """Return the given data, or those of the data module, or of the module; None if there are none."""
    name = f"{kind}_dataloader"
    base = "LightningModule" if trainer.datamodule is None else "LightningDataModule"
    source = trainer.lightning_module if trainer.datamodule is None else trainer.datamodule
    if given is None and is_replaced(source, name, find_class(source, base)):
        given = getattr(source, name)()
    is_list = isinstance(given, list | tuple) and any(isinstance(each, DataLoader) for each in given)
    if is_list or isinstance(given, Mapping):
        raise InvalidType("several loaders were given: combine their data sets in one", code="SS801")
    return given


def _log_epoch(run: Run, trainer: Trainer, epoch: Any, logs: Logs, val_loader: Any) -> None:
    """Validate after an epoch, and record what the module logged."""
    values = {name: epoch.metrics[of_step] for of_step, name in logs.of_epoch.items()}
    values |= logs.metrics.compute(logs.of_metrics)
    logs.show(values)
    if val_loader is not None:
        values |= _evaluate(run, trainer, "validation", val_loader, logs)
    trainer.lightning_module.on_train_epoch_end()
    values |= logs.take_numbers()
    logs.metrics.reset(logs.of_metrics)
    logs.of_metrics = {}
    logs.show(values)
    if values:
        run.log(values)


def _prepare(run: Run, trainer: Trainer) -> Logs:
    """Call the hooks before the training, and prepare the objects that they create."""
    module = trainer.lightning_module
    module.configure_model()
    logs = Logs(run, trainer)
    optimizer, schedules = _configure(module)
    module.optimizers = lambda use_pl_optimizer=True: optimizer
    named = {f"scheduler{i or ''}": each.scheduler for i, each in enumerate(schedules)}
    if logs.metrics:
        named["metrics"] = logs.metrics
    run.prepare(module=module, optimizer=optimizer, **named)
    trainer.optimizers = [optimizer]
    trainer.lr_scheduler_configs = schedules
    module.on_fit_start()
    module.on_train_start()
    return logs


def find_class(thing: Any, name: str) -> Any:
    """Return the class of this name that an object is an instance of; None if there is none."""
    return next((each for each in type(thing).__mro__ if each.__name__ == name), None)


def is_replaced(thing: Any, method: str, base: type) -> bool:
    """Return whether an object, or its class, replaces a method of the class `base`."""
    return method in vars(thing) or getattr(type(thing), method) is not getattr(base, method)


def _check(module: Any, monitor: str | None, mode: str, patience: int | None) -> None:
    of_lightning = find_class(module, "LightningModule")
    if of_lightning is None:
        raise InvalidType(f"fit needs a LightningModule, not a {type(module).__name__}", code="SS102")
    if replaced := [each for each in NOT_CALLED if is_replaced(module, each, of_lightning)]:
        raise InvalidValue(
            f"{type(module).__name__} replaces {' and '.join(replaced)} of Lightning's loop, which fit does not call",
            code="SS801",
        )
    if mode not in ("min", "max"):
        raise InvalidValue(f"mode must be min or max, not {mode!r}", code="SS101")
    if patience is not None and monitor is None:
        raise InvalidValue("patience needs monitor, the name of a logged value", code="SS104")


def _configure(module: Any) -> tuple[torch.optim.Optimizer, list[LightningSchedule]]:
    """Return the optimizer and schedules from the result of `configure_optimizers`, in any of its forms."""
    if not module.automatic_optimization:
        raise InvalidValue(
            f"{type(module).__name__} sets automatic_optimization = False, and fit updates once per step: write the "
            "loop with samestep.Run, in which a step may have several passes and optimizers",
            code="SS801",
        )
    given = module.configure_optimizers()
    if isinstance(given, list | tuple) and len(given) == 2 and isinstance(given[0], list | tuple):
        optimizers, schedulers = given
    else:
        each = given if isinstance(given, list | tuple) else [given]
        optimizers = [one["optimizer"] if isinstance(one, Mapping) else one for one in each]
        schedulers = [one["lr_scheduler"] for one in each if isinstance(one, Mapping) and "lr_scheduler" in one]
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        what = f"a {type(optimizers[0]).__name__}" if len(optimizers) == 1 else f"{len(optimizers)} optimizers"
        raise InvalidValue(
            f"configure_optimizers must return one optimizer, with its schedulers, not {what}: for several, write the "
            "loop with samestep.Run",
            code="SS801",
        )
    return optimizers[0], [
        LightningSchedule(**each) if isinstance(each, Mapping) else LightningSchedule(each)
        for each in (schedulers if isinstance(schedulers, list | tuple) else [schedulers])
    ]


def _step(trainer: Trainer, interval: str, number: int) -> None:
    """Step the schedules of an interval after the step or epoch of this number, where they are due."""
    for schedule in trainer.lr_scheduler_configs:
        if schedule.interval == interval and (number + 1) % schedule.frequency == 0:
            schedule.step(trainer.callback_metrics)


def _run_epoch(run: Run, trainer: Trainer, epoch: Any, logs: Logs, gradient_clip_val: float | None) -> None:
    """Train on the steps of an epoch."""
    module = trainer.lightning_module
    (optimizer,) = trainer.optimizers
    trainer.current_epoch = epoch.number
    trainer.training = True
    module.on_train_epoch_start()
    for step in epoch:
        trainer.global_step = step.number
        logs.metrics.set_aside()
        logs.step_of = TRAINING
        states = {}
        for batch in step:
            states[step.micro_batch] = _run_micro_batch(run, trainer, step, batch, logs)
        logs.step_of = ""
        if logs.metrics:
            values, of_epoch = logs.metrics.fold(step.gather(states))
            logs.of_metrics |= of_epoch
            step.log(values)
        module.on_after_backward()
        module.on_before_optimizer_step(optimizer)
        if gradient_clip_val is not None:
            run.clip_grad_norm_(module.parameters(), gradient_clip_val)
        optimizer.step()
        logs.show(step.metrics)
        _step(trainer, "step", step.number)
    trainer.global_step = run.steps_done
    trainer.training = False


def _run_micro_batch(run: Run, trainer: Trainer, step: Any, batch: Any, logs: Logs) -> list[Any]:
    """Run `training_step` and the backward pass. Returns the states of the metrics."""
    module = trainer.lightning_module
    module.on_train_batch_start(batch, step.number)
    with run.autocast():
        output = module.training_step(batch, step.number)
    loss = output["loss"] if isinstance(output, Mapping) else output
    if loss is not None:  # the module leaves this micro-batch out
        module.on_before_backward(loss)
        step.backward(loss)
    module.on_train_batch_end(output, batch, step.number)
    step.log({name: value for name, (value, _) in logs.take().items()})
    return logs.metrics.take()


def _evaluate(run: Run, trainer: Trainer, kind: str, loader: Any, logs: Logs) -> dict[str, float]:
    """Run `validation_step` or `test_step` on every sample once. Returns the averages of what it logs.

    Args:
        kind: "validation" or "test".
    """
    module = trainer.lightning_module
    metrics = logs.metrics
    setattr(trainer, FLAGS[kind], True)
    getattr(module, f"on_{kind}_start")()
    getattr(module, f"on_{kind}_epoch_start")()
    metrics.set_aside()
    numbers = count()  # of this rank: other ranks have different micro-batches

    def score(batch: Any) -> dict[str, Any]:
        number = next(numbers)
        getattr(module, f"on_{kind}_batch_start")(batch, number)
        with run.autocast():
            output = getattr(module, f"{kind}_step")(batch, number)
        getattr(module, f"on_{kind}_batch_end")(output, batch, number)
        scores: dict[str, Any] = {
            name: value if size is None else (value, size) for name, (value, size) in logs.take().items()
        }
        if metrics:
            scores[OF_METRICS] = PerMicroBatch(metrics.take())
        return scores

    logs.step_of = "evaluation"
    values: dict[str, Any] = run.evaluate(score, loader)
    logs.step_of = ""
    _, of_metrics = metrics.fold(values.pop(OF_METRICS, []))
    values |= metrics.compute(of_metrics)
    logs.show(values)
    getattr(module, f"on_{kind}_epoch_end")()
    values |= logs.take_numbers()
    metrics.reset(of_metrics)
    logs.show(values)
    getattr(module, f"on_{kind}_end")()
    setattr(trainer, FLAGS[kind], False)
    return values


def _keep_best(run: Run, trainer: Trainer, monitor: str | None, sign: int, epoch: int, patience: int | None) -> None:
    """Take the snapshot "best" if this epoch is the best so far, and end the run after `patience` worse epochs."""
    if monitor is None:
        return
    if monitor not in trainer.callback_metrics:
        raise InvalidValue(
            f"monitor is {monitor}, which the module has not logged: there are "
            f"{', '.join(sorted(trainer.callback_metrics)) or 'no values'}",
            code="SS803",
        )
    value = sign * trainer.callback_metrics[monitor]
    best, at = run.state.get("best", [math.inf, epoch])
    if value < best:
        run.state["best"] = [value, epoch]
        run.snapshot("best")
    elif patience is not None and epoch - at >= patience:
        trainer.should_stop = True
