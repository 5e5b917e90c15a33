"""Trains a convolutional network on MNIST, in PyTorch alone."""

import argparse
import os
import pathlib

import psjobs
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

DATA = pathlib.Path(os.environ.get("PSJOB_DATA") or pathlib.Path.home() / ".cache/psjobs/mnist")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, stride=2)
        self.norm = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(32 * 6 * 6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = F.relu(self.conv2(x))
        return self.fc(self.dropout(x.flatten(1)))


def load(images: str, labels: str) -> TensorDataset:
    read = lambda name: torch.frombuffer(bytearray((DATA / name).read_bytes()), dtype=torch.uint8)
    x = read(images)[16:].view(-1, 1, 28, 28).float() / 255
    return TensorDataset((x - 0.1307) / 0.3081, read(labels)[8:].long())


def train(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    model.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in loader)
    return right / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    job = psjobs.join()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(
        load("train-images-idx3-ubyte", "train-labels-idx1-ubyte"), batch_size=args.batch_size, shuffle=True
    )
    test_loader = DataLoader(load("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"), batch_size=1000)

    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    model, optimizer = job.attach(model, optimizer)
    train_loader = job.share(train_loader)
    for epoch in range(args.epochs):
        train(model, train_loader, optimizer, device)
        print(f"epoch {epoch + 1}: accuracy {accuracy(model, test_loader, device):.4f}", flush=True)
    job.report({"accuracy": accuracy(model, test_loader, device)})


if __name__ == "__main__":
    main()
