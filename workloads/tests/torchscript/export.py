"""Writes the modules beside this file, with PyTorch 2.11: python3 export.py"""
import torch
from torch import nn

torch.manual_seed(1)

# A batch norm has buffers, a dropout behaves otherwise while training.
digits = nn.Sequential(
    nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 6 * 6, 10), nn.LogSoftmax(-1),
)
torch.jit.script(digits).save("digits.pt")

line = nn.Linear(2, 1)
torch.jit.script(line).save("line.pt")
torch.jit.script(line.half()).save("half.pt")

digits.eval()
torch.jit.freeze(torch.jit.script(digits)).save("frozen.pt")
torch.save(digits.state_dict(), "state_dict.pt")
