"""Runs circle.py as two trainers, on a cluster or, with `here`, on this machine, and looks at the model."""

import sys

import psjobs
import torch

training = {"consistency": {"mode": "Sync"}, "optimizer": {"type": "Adam", "learningRate": 0.01}}
script = "examples/pytorch/circle.py"
if "here" in sys.argv:
    job = psjobs.run(script, trainers=2, training=training)
else:
    job = psjobs.submit(script, trainers=2, training=training)
print(job.wait()["metrics"], *job.logs(index=1), sep="\n")
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
model.load_state_dict(job.model())
print("the centre is inside:", model(torch.zeros(1, 2)).argmax().item() == 1)
