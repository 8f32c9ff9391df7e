"""Accelerate, as in its guide to checkpoints: `save_state`, `load_state` and `skip_first_batches`.

The variant "seedable" uses Accelerate's seedable sampler, and "generator" gives the loader a generator of its own, too.
In the variant "accumulate", one process also adds the gradients of two batches of 16 samples, as two processes do.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from task import (
    DIRECTORY,
    LR,
    NUM_EPOCHS,
    PER_PROCESS,
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

project = ProjectConfiguration(project_dir=DIRECTORY, automatic_checkpoint_naming=True)
dataloader_config = DataLoaderConfiguration(use_seedable_sampler=VARIANT != "")
num_batches = 2 if VARIANT == "accumulate" and WORLD_SIZE == 1 else 1  # per step
accelerator = Accelerator(
    cpu=True,
    project_config=project,
    dataloader_config=dataloader_config,
    gradient_accumulation_steps=num_batches,
)
set_seed(0)
model = build_model()
optimizer = torch.optim.Adam(model.parameters(), lr=LR)
generator = torch.Generator() if VARIANT in ("generator", "accumulate") else None
loader = DataLoader(Numbers(), batch_size=PER_PROCESS // num_batches, shuffle=True, generator=generator)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps_done = 0
saved = sorted((DIRECTORY / "checkpoints").glob("checkpoint_*"), key=lambda path: int(path.name.rpartition("_")[2]))
if saved:
    accelerator.load_state(str(saved[-1]))
    project.iteration = int(saved[-1].name.rpartition("_")[2]) + 1
    steps_done = project.iteration * SAVE_EVERY_STEPS
steps_per_epoch = len(loader) // num_batches
for epoch in range(steps_done // steps_per_epoch, NUM_EPOCHS):
    loader.set_epoch(epoch)
    skipped = steps_done % steps_per_epoch * num_batches
    rest = accelerator.skip_first_batches(loader, skipped) if skipped else loader
    used = []
    for source, targets, indices in rest:
        used.append(indices)
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(source), targets))
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        steps_done += 1
        if steps_done % SAVE_EVERY_STEPS == 0:
            accelerator.save_state()
        finish_step(steps_done, torch.cat(used), accelerator.unwrap_model(model))
        used.clear()
finish_run(accelerator.unwrap_model(model))
leave()
