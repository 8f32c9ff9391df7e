"""Lightning: checkpoints by step, and `ckpt_path="last"`.

The variant "stateful" uses torchdata's loader and sampler, whose state is in the checkpoints; "between" uses them, too,
and saves every 11 steps, which is never at the end of an epoch.
"""

import logging

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from task import (
    DIRECTORY,
    LR,
    NUM_EPOCHS,
    PER_PROCESS,
    RANK,
    SAVE_EVERY_STEPS,
    VARIANT,
    WORLD_SIZE,
    Numbers,
    build_model,
    finish_run,
    finish_step,
    leave,
)
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        source, targets, _ = batch
        return F.mse_loss(self.model(source), targets)

    def on_train_batch_end(self, outputs: object, batch: list[torch.Tensor], batch_idx: int) -> None:
        finish_step(self.trainer.global_step, batch[2], self.model)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=LR)


lightning.seed_everything(0, verbose=False)
save_every_steps = 11 if VARIANT == "between" else SAVE_EVERY_STEPS
checkpoints = ModelCheckpoint(
    DIRECTORY / "checkpoints", save_last=True, save_top_k=-1, every_n_train_steps=save_every_steps
)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=WORLD_SIZE,
    strategy="ddp",
    max_epochs=NUM_EPOCHS,
    callbacks=[checkpoints],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
data = Numbers()
if VARIANT in ("stateful", "between"):
    sampler = StatefulDistributedSampler(data, num_replicas=WORLD_SIZE, rank=RANK)
    loader = StatefulDataLoader(data, batch_size=PER_PROCESS, sampler=sampler)
else:
    loader = DataLoader(data, batch_size=PER_PROCESS, shuffle=True)
trainer.fit(module, loader, ckpt_path="last" if list((DIRECTORY / "checkpoints").glob("*.ckpt")) else None)
finish_run(module.model)
leave()
