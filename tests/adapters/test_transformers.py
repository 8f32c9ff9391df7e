"""Models of transformers trained by samestep: each step equals that of its Trainer, at any number of ranks."""

import copy
import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runs import digest, read_rows

import samestep

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

KINDS = ("bert", "gpt2", "t5", "vit", "lora")
NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 22, 8, 2  # the last step of an epoch is short
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def build_model(kind: str, dropout: float = 0.0) -> Any:
    """A random model of a few thousand parameters."""
    if kind == "bert":
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        return hf.BertForMaskedLM(hf.BertConfig(**SIZES, **rates, intermediate_size=32, max_position_embeddings=16))
    if kind in ("gpt2", "lora"):
        rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))
        if kind == "lora":
            settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True)
            model = peft.get_peft_model(model, settings)
        return model
    if kind == "t5":
        sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, dropout_rate=dropout, decoder_start_token_id=0))
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    sizes |= {"image_size": 8, "patch_size": 4, "num_labels": 3, "intermediate_size": 32}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, hidden_dropout_prob=dropout))


def build_data(kind: str, num: int, seed: int) -> list[dict[str, Any]]:
    """Random samples whose numbers of labels differ, and a column that no model takes."""
    generator = np.random.default_rng(seed)
    if kind == "vit":
        images = generator.standard_normal((num, 3, 8, 8)).astype(np.float32)
        return [{"pixel_values": image, "labels": i % 3, "name": f"image {i}"} for i, image in enumerate(images)]
    samples = []
    for i, tokens in enumerate(generator.integers(1, 40, (num, 12))):
        labels = np.where(np.arange(12) < 2 + i % 9, tokens, -100)
        labels[0] = -100  # which a causal model leaves out, and transformers 5.23 counts for GPT-2
        samples.append({"input_ids": tokens, "attention_mask": np.ones(12, int), "labels": labels, "name": f"text {i}"})
    return samples


def score(predictions: Any) -> dict[str, float]:
    logits, labels = predictions.predictions, predictions.label_ids
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"accuracy": float((logits.argmax(-1) == labels).mean()), "num": len(labels)}


FIELDS: dict[str, Any] = {
    "num_train_epochs": NUM_EPOCHS, "learning_rate": 3e-3, "weight_decay": 0.1, "warmup_steps": 2, "logging_steps": 1,
    "lr_scheduler_type": "cosine", "max_grad_norm": 0.5, "use_cpu": True, "train_sampling_strategy": "sequential",
    "per_device_eval_batch_size": 4, "report_to": "none",
}  # fmt: skip


def build_recorder() -> Any:
    """A callback that records its events, with the position, the control flow and the names of values."""
    class Recorder(hf.TrainerCallback):
        def __init__(self) -> None:
            self.events: list[Any] = []

    def record(event: str) -> Any:
        def call(self: Any, args: Any, state: Any, control: Any, **given: Any) -> None:
            values = {*(given.get("logs") or {}), *(given.get("metrics") or {})} & {"loss", "eval_loss", "grad_norm"}
            if event != "on_log" or values:  # transformers logs the time at the end
                place = (state.global_step, round(state.epoch or 0, 6), state.max_steps, state.num_train_epochs)
                self.events.append((event, *place, sorted(values), given["optimizer"] is not None))

        return call

    for event in EVENTS:
        setattr(Recorder, event, record(event))
    return Recorder()


EVENTS = (
    "on_train_begin", "on_epoch_begin", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end",
    "on_log", "on_evaluate", "on_epoch_end", "on_train_end",
)  # fmt: skip


