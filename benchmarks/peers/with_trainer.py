"""Hugging Face Trainer: checkpoints by step, and `resume_from_checkpoint`."""

from typing import Any

import torch
import torch.nn.functional as F
from task import (
    DIRECTORY,
    LR,
    NUM_EPOCHS,
    PER_PROCESS,
    SAVE_EVERY_STEPS,
    Numbers,
    build_model,
    finish_run,
    finish_step,
    leave,
)
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, set_seed


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()
        self.indices = torch.empty(0)

    def forward(self, source: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor) -> dict[str, torch.Tensor]:
        self.indices = indices
        return {"loss": F.mse_loss(self.model(source), targets)}


class Recorder(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        finish_step(state.global_step, model.indices, model.model)


def collate(samples: list[tuple[torch.Tensor, torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    source, targets, indices = zip(*samples, strict=True)
    return {"source": torch.stack(source), "targets": torch.stack(targets), "indices": torch.tensor(indices)}


set_seed(0)
model = Model()
arguments = TrainingArguments(
    str(DIRECTORY / "checkpoints"),
    use_cpu=True,
    per_device_train_batch_size=PER_PROCESS,
    num_train_epochs=NUM_EPOCHS,
    save_steps=SAVE_EVERY_STEPS,
    learning_rate=LR,
    seed=0,
    report_to=[],
    disable_tqdm=True,
    remove_unused_columns=False,
)
trainer = Trainer(model, arguments, data_collator=collate, train_dataset=Numbers(), callbacks=[Recorder()])
trainer.train(
    resume_from_checkpoint=get_last_checkpoint(arguments.output_dir) if list(DIRECTORY.glob("checkpoints/*")) else None
)
finish_run(model.model)
leave()
