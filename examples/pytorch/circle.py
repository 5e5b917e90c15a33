"""Learns which points of a square lie in a circle: a script that needs no data, alone, in a job here and on a cluster."""

import psjobs
import torch
from torch import nn

points = torch.rand(20_000, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
inside = (points.norm(dim=1) < 0.8).long()
job = psjobs.join()
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
model, opt = job.attach(model, torch.optim.Adam(model.parameters(), lr=0.01))
for x, y in job.batches(torch.utils.data.TensorDataset(points, inside), batch_size=32, epochs=3):
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
accuracy = (model(points).argmax(1) == inside).float().mean().item()
job.report({"accuracy": accuracy})
print(f"trainer {job.trainer} of {job.trainers}: accuracy {accuracy:.3f}")