def train_with_both(kind: str, directory: Path, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train copies of one model in one rank. Returns the results of transformers and of samestep."""
    from samestep.adapters.transformers import Trainer, TrainingArguments

    fields = FIELDS | {"save_strategy": "no", "eval_strategy": "epoch"} | fields
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": BATCH_SIZE // 2}
    args = TrainingArguments(directory / f"{len([*directory.iterdir()])}", **fields, **split)
    model = build_model(kind)
    start = copy.deepcopy(model)
    data = {"train_dataset": build_data(kind, NUM_SAMPLES, 0), "eval_dataset": build_data(kind, 8, 1)}
    recorders = [build_recorder(), build_recorder()]
    trainer = Trainer(model, args, compute_metrics=score, callbacks=recorders[:1], **data)
    trainer.train(resume_from_checkpoint=True)
    found = collect(trainer, read_rows(args.run.dir), "train/", recorders[0])

    for name in [name for name in os.environ if name.endswith(("RANK", "WORLD_SIZE"))]:
        del os.environ[name]
    args = hf.TrainingArguments(directory / "theirs", **fields, per_device_train_batch_size=BATCH_SIZE)
    theirs = hf.Trainer(start, args, compute_metrics=score, callbacks=recorders[1:], **data)
    theirs.remove_callback(hf.PrinterCallback)
    theirs.remove_callback(hf.ProgressCallback)
    theirs.train()
    return collect(theirs, theirs.state.log_history, "", recorders[1]), found


def collect(trainer: Any, rows: list[dict[str, Any]], prefix: str, recorder: Any) -> dict[str, Any]:
    """Return the results of a Trainer. `rows`: those with the numbers of its steps, whose names have this prefix."""
    return {
        "losses": [row[f"{prefix}loss"] for row in rows if f"{prefix}loss" in row],
        "norms": [row[f"{prefix}grad_norm"] for row in rows if f"{prefix}grad_norm" in row],
        # The rows of a run lack an evaluation in the middle of an epoch: if it is continued, it evaluates at the end.
        "metrics": [row["eval_accuracy"] for row in trainer.state.log_history if "eval_accuracy" in row],
        "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
        "predictions": trainer.predict(trainer.eval_dataset),
        "events": recorder.events,
    }


def compare_all(directory: Path) -> dict[str, Any]:
    results = {kind: train_with_both(kind, directory) for kind in KINDS}
    results["smoothing"] = train_with_both("gpt2", directory, label_smoothing_factor=0.1)
    results["max_steps"] = train_with_both("gpt2", directory, max_steps=4)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything that needs transformers in one rank, because importing it takes seconds."""
    return samestep.spawn(compare_all, 1, (tmp_path_factory.mktemp("runs"),))


@pytest.mark.parametrize("case", [*KINDS, "smoothing", "max_steps"])
def test_as_transformers_itself(results: dict[str, Any], case: str) -> None:
    wanted, found = results[case]
    assert len(found["losses"]) == (4 if case == "max_steps" else NUM_EPOCHS * 3)
    assert len(found["events"]) > 20
    assert found["events"] == wanted["events"]
    for name in ("losses", "norms", "metrics"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4), name
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)
    for theirs, ours in zip(wanted["predictions"][:2], found["predictions"][:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def build_tokenizer() -> Any:
    import tokenizers
    words = {word: i for i, word in enumerate(["[PAD]", "[MASK]", "[UNK]", *(f"w{i}" for i in range(37))])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=model, **special)


def train(kind: str, directory: Path) -> tuple[float, dict[str, Any], Any]:
    """Train with dropout, masked words and workers. Returns (loss, metrics, names of the files that are saved)."""
    from samestep.adapters.transformers import Trainer, TrainingArguments

    fields = FIELDS | {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "train_sampling_strategy": "random",
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "metric_for_best_model": "loss", "load_best_model_at_end": True, "num_train_epochs": 1.5, "save_total_limit": 2,
    }  # fmt: skip
    args = TrainingArguments(directory, **fields)
    model = build_model(kind, dropout=0.2)
    options: dict[str, Any] = {}
    train_data, held_out = build_data(kind, NUM_SAMPLES, 0), build_data(kind, 9, 1)
    if kind in ("bert", "t5"):
        tokenizer = build_tokenizer()
        texts = [{"text": " ".join(f"w{j * i % 37}" for j in range(4 + i % 5))} for i in range(NUM_SAMPLES)]
        if kind == "t5":  # the first words, reversed: their length differs from that of the inputs
            texts = [row | {"text_target": " ".join(row["text"].split()[2::-1])} for row in texts]
        data = datasets.Dataset.from_list(texts).map(lambda row: tokenizer(**row))
        train_data, held_out = data, data.select(range(9))
        seq2seq = hf.DataCollatorForSeq2Seq(tokenizer, model)
        options = {
            "processing_class": tokenizer,
            "data_collator": seq2seq if kind == "t5" else hf.DataCollatorForLanguageModeling(tokenizer),
            "callbacks": [hf.EarlyStoppingCallback(early_stopping_patience=3)],
        }  # fmt: skip
    trainer = Trainer(model, args, train_dataset=train_data, eval_dataset=held_out, **options)
    output = trainer.train()
    metrics = trainer.evaluate({"held_out": held_out})
    trainer.save_model(directory / "saved")
    return output.training_loss, metrics, args.run.steps_done


def train_all(directory: Path) -> list[Any]:
    return [train(kind, directory / kind) for kind in KINDS]


@pytest.mark.soak
def test_the_same_bits_at_any_number_of_ranks(tmp_path: Path) -> None:
    """Also check that `from_pretrained` loads the saved model."""
    values = [samestep.spawn(train_all, size, (tmp_path / f"{size}",)) for size in (1, 2, 3)]
    samestep.spawn(train_all, 2, (tmp_path / "parts",), env={"SAMESTEP_MAX_STEPS": "3"})
    values.append(samestep.spawn(train_all, 3, (tmp_path / "parts",)))
    assert values == [values[0]] * 4
    for kind, (_, _, num_steps) in zip(KINDS, values[0], strict=True):
        assert num_steps == 5, "1.5 epochs of 3 steps"
        directories = [tmp_path / name / kind for name in ("1", "2", "3", "parts")]
        assert len({digest(directory) for directory in directories}) == 1
        assert len({digest(directory, "best") for directory in directories}) == 1
    samestep.spawn(load_all, 1, (tmp_path / "2",))


def train_with_callbacks(directory: Path) -> list[Any]:
    """Train until a callback stops it, which only looks at values on rank 0. Returns what the callback has seen."""
    from transformers.trainer_callback import ExportableState

    from samestep.adapters.transformers import Trainer, TrainingArguments

    class Stop(hf.TrainerCallback, ExportableState):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"seen": self.seen}}

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen.append(state.global_step)
            control.should_evaluate = state.is_world_process_zero and state.global_step == 2

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            self.seen.append(logs["eval_loss"] if "eval_loss" in logs else logs["loss"])
            control.should_training_stop = state.is_world_process_zero and state.global_step == 4

    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    args = TrainingArguments(directory, **FIELDS | split | {"logging_steps": 2, "num_train_epochs": 3})
    callback, data = Stop(), {"train_dataset": build_data("gpt2", 22, 0), "eval_dataset": build_data("gpt2", 9, 1)}
    trainer = Trainer(build_model("gpt2", 0.2), args, callbacks=[callback], **data)
    trainer.train(resume_from_checkpoint=str(directory))
    return [*callback.seen, args.run.steps_done]


