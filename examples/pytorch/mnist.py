"""Trains a small network on MNIST, in PyTorch alone: what mnist_psjobs.py makes a trainer of a job, in five lines."""

import os
import pathlib

import torch
from torch import nn

DATA = pathlib.Path(os.environ.get("PSJOB_DATA") or pathlib.Path.home() / ".cache/psjobs/mnist")


def read(name: str) -> torch.Tensor:
    """The numbers of an idx file, as `make mnist` puts them there."""
    data = torch.frombuffer(bytearray((DATA / name).read_bytes()), dtype=torch.uint8)
    return data[8:].long() if "labels" in name else data[16:].view(-1, 28 * 28).float() / 255


torch.manual_seed(1)
model = nn.Sequential(nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 10))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
train = torch.utils.data.TensorDataset(read("train-images-idx3-ubyte"), read("train-labels-idx1-ubyte"))
for x, y in torch.utils.data.DataLoader(train, batch_size=32, shuffle=True):
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    opt.step()

with torch.no_grad():
    predicted = model(read("t10k-images-idx3-ubyte")).argmax(1)
accuracy = (predicted == read("t10k-labels-idx1-ubyte")).float().mean().item()
print(f"accuracy {accuracy:.4f}")
