"""Trains a model of Hugging Face's transformers with a samestep run, in place of transformers' Trainer."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from samestep import InvalidType, InvalidValue, MissingPackage, Run
from samestep.console import hide_secrets
from samestep.train.stopping import report_errors
from samestep.world.environment import advise, hide_launcher, read_rank

try:
    import transformers
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_pt_utils import LabelSmoother
    from transformers.trainer_utils import PredictionOutput, RemoveColumnsCollator, TrainOutput, unwrap_peft_model
    from transformers.utils.generic import find_labels
except ImportError as error:
    report_errors(read_rank())
    raise MissingPackage(f"{error}: pip install 'samestep[transformers]'") from None

__all__ = ["Trainer", "TrainingArguments"]

# Fields of transformers' TrainingArguments that have the same effect here.
SUPPORTED = """
    output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps learning_rate
    lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args weight_decay adam_beta1 adam_beta2
    adam_epsilon max_grad_norm label_smoothing_factor bf16 fp16 tf32 activation_checkpointing
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile
    torch_compile_backend torch_compile_mode use_cache logging_strategy logging_steps report_to eval_strategy
    eval_steps per_device_eval_batch_size prediction_loss_only save_strategy save_steps save_total_limit
    load_best_model_at_end metric_for_best_model greater_is_better full_determinism seed use_cpu dataloader_drop_last
    dataloader_num_workers dataloader_pin_memory remove_unused_columns label_names train_sampling_strategy
    do_train do_eval do_predict local_rank resume_from_checkpoint
"""
# Events of a callback that the Trainer does not have.
NOT_CALLED = ("on_prediction_step", "on_push_begin", "on_save", "on_substep_end")
# Fields that change neither the training nor its results, or that request what a run does in any case.
WITHOUT_EFFECT = """
    torch_empty_cache_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica
    disable_tqdm run_name project eval_use_gather_object eval_accumulation_steps save_on_each_node enable_jit_checkpoint
    dataloader_persistent_workers dataloader_prefetch_factor length_column_name ddp_find_unused_parameters
    ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
