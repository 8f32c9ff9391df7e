"""samestep: snapshots by step."""

import torch
import torch.nn.functional as F
from task import BATCH_SIZE, DIRECTORY, LR, NUM_EPOCHS, SAVE_EVERY_STEPS, Numbers, build_model, finish_run, finish_step

import samestep

run = samestep.Run(DIRECTORY / "run", batch_size=BATCH_SIZE, micro_batch_size=16, snapshot_every=SAVE_EVERY_STEPS)
model = build_model()
optimizer = torch.optim.Adam(model.parameters(), lr=LR)
run.prepare(model=model, optimizer=optimizer)
for epoch in run.epochs(Numbers(), NUM_EPOCHS):
    for step in epoch:
        used = []
        for source, targets, indices in step:
            step.backward(F.mse_loss(model(source), targets))
            used.append(indices)
        optimizer.step()
        finish_step(step.number + 1, torch.cat(used), model)
finish_run(model)