@pytest.mark.soak
def test_a_callback_on_rank_0_stops_all_ranks(tmp_path: Path) -> None:
    seen = [samestep.spawn(train_with_callbacks, size, (tmp_path / f"{size}",)) for size in (1, 3)]
    samestep.spawn(train_with_callbacks, 2, (tmp_path / "parts",), env={"SAMESTEP_MAX_STEPS": "1"})
    seen.append(samestep.spawn(train_with_callbacks, 2, (tmp_path / "parts",)))
    assert seen == [seen[0]] * 3
    assert [each for each in seen[0] if isinstance(each, int)] == [1, 2, 3, 4, 4]
    assert len(seen[0]) == 8, "two logs, one evaluation"
    assert len({digest(tmp_path / name) for name in ("1", "3", "parts")}) == 1


def load_all(directory: Path) -> None:
    for kind in KINDS:
        load(kind, directory / kind)


def load(kind: str, directory: Path) -> None:
    """Load what was saved, and compare it with the snapshot."""
    from safetensors.torch import load_file

    from samestep.cli import main

    if kind == "lora":
        torch.manual_seed(0)
        model: Any = peft.PeftModel.from_pretrained(build_model("gpt2"), directory / "saved")
    else:
        names = {"bert": hf.BertForMaskedLM, "gpt2": hf.GPT2LMHeadModel, "t5": hf.T5ForConditionalGeneration}
        model = names.get(kind, hf.ViTForImageClassification).from_pretrained(directory / "saved")
    file = directory / "best.safetensors"
    assert main(["export", f"{directory}", f"{file}", "--snapshot", "best"]) == 0
    weights, found = load_file(file), model.state_dict()
    compared = [name for name in weights if name in found and (kind != "lora" or "lora" in name)]
    assert len(compared) >= (2 if kind == "lora" else 10)
    for name in compared:
        torch.testing.assert_close(found[name], weights[name], rtol=0, atol=0)
    if kind == "bert":
        assert len(hf.AutoTokenizer.from_pretrained(directory / "saved")) == 40