"""


class TrainingArguments(transformers.TrainingArguments):  # type: ignore[misc]
    """Like `transformers.TrainingArguments`. It creates the run, so create it before the model.

    The batch of a step does not grow with the number of ranks: it has `per_device_train_batch_size *
    gradient_accumulation_steps` samples, in micro-batches of `per_device_train_batch_size`, so that up to
    `gradient_accumulation_steps` ranks share a step. `output_dir` is the run directory. `save_steps`,
    `save_total_limit` and `logging_steps` set the intervals of snapshots and of rows in `metrics.jsonl`, `report_to`
    the trackers. Options of the command line such as `--batch-size` replace them, as in every run.

    Attributes:
        run: the `samestep.Run`.

    Raises:
        InvalidValue: a field is set that has no equivalent here, such as `fsdp`. A field that merely has no effect,
            such as `ddp_timeout`, causes a warning.

    Example::

        >>> from samestep.adapters.transformers import TrainingArguments
        >>> args = TrainingArguments("runs/x", per_device_train_batch_size=2, gradient_accumulation_steps=4)
        >>> args.run.batch_size, args.run.micro_batch_size
        (8, 2)
    """

    def __post_init__(self) -> None:
        report_errors(read_rank())
        given = {}
        for field in dataclasses.fields(self):
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            if (value := getattr(self, field.name)) != default:
                given[field.name] = value
        if refused := [name for name in given if name not in (SUPPORTED + WITHOUT_EFFECT).split()]:
            shown = ", ".join(f"{name}={hide_secrets(given[name], name)!r}" for name in refused)
            raise InvalidValue(
                f"TrainingArguments has {shown}, which "
                "samestep.adapters.transformers does not support: leave it out, or write the loop with samestep.Run",
                code="SS801",
            )
        with hide_launcher():  # accelerate would create another process group
            super().__post_init__()
        for name in ("logging_steps", "eval_steps", "save_steps"):
            if 0 < (value := getattr(self, name) or 0) < 1:
                raise InvalidValue(f"{name} is {value}, a share of the training: give a number of steps", code="SS801")
        if self.train_sampling_strategy not in ("random", "sequential"):
            raise InvalidValue(
                f"train_sampling_strategy is {self.train_sampling_strategy}: give random or sequential", code="SS801"
            )
        logged: dict[str, int | str] = {"steps": int(self.logging_steps), "epoch": "1epochs", "no": "1000000epochs"}
        saved: dict[str, int | str] = {"steps": int(self.save_steps), "epoch": "1epochs"}
        self.run = Run(
            self.output_dir,
            batch_size=self.per_device_train_batch_size * self.gradient_accumulation_steps,
            micro_batch_size=self.per_device_train_batch_size,
            seed=self.seed,
            log_every=logged[self.logging_strategy],
            precision=next((name for name in ("bf16", "fp16", "tf32") if getattr(self, name)), "fp32"),
            snapshot_every=saved.get(self.save_strategy),
            device="cpu" if self.use_cpu else None,
            config={"transformers": {name: str(value) for name, value in given.items()}},
            keep_last=self.save_total_limit or 3,
            trackers=self.report_to,
        )
        self.check_checkpoint(self.resume_from_checkpoint)
        if idle := [name for name in given if name in WITHOUT_EFFECT.split()]:
            self.run.print(f"warning: these fields of TrainingArguments have no effect here: {', '.join(idle)}")

    def check_checkpoint(self, path: str | bool | None) -> None:
        """Raise InvalidValue if `path` is not the run directory, from which the run resumes in any case."""
        known = {Path(each).absolute() for each in (self.output_dir, self.run.dir) if each is not None}
        if isinstance(path, bool | None) or path == self.output_dir or Path(path).absolute() in known:
            return
        raise InvalidValue(
            f"resume_from_checkpoint is {path}, and the run directory is {self.output_dir}: give True, or leave it "
            "out, since a run resumes from its newest snapshot; to resume from another one, start with "
            f"{advise(resume='STEP')}",
            code="SS104",
        )


@dataclasses.dataclass
class Collator:
    """Collates samples to (batch, number of labels that count), in a worker process where there are any.

    Args:
        shifts: whether the model's loss leaves out the first label of a row, as causal language models do.
    """

    collate: Callable[[list[Any]], Any]
    shifts: bool

    def __call__(self, samples: list[Any]) -> tuple[Any, int]:
        batch = self.collate(samples)
        labels = batch.get("shift_labels", batch.get("labels"))
        if self.shifts and isinstance(labels, Tensor) and "shift_labels" not in batch:
            labels = labels[..., 1:]
        return batch, int(labels.ne(-100).sum()) if isinstance(labels, Tensor) else len(samples)


class Trainer:
    """Like `transformers.Trainer`, with the promises of a run: the same bits at any number of ranks and after a resume.

    The loss of a step is the mean over all labels of the whole batch other than -100, on all ranks. transformers'
    Trainer computes the same for models that use `num_items_in_batch`, or on one device without accumulation; otherwise
    it averages the means of micro-batches.
    `eval_loss` is also the mean over all such labels, while transformers averages the means of batches. A batch without
    `labels` is weighted by its number of samples.

    A started script resumes automatically. `optimizers`, `compute_loss_func`, `preprocess_logits_for_metrics` and the
    other arguments have the same meaning as in transformers. Subclasses may replace `compute_loss`, `create_optimizer`
    and `create_scheduler`. Metrics are in `metrics.jsonl` of the run directory and in the trackers.

    Args:
        model: built after `args`, or pass `model_init`, a function that builds it.
        args: `samestep.adapters.transformers.TrainingArguments`.
        data_collator: default: as in transformers, with padding if `processing_class` is a tokenizer.
        train_dataset, eval_dataset: map-style data sets, `eval_dataset` also a dict of them.
        processing_class: tokenizer or image processor, saved with the model.
        compute_metrics: called once, on rank 0, with the predictions for the whole data set.
        callbacks: objects or classes of `transformers.TrainerCallback`, called on every rank with transformers'
            `TrainerState` and `TrainerControl`. What rank 0 sets in `control` applies to all ranks. Of its flags,
            `should_training_stop` and `should_evaluate` have an effect. `state.log_history` begins at this start.

    Raises:
        InvalidType: `args` is a `transformers.TrainingArguments`, or a callback has events that do not occur here, such
            as `on_save`.

    Example::

        >>> import transformers
        >>> from samestep.adapters.transformers import Trainer, TrainingArguments
        >>> args = TrainingArguments("runs/x", max_steps=3, per_device_train_batch_size=4)
        >>> config = transformers.GPT2Config(vocab_size=16, n_positions=4, n_embd=8, n_layer=1, n_head=1)
        >>> model = transformers.GPT2LMHeadModel(config)  # or AutoModelForCausalLM.from_pretrained("gpt2")
        >>> train = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
        >>> done = Trainer(model, args, train_dataset=train).train()
        >>> done.global_step
        3
    """

    create_optimizer = transformers.Trainer.create_optimizer
    create_scheduler = transformers.Trainer.create_scheduler
    get_decay_parameter_names = transformers.Trainer.get_decay_parameter_names
    get_optimizer_cls_and_kwargs = staticmethod(transformers.Trainer.get_optimizer_cls_and_kwargs)

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], Any] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        if not isinstance(args, TrainingArguments):
            raise InvalidType(
                f"Trainer got args of {type(args).__module__}.{type(args).__name__}: create "
                "samestep.adapters.transformers.TrainingArguments, before the model",
                code="SS102",
            )
        if (model is None) == (model_init is None):
            raise InvalidValue(
                "Trainer needs either model, built after the TrainingArguments, or model_init", code="SS802"
            )
        self.callbacks = [_check_callback(each() if isinstance(each, type) else each) for each in callbacks or ()]
        self.state = transformers.TrainerState()
        self.control = transformers.TrainerControl()
        self.model = model_init() if model is None and model_init is not None else model
        self.args = args
        self.run = args.run
        self.processing_class = processing_class
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        base = unwrap_peft_model(self.model)
        self.label_names = find_labels(type(base)) if args.label_names is None else args.label_names
        config = getattr(base, "config", None)
        loss = LOSS_MAPPING.get(getattr(base, "loss_type", None))
        is_causal = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        shifts = is_causal or (loss is ForCausalLMLoss and not getattr(config, "is_encoder_decoder", False))
        smoother = LabelSmoother(args.label_smoothing_factor) if args.label_smoothing_factor else None
        self.smooth_loss = smoother and partial(smoother, shift_labels=is_causal)
        if config is not None:
            self.model.config.use_cache = args.use_cache
        if args.activation_checkpointing:
            self.model.activation_checkpointing_enable(args.activation_checkpointing_kwargs)
        if data_collator is None:
            kinds = transformers.PreTrainedTokenizerBase, transformers.SequenceFeatureExtractor
            data_collator = transformers.default_data_collator
            if isinstance(processing_class, kinds):
                data_collator = transformers.DataCollatorWithPadding(processing_class)
        if args.remove_unused_columns:
            wanted = [*signature(base.forward).parameters, "label", "label_ids", *self.label_names]
            data_collator = RemoveColumnsCollator(data_collator, wanted)
        self.collator = Collator(data_collator, shifts)
        self._prepare()

    def _prepare(self) -> None:
        """Create the optimizer and the schedule for the training data, and restore the state from a snapshot."""
        objects = {"model": self.model}
        if self.train_dataset is not None:
            whole, rest = divmod(len(self.train_dataset), self.run.batch_size)
            self.steps_per_epoch = per_epoch = max(1, whole + (rest > 0 and not self.args.dataloader_drop_last))
            num_steps = math.ceil(self.args.num_train_epochs * per_epoch)
            if self.args.max_steps > 0:
                num_steps = self.args.max_steps
            objects["optimizer"] = self.create_optimizer()
            objects["scheduler"] = self.create_scheduler(num_steps)
            self.state = transformers.TrainerState(
                max_steps=num_steps,
                num_train_epochs=math.ceil(num_steps / per_epoch),
                logging_steps=self.args.logging_steps,
                eval_steps=self.args.eval_steps,
                save_steps=self.args.save_steps,
                is_local_process_zero=self.run.local_rank == 0,
                is_world_process_zero=self.run.rank == 0,
            )
        for i, callback in enumerate(self.callbacks):
            if isinstance(callback, ExportableState):
                objects[f"callback{i}"] = CallbackState(callback)
        self.run.prepare(**objects)
        options = {"backend": self.args.torch_compile_backend, "mode": self.args.torch_compile_mode}
        self._forward = torch.compile(self.model, **options) if self.args.torch_compile else self.model
        self._call("on_init_end")

    def train(self, resume_from_checkpoint: str | bool | None = None) -> Any:
        """Train from the newest snapshot to the end. Returns transformers' `TrainOutput`.

        Its `training_loss` is the average over the last epoch.

        Args:
            resume_from_checkpoint: changes nothing: the run resumes from its newest snapshot, if there is one.

        Raises:
            InvalidValue: `resume_from_checkpoint` is a path other than the run directory, or there are no data.
        """
        if self.train_dataset is None:
            raise InvalidValue("Trainer.train needs train_dataset", code="SS802")
        args = self.args
        run = self.run
        args.check_checkpoint(resume_from_checkpoint)
        self._follow(run.steps_done)
        self.state.best_metric = run.state.get("best")
        self._call("on_train_begin")
        self.model.train()
        for epoch in run.epochs(
            self.train_dataset,
            self.state.num_train_epochs,
            collate_fn=self.collator,
            num_workers=args.dataloader_num_workers,
            shuffle=args.train_sampling_strategy == "random",
            drop_last=args.dataloader_drop_last,
            pin_memory=args.dataloader_pin_memory,
        ):
            self._call("on_epoch_begin")
            for step in epoch:
                self._call("on_step_begin")
                for batch, num_labels in step:
                    if num_labels:
                        with run.autocast():
                            loss = self.compute_loss(self._forward, batch, num_items_in_batch=num_labels)
                        step.backward(loss, weight=num_labels)
                if args.max_grad_norm > 0:
                    step.log(grad_norm=run.clip_grad_norm_(self.model.parameters(), args.max_grad_norm))
                self._call("on_pre_optimizer_step")
                self.optimizer.step()
                self._call("on_optimizer_step")
                if not isinstance(self.lr_scheduler, ReduceLROnPlateau):
                    self.lr_scheduler.step()
                num_steps = step.number + 1
                self._follow(num_steps)
                self._call("on_step_end")
                if args.logging_strategy == "steps" and num_steps % int(args.logging_steps) == 0:
                    self._log_training(step.metrics)
                if args.eval_strategy == "steps" and num_steps % args.eval_steps == 0:
                    self._validate()
                self._obey()
                if num_steps == self.state.max_steps < self.state.num_train_epochs * epoch.num_steps:
                    run.stop(f"{self.state.max_steps} steps")
            run.state["training_loss"] = epoch.metrics["loss"]
            if run.steps_done == self.state.max_steps or run.steps_done % epoch.num_steps == 0:
                self._call("on_epoch_end")
                if args.logging_strategy == "epoch":
                    self._log_training(epoch.metrics)
                if args.eval_strategy == "epoch":
                    self._validate()
                self._obey()
        self._call("on_train_end")
        if args.load_best_model_at_end and "best" in run.state:
            run.restore("best")
        loss = run.state.get("training_loss", math.nan)
        return TrainOutput(run.steps_done, loss, {"train_loss": loss})

    def _call(self, event: str, **arguments: Any) -> None:
        """Call an event of the callbacks."""
        for callback in self.callbacks:
            control = getattr(callback, event)(
                self.args,
                self.state,
                self.control,
                model=self.model,
                processing_class=self.processing_class,
                optimizer=self.optimizer,
                lr_scheduler=self.lr_scheduler,
                train_dataloader=None,
                eval_dataloader=None,
                **arguments,
            )
            self.control = control or self.control

    def _follow(self, num_steps: int) -> None:
        """Set the position in the state of the callbacks."""
        self.state.global_step = num_steps
        self.state.epoch = num_steps / self.steps_per_epoch

    def _log_training(self, metrics: Mapping[str, float]) -> None:
        self._log({**metrics, "learning_rate": self.optimizer.param_groups[0]["lr"]})

    def _log(self, values: Mapping[str, float]) -> None:
        """Give the callbacks the values that the run writes to `metrics.jsonl`."""
        logs = {**values, "epoch": self.state.epoch}
        self.state.log_history.append(logs | {"step": self.state.global_step})
        self._call("on_log", logs=logs)

    def _obey(self) -> None:
        """Do what the callbacks have set in `control` on rank 0, on all ranks."""
        if not self.callbacks:
            return
        flags = self.run.once(dataclasses.asdict, self.control)
        self.control = transformers.TrainerControl()
        if ignored := [name for name in ("should_epoch_stop", "should_save") if flags[name]]:
            raise InvalidValue(
                f"a callback has set control.{ignored[0]}, which has no effect here: the run takes snapshots by "
                "save_steps, and its epochs are whole",
                code="SS801",
            )
        if flags["should_training_stop"]:
            self.run.stop("a callback set control.should_training_stop")
        if flags["should_evaluate"]:
            self._validate()
            self._obey()

    def _validate(self) -> None:
        """Evaluate, and keep the best snapshot."""
        metrics = self.evaluate()
        args = self.args
        state = self.run.state
        if args.metric_for_best_model is None:
            return
        name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        if name not in metrics:
            raise InvalidValue(
                f"metric_for_best_model is {name}, which is none of the metrics: {', '.join(metrics)}", code="SS803"
            )
        if isinstance(self.lr_scheduler, ReduceLROnPlateau):
            self.lr_scheduler.step(metrics[name])
        sign = 1 if args.greater_is_better else -1
        if "best" not in state or sign * metrics[name] > sign * state["best"]:
            state["best"] = self.state.best_metric = metrics[name]
            self.state.best_global_step = self.state.global_step
            self.run.snapshot("best")

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: int | None = None
    ) -> Any:
        """As in transformers: the loss that the model returns, or that of label smoothing or `compute_loss_func`.

        Args:
            num_items_in_batch: number of labels in this micro-batch, over which the loss is a mean.
        """
        inputs = dict(inputs)
        labels = None
        if self.smooth_loss is not None or self.compute_loss_func is not None:
            labels = inputs.pop("labels", None)
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif self.smooth_loss is not None and labels is not None:
            loss = self.smooth_loss(outputs, labels)
        elif not isinstance(outputs, dict) or outputs.get("loss") is not None:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        else:
            raise InvalidValue(
                f"{type(self.model).__name__} returned no loss for {', '.join(inputs)}, only {', '.join(outputs)}: "
                "pass labels, or replace compute_loss",
                code="SS801",
            )
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Score every sample once, over all ranks. Returns and logs the loss and the result of `compute_metrics`."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if data is None:
            raise InvalidValue("Trainer.evaluate needs eval_dataset", code="SS802")
        if isinstance(data, dict):
            names = [(each, f"{metric_key_prefix}_{name}") for name, each in data.items()]
            return {name: value for pair in names for name, value in self.evaluate(*pair).items()}
        loss_only = self.args.prediction_loss_only or not self.compute_metrics
        metrics: dict[str, float] = self._predict(data, metric_key_prefix, loss_only).metrics
        self.run.log(metrics)
        self._log(metrics)
        self._call("on_evaluate", metrics=metrics)
        return metrics

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> Any:
        """Return transformers' `PredictionOutput` for every sample, in the order of the data set, on all ranks."""
        return self._predict(test_dataset, metric_key_prefix, self.args.prediction_loss_only)

    def _predict(self, data: Any, prefix: str, loss_only: bool) -> Any:
        """Return a `PredictionOutput`. `loss_only`: without predictions and labels."""
        config = getattr(self.model, "config", None)
        ignored = ["loss", *getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])]

        def score(collated: tuple[Any, int]) -> dict[str, Any]:
            batch, num_labels = collated
            labels = [batch[name] for name in self.label_names if batch.get(name) is not None]
            with self.run.autocast():
                if labels:
                    loss, outputs = self.compute_loss(self._forward, batch, True, num_labels)
                else:
                    outputs = self._forward(**batch)
            scores: dict[str, Any] = {"loss": (loss if num_labels else 0.0, num_labels)} if labels else {}
            if loss_only:
                return scores
            logits = [v for name, v in outputs.items() if name not in ignored and isinstance(v, Tensor)]
            if self.preprocess_logits_for_metrics is not None:
                kept = self.preprocess_logits_for_metrics(_unpack(logits), _unpack(labels))
                logits = list(kept) if isinstance(kept, tuple | list) else [kept]
            for name, tensors in (("logits", logits), ("labels", labels)):
                for i, tensor in enumerate(tensors):
                    values = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
                    scores[f"{name}{i}"] = list(values.cpu().numpy())
            return scores

        scores = self.run.evaluate(
            score,
            data,
            collate_fn=self.collator,
            num_workers=self.args.dataloader_num_workers,
            micro_batch_size=self.args.per_device_eval_batch_size,
        )
        metrics = {f"{prefix}_loss": scores["loss"]} if "loss" in scores else {}
        logits = _unpack([_pad(value) for name, value in scores.items() if name.startswith("logits")])
        labels = _unpack([_pad(value) for name, value in scores.items() if name.startswith("labels")])
        if self.compute_metrics is not None and logits is not None and labels is not None:
            computed = self.run.once(self.compute_metrics, transformers.EvalPrediction(logits, labels))
            metrics |= {n if n.startswith(f"{prefix}_") else f"{prefix}_{n}": float(v) for n, v in computed.items()}
        return PredictionOutput(logits, labels, metrics)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model, and the tokenizer if there is one, for `from_pretrained`. Call it on all ranks.

        Args:
            output_dir: default: the run directory, as in transformers.

        Raises:
            InvalidType: the model has no `save_pretrained`; `samestep export` writes the weights of any model.
        """
        if not hasattr(self.model, "save_pretrained"):
            raise InvalidType(
                f"{type(self.model).__name__} has no save_pretrained: write its weights, samestep export", code="SS801"
            )
        directory = self.run.dir if output_dir is None else output_dir
        things = [each for each in (self.model, self.processing_class) if each is not None]
        self.run.once(_save, things, directory)


@dataclasses.dataclass
class CallbackState:
    """The state of a callback of transformers, for snapshots."""

    callback: Any

    def state_dict(self) -> Any:
        """Return the attributes that the callback exports."""
        return self.callback.state().get("attributes", {})

    def load_state_dict(self, attributes: Mapping[str, Any]) -> None:
        """Set the attributes."""
        for name, value in attributes.items():
            setattr(self.callback, name, value)


def _check_callback(callback: Any) -> Any:
    if not isinstance(callback, transformers.TrainerCallback):
        raise InvalidType(
            f"callbacks has a {type(callback).__name__}, which is no transformers.TrainerCallback", code="SS102"
        )
    kind = type(callback)
    base = transformers.TrainerCallback
    if missed := [event for event in NOT_CALLED if getattr(kind, event) is not getattr(base, event)]:
        raise InvalidType(
            f"callbacks has {kind.__name__} with {' and '.join(missed)}, which the Trainer does not call: remove it "
            "and use report_to for trackers and save_steps for snapshots",
            code="SS801",
        )
    return callback


def _save(things: Sequence[Any], directory: Any) -> None:
    for each in things:
        each.save_pretrained(directory)


def _unpack(values: list[Any]) -> Any:
    """Return None for no value, the value itself for one, and a tuple for several, as transformers does."""
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


def _pad(arrays: list[Any]) -> Any:
    """Stack arrays of different lengths, padded with -100."""
    shape = [max(sizes) for sizes in zip(*(np.shape(array) for array in arrays), strict=True)]
    stacked: Any = np.full((len(arrays), *shape), -100, dtype=np.asarray(arrays[0]).dtype)
    for i, array in enumerate(arrays):
        stacked[(i, *(slice(size) for size in np.shape(array)))] = array
    return stacked
