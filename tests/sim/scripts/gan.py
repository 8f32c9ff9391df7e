"""A GAN: two passes over each step, the second with the critic already updated."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

run = samestep.Run("runs/gan", batch_size=24, micro_batch_size=4, log_every=1)
images = TensorDataset(torch.randn(110, 6), torch.zeros(110))
G = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
D = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.LeakyReLU(), nn.Linear(8, 1))
opt_g, opt_d = (torch.optim.Adam(m.parameters(), 2e-3, betas=(0.5, 0.999)) for m in (G, D))
run.prepare(G=G, D=D, opt_g=opt_g, opt_d=opt_d)
for epoch in run.epochs(images, 3, num_workers=0):
    for step in epoch:
        print("step", step.number)
        for real, _ in step:
            fake = G(torch.randn(len(real), 2)).detach()
            step.backward(F.softplus(-D(real)).mean() + F.softplus(D(fake)).mean(), model=D)
        opt_d.step()
        for real, _ in step:
            step.backward(F.softplus(-D(G(torch.randn(len(real), 2)))).mean(), model=G)
        opt_g.step()
