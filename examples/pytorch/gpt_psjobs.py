"""Trains a small GPT, written from scratch, to continue a text letter by letter."""

import argparse
import os
import pathlib
import time

import psjobs
import torch
from torch import nn
from torch.nn import functional as F

TEXT = pathlib.Path(os.environ.get("PSJOB_DATA") or pathlib.Path.home() / ".cache/psjobs/text") / "text.txt"


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, letters: int, length: int, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(letters, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))


class Windows(torch.utils.data.Dataset):
    """Stretches of a text, and the same a letter later."""

    def __init__(self, data: torch.Tensor, length: int) -> None:
        self.data, self.length = data, length

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.data[index * self.length :][: self.length + 1]
        return window[:-1], window[1:]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, loader: torch.utils.data.DataLoader) -> float:
    model.eval()
    losses = [loss_of(model, x, y).item() for x, y in loader]
    model.train()
    return sum(losses) / len(losses)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--letters", type=int, default=400_000)
args = parser.parse_args()

text = TEXT.read_text(encoding="utf-8", errors="replace")[: args.letters]
alphabet = sorted(set(text))
index = {letter: number for number, letter in enumerate(alphabet)}
data = torch.tensor([index[letter] for letter in text])
split = int(0.9 * len(data))

job = psjobs.join()
model = GPT(len(alphabet), args.length)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
train = torch.utils.data.DataLoader(Windows(data[:split], args.length), batch_size=16, shuffle=True, drop_last=True)
held_out = torch.utils.data.DataLoader(Windows(data[split:], args.length), batch_size=64)
model, optimizer = job.attach(model, optimizer)
train = job.share(train)

step, began = 0, time.time()
while step < args.steps:
    for x, y in train:
        loss = loss_of(model, x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.time() - began:.1f} s", flush=True)
        if step == args.steps:
            break
print(f"held-out loss {evaluate(model, held_out):.4f}")
job.report({"loss": evaluate(model, held_out)})
