"""A GAN: two passes over each step, the second with the critic already updated."""

import torch
import torch.nn.functional as F
from torch import nn

import samestep

run = samestep.Run("runs/gan", batch_size=24, micro_batch_size=4, log_every=1)
images = torch.utils.data.TensorDataset(torch.randn(100, 6), torch.zeros(100))
G = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
D = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.LeakyReLU(), nn.Linear(8, 1))
opt_g, opt_d = (torch.optim.Adam(m.parameters(), 2e-3, betas=(0.5, 0.999)) for m in (G, D))
run.prepare(G=G, D=D, opt_g=opt_g, opt_d=opt_d)
fixed_noise = torch.randn(3, 2)
for epoch in run.epochs(images, 3):
    for step in epoch:
        for x, _ in step:
            fake = G(torch.randn(len(x), 2, device=x.device)).detach()
            step.backward(F.softplus(-D(x)).mean() + F.softplus(D(fake)).mean(), model=D)
        opt_d.step()
        if step.number % 2 == 0:
            for x, _ in step:
                step.backward(F.softplus(-D(G(torch.randn(len(x), 2, device=x.device)))).mean(), model=G)
            opt_g.step()
    with torch.no_grad():
        run.log({"sample": G(fixed_noise)[0, 0].item()})
