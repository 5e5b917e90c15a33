"""Trains a Lightning module on MNIST."""

import os
import pathlib

import lightning as L
import psjobs.lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

DATA = pathlib.Path(os.environ.get("PSJOB_DATA") or pathlib.Path.home() / ".cache/psjobs/mnist")


def load(images: str, labels: str) -> TensorDataset:
    read = lambda name: torch.frombuffer(bytearray((DATA / name).read_bytes()), dtype=torch.uint8)
    return TensorDataset(read(images)[16:].view(-1, 784).float() / 255, read(labels)[8:].long())


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    L.seed_everything(1)
    train = DataLoader(load("train-images-idx3-ubyte", "train-labels-idx1-ubyte"), batch_size=32, shuffle=True)
    test = DataLoader(load("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"), batch_size=1000)
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", strategy=psjobs.lightning.Strategy(), logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(), train, test)
    print(f"accuracy {trainer.callback_metrics['accuracy'].item():.4f}")