def refuse_all(directory: Path) -> list[str]:
    """Use the Trainer wrongly. Returns the errors."""
    from samestep.adapters.transformers import Trainer, TrainingArguments

    errors = []

    def refuse(make: Any) -> None:
        with pytest.raises(samestep.Error) as caught:
            make()
        errors.append(str(caught.value))

    wrong: list[dict[str, Any]] = [
        {"fsdp": "full_shard"}, {"push_to_hub": True, "data_seed": 1}, {"save_steps": 0.1},
        {"auto_find_batch_size": True}, {"hub_token": "hf_abc"},
        {"train_sampling_strategy": "group_by_length"}, {"resume_from_checkpoint": "x"}, {"report_to": "comet_ml"},
    ]  # fmt: skip
    for fields in wrong:
        refuse(lambda fields=fields: TrainingArguments(directory / "refused", use_cpu=True, **fields))
    early = build_model("gpt2")
    args = TrainingArguments(directory / "kept", use_cpu=True, ddp_timeout=3, per_device_train_batch_size=4)
    data = build_data("gpt2", 8, 0)
    refuse(lambda: Trainer(early, args, train_dataset=data))
    refuse(lambda: Trainer(early, hf.TrainingArguments(directory / "theirs", use_cpu=True)))
    refuse(lambda: Trainer(args=args))
    refuse(lambda: Trainer(early, args, callbacks=[hf.ProgressCallback]))
    refuse(lambda: Trainer(early, args, callbacks=[print]))
    trainer = Trainer(args=args, model_init=functools.partial(build_model, "gpt2"))
    refuse(trainer.train)
    refuse(trainer.evaluate)
    trainer.train_dataset = data
    refuse(lambda: trainer.train(resume_from_checkpoint=f"{directory / 'another'}"))
    return errors


def test_what_it_refuses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    errors = samestep.spawn(refuse_all, 1, (tmp_path,))
    words = (
        "has fsdp='full_shard', which samestep.adapters.transformers does not support",
        "has push_to_hub=True, data_seed=1, which", "save_steps is 0.1, a share", "has auto_find_batch_size=True",
        "has hub_token='(hidden)', which",
        "train_sampling_strategy is group_by_length", "resume_from_checkpoint is x, and the run directory is",
        "comet_ml",
        "was built before", "create samestep.adapters.transformers.TrainingArguments", "needs either model",
        "callbacks has ProgressCallback with on_prediction_step, which the Trainer does not call",
        "callbacks has a builtin_function_or_method", "train needs train_dataset", "evaluate needs eval_dataset",
        "another, and the run directory is",
    )  # fmt: skip
    for error, start in zip(errors, words, strict=True):
        assert start in error
    assert "have no effect here: ddp_timeout" in "".join(capfd.readouterr())


def sum_of_losses(outputs: Any, labels: Any, num_items_in_batch: int | None = None) -> Any:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields, further arguments of Trainer
    "plain": ({}, {}),
    "recomputed": ({"activation_checkpointing": True, "logging_strategy": "no"}, {}),
    "workers": ({"dataloader_num_workers": 2, "logging_strategy": "epoch"}, {}),
    "own loss": (
        {},
        {"compute_loss_func": sum_of_losses, "preprocess_logits_for_metrics": lambda logits, _: logits},
    ),
    "bf16": ({"bf16": True}, {}),
    "plateau": ({"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}, {}),
    "best": ({"optim": "adafactor", "save_strategy": "best", "load_best_model_at_end": True}, {}),
    "sgd": ({"optim": "sgd", "dataloader_drop_last": True, "max_grad_norm": 0.0}, {}),
    "stopped": (  # no evaluation is better than the first
        {"learning_rate": 0.0, "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"},
        {"callbacks": [hf.EarlyStoppingCallback(early_stopping_patience=2)]},
    ),
    "tf32": ({"tf32": True}, {}),  # sets torch.backends.fp32_precision
}


def train_with_options(directory: Path) -> dict[str, tuple[int, dict[str, float]]]:
    import transformers.training_args

    from samestep.adapters.transformers import Trainer, TrainingArguments

    transformers.training_args.is_torch_tf32_available = lambda: True  # without a GPU, transformers refuses tf32
    found = {}
    for name, (fields, arguments) in OPTIONS.items():
        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "eval_strategy": "epoch"}
        args = TrainingArguments(directory / name, **FIELDS | sizes | fields)
        data = {"train_dataset": build_data("gpt2", NUM_SAMPLES, 0), "eval_dataset": build_data("gpt2", 8, 1)}
        trainer = Trainer(build_model("gpt2", dropout=0.1), args, compute_metrics=score, **data, **arguments)
        found[name] = trainer.train().global_step, trainer.evaluate()
    return found


@pytest.mark.soak
def test_options(tmp_path: Path) -> None:
    """Options that only change how something is computed give the same values."""
    found = samestep.spawn(train_with_options, 1, (tmp_path,))
    assert {name: steps for name, (steps, _) in found.items() if steps != 6} == {"sgd": 4, "stopped": 3}
    plain = found["plain"][1]
    for name in ("recomputed", "workers"):
        assert found[name][1] == plain
    for name in ("own loss", "bf16", "tf32"):
        assert found[name][1]["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-3)
    assert json.loads((tmp_path / "tf32" / "run.json").read_text())["numbers"]["precision"] == "tf32"
    losses = [row["eval_loss"] for row in read_rows(tmp_path / "best") if "eval_loss" in row]
    assert losses[-1] == min(losses)
